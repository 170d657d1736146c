"""The command line: an embedded supervisor for one machine, and a gRPC client for everything else."""
