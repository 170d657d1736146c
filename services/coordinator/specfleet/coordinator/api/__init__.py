"""The gRPC services of the coordinator: thin shells that parse, call the ledger once, wake loops, and answer."""
