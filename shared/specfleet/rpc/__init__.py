"""gRPC plumbing every service shares: server, client, health, reflection, rich errors."""
