"""Prometheus metrics of the gate."""

from prometheus_client import Counter, Histogram

JOBS = Counter("specfleet_gate_jobs", "Gate jobs ended, by state.", ["state"])
EXPORTS = Counter("specfleet_gate_exports", "Drafts exported.")
JOB_SECONDS = Histogram(
    "specfleet_gate_job_seconds", "One gate job.", buckets=(5, 15, 30, 60, 120, 300, 600, 1800, 3600)
)
