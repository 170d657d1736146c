"""Training strategies: one folder each, one table."""
