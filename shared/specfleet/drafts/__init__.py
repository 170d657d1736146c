"""Draft architectures, the reference decoder that proves them, and their export layouts."""
