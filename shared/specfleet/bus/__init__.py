"""The work plane: JetStream streams of references, and an in-memory twin with the same behaviour."""
