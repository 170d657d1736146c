"""Prometheus metrics of the coordinator."""

from prometheus_client import Counter, Gauge, Histogram

TASKS = Gauge("specfleet_tasks", "Tasks by state", ["run", "state"])
CONSERVED = Gauge("specfleet_ledger_conserved", "1 while ingested tasks equal the sum over all states", ["run"])
IN_FLIGHT_BYTES = Gauge("specfleet_in_flight_bytes", "Bytes reserved in the pool", ["run"])
IN_FLIGHT_SAMPLES = Gauge("specfleet_in_flight_samples", "Samples dispatched or captured and not yet trained", ["run"])
HIGH_BYTES = Gauge("specfleet_high_bytes", "High mark in bytes", ["run"])
TRAINED_STEP = Gauge("specfleet_trained_step", "Newest trained step of the surviving lineage", ["run"])
OUTBOX_OPEN = Gauge("specfleet_outbox_open", "Deletions that are not confirmed", ["run"])
WORKERS_LIVE = Gauge("specfleet_capture_workers_live", "Capture workers heard of lately")
AGENTS_LIVE = Gauge("specfleet_trainer_agents_live", "Trainer agents heard of lately")

DISPATCHED = Counter("specfleet_dispatched", "Prompts put on the bus", ["run"])
CLAIMS = Counter("specfleet_claims", "Claims by outcome", ["outcome"])
INGESTED = Counter("specfleet_ingested", "Sample references by outcome", ["run", "outcome"])
ACKS = Counter("specfleet_acks", "Step acks by outcome", ["outcome"])
LEASES_EXPIRED = Counter("specfleet_leases_expired", "Leases taken back", ["run"])
LOST = Counter("specfleet_lost_samples", "Samples whose features were lost", ["run"])
LOOP_ERRORS = Counter("specfleet_loop_errors", "Passes of a loop that failed and were repeated", ["loop"])
ACK_SECONDS = Histogram("specfleet_ack_seconds", "Time to answer one AckStep")
INGEST_SECONDS = Histogram("specfleet_ingest_seconds", "Time to commit one batch of references")
CLAIM_SECONDS = Histogram("specfleet_claim_seconds", "Time to answer one ClaimTasks")
