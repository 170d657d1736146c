"""The coordinator: owns the ledger and decides who captures what, which samples make a window, and what may be deleted."""
