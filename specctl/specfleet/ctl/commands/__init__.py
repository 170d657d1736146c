"""One module per group of commands; each imports what it needs only when it runs."""
