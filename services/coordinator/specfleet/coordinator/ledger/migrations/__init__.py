"""Alembic migrations of the ledger, run when it is opened."""
