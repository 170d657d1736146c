"""The trainer service: an agent per node, ranks that train windows of references, checkpoints that get settled."""
