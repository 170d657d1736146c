"""Runs the migrations on the connection that ledger.engine hands over (there is no alembic.ini)."""

from alembic import context

from specfleet.coordinator.ledger.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    # SQLite cannot alter most things in place; batch mode copies the table.
    render_as_batch=True,
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
