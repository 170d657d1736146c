"""How a service is watched and how it lives and dies: structured logs, metrics and health endpoints, signals."""
