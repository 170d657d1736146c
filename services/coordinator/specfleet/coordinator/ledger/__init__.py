"""The ledger: the only truth about runs, tasks, samples, windows and checkpoints. SQLAlchemy Core on SQLite or Postgres."""

from specfleet.coordinator.ledger.engine import Ledger

__all__ = ["Ledger"]
