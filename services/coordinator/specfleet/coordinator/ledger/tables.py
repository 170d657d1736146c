"""Every table of the ledger, for SQLite and Postgres alike. Migrations (ledger/migrations) create exactly these.

Times end in `_ms` (unix milliseconds) or `_us`. `run` is runs.id, a small integer: it is repeated on every row.
"""

from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    text,
)

metadata = MetaData()

# SQLite gives rowid (auto-increment) semantics only to a column declared INTEGER.
_Id = BigInteger().with_variant(Integer, "sqlite")


def _int(name: str, default: int = 0) -> Column[int]:
    return Column(name, BigInteger, nullable=False, server_default=str(default))


def _text(name: str, default: str = "") -> Column[str]:
    return Column(name, Text, nullable=False, server_default=default)


def _key(name: str, kind: Any = BigInteger) -> Column[Any]:
    return Column(name, kind, primary_key=True, autoincrement=False)


runs = Table(
    "runs",
    metadata,
    Column("id", _Id, primary_key=True),
    Column("run_id", Text, nullable=False, unique=True),
    _text("state"),
    _text("reason"),
    # What the user asked for: run, pause or cancel.
    _text("wanted", "run"),
    _text("strategy"),
    _text("target"),
    _text("config_yaml"),
    Column("contract", LargeBinary, nullable=False),
    _text("contract_hash"),
    _text("prompt_set"),
    _text("prompt_set_uri"),
    _text("output_dir"),
    _int("num_prompts"),
    _int("bytes_per_token"),
    # Tokens of the largest window this run can ever need: the sum of the global_batch longest prompts.
    _int("window_tokens"),
    _int("total_steps"),
    # Position up to which tasks exist as rows; epochs are written in chunks when they come near.
    _int("ingested"),
    _int("generation"),
    # Ranks of the generation opened last; 0 when none is attached.
    _int("attached_world"),
    _int("trained_step"),
    _int("checkpoint_step"),
    _int("captured_tokens"),
    _int("trained_tokens"),
    _text("store"),
    # JSON: facts of the draft, recorded by the first join; metrics of the newest acked step.
    _text("identity"),
    _text("metrics"),
    # Launches in a row that ended without a new step, and when the next one may start.
    _int("fruitless_launches"),
    _int("next_launch_ms"),
    # Since when no capture worker has been alive; 0 while one is.
    _int("starved_since_ms"),
    # Set by CommitCheckpoint(final): nothing is trained after it.
    _int("final"),
    _int("drain_deadline_ms"),
    _int("submitted_ms"),
    _int("updated_ms"),
)

prompt_sets = Table(
    "prompt_sets",
    metadata,
    Column("digest", Text, primary_key=True),
    _text("uri"),
    _int("num_prompts"),
    _int("num_tokens"),
    _int("max_tokens"),
)

tasks = Table(
    "tasks",
    metadata,
    Column("run", BigInteger, ForeignKey("runs.id"), primary_key=True, autoincrement=False),
    # Position in the run: epoch-major, then the epoch's permutation. Windows are cut and prompts dispatched in this order.
    _key("seq"),
    _int("epoch"),
    _int("prompt_index"),
    _int("num_tokens"),
    _text("state", "READY"),
    _int("attempt"),
    # SAMPLE failures charged to the prompt.
    _int("failures"),
    # NULL: nothing is reserved. Otherwise bytes held in the pool from dispatch on.
    Column("reserved_bytes", BigInteger),
    # Set while the current attempt is published and not claimed.
    Column("dispatched_ms", BigInteger),
    # Set while LEASED.
    Column("lease_ms", BigInteger),
    Column("worker", Text),
    # Order of arrival among captured samples; NULL before.
    Column("arrived_us", BigInteger),
    # Window the task is planned for, or was trained in (current lineage).
    Column("step", BigInteger),
    _text("reason"),
    UniqueConstraint("run", "epoch", "prompt_index", name="uq_tasks_prompt"),
    sqlite_with_rowid=False,
)
kept = Table(
    "kept",
    metadata,
    # Features of a trained task, held for the same prompt's next epoch (flow.reuse_bytes).
    _key("run"),
    _key("prompt_index"),
    # The task and attempt whose `samples` row describes them.
    _int("seq"),
    _int("attempt"),
    _int("num_bytes"),
    sqlite_with_rowid=False,
)
Index("ix_tasks_state", tasks.c.run, tasks.c.state, tasks.c.seq)
# Partial: at any time only the few tasks in flight are in these.
for _name, _column in (("reserved", "reserved_bytes"), ("dispatched", "dispatched_ms"), ("lease", "lease_ms")):
    _where = text(f"{_column} IS NOT NULL")
    Index(f"ix_tasks_{_name}", tasks.c.run, tasks.c[_column], sqlite_where=_where, postgresql_where=_where)

# Tasks per state, changed in the same transaction as the tasks: counting ten million rows is for `ledger verify` only.
task_counts = Table(
    "task_counts", metadata, _key("run"), _key("epoch"), _key("state", Text), _int("n"), sqlite_with_rowid=False
)

# One row per change of a task, for `sample explain`.
transitions = Table(
    "transitions",
    metadata,
    _key("run"),
    _key("seq"),
    # Unique and rising over the whole ledger.
    _key("at_us"),
    _text("state"),
    _int("attempt"),
    _text("detail"),
    sqlite_with_rowid=False,
)

# References of captured samples; a row goes when the deletion of its objects is confirmed.
samples = Table(
    "samples",
    metadata,
    _key("run"),
    _key("seq"),
    _key("attempt"),
    _text("store"),
    _int("num_tokens"),
    _int("num_loss_tokens"),
    _int("num_bytes"),
    _text("worker"),
    _int("captured_ms"),
    # SampleRef, serialised.
    Column("ref", LargeBinary, nullable=False),
    sqlite_with_rowid=False,
)

workers = Table(
    "workers",
    metadata,
    Column("worker_id", Text, primary_key=True),
    _text("host"),
    _int("pid"),
    _text("engine"),
    _text("engine_version"),
    _text("bound_target"),
    _text("state"),
    # Contract it attested, and contract it was told to serve.
    _text("contract_hash"),
    _text("assigned_hash"),
    _text("quarantined"),
    _text("store"),
    _int("capacity_bytes"),
    _int("used_bytes"),
    _text("breaker"),
    _text("numbers"),
    _int("registered_ms"),
    _int("seen_ms"),
    # 1 after its heartbeat timed out, until it is heard of again.
    _int("lost"),
)

agents = Table(
    "agents",
    metadata,
    Column("agent_id", Text, primary_key=True),
    _text("host"),
    _int("pid"),
    _int("slots"),
    _text("device"),
    _text("versions"),
    _int("registered_ms"),
    _int("seen_ms"),
    _int("lost"),
)

launches = Table(
    "launches",
    metadata,
    Column("launch_id", Text, primary_key=True),
    Column("run", BigInteger, nullable=False, index=True),
    _int("world"),
    # ASSIGNED, JOINED, ENDED.
    _text("state", "ASSIGNED"),
    _int("generation"),
    _text("rendezvous"),
    _int("exit_code"),
    _text("message"),
    _int("created_ms"),
    _int("ended_ms"),
)

launch_nodes = Table(
    "launch_nodes",
    metadata,
    _key("launch_id", Text),
    _key("node_rank"),
    _text("agent_id"),
    _int("nproc"),
    # ASSIGNED, RUNNING, EXITED.
    _text("state", "ASSIGNED"),
)

generations = Table(
    "generations",
    metadata,
    _key("run"),
    _key("generation"),
    _text("launch_id"),
    _int("world"),
    _int("restored_step"),
    _text("checkpoint_uri"),
    _text("checkpoint_digest"),
    _int("opened_ms"),
    _int("closed_ms"),
    _text("close_reason"),
)

windows = Table(
    "windows",
    metadata,
    _key("run"),
    _key("generation"),
    _key("step"),
    _int("epoch"),
    # PLANNED, TRAINED, ABANDONED.
    _text("state", "PLANNED"),
    _int("revision"),
    # 1 while a member's features are lost and being captured again.
    _int("waiting"),
    _int("world"),
    _int("num_samples"),
    _int("num_tokens"),
    _int("planned_ms"),
    _int("trained_ms"),
)
Index("ix_windows_state", windows.c.run, windows.c.state, windows.c.step)

window_members = Table(
    "window_members",
    metadata,
    _key("run"),
    _key("generation"),
    _key("step"),
    _key("seq"),
    _int("epoch"),
    _int("prompt_index"),
    _int("attempt"),
    _int("rank"),
    _int("micro"),
    _int("position"),
    sqlite_with_rowid=False,
)
Index("ix_members_task", window_members.c.run, window_members.c.seq)

acks = Table(
    "acks",
    metadata,
    _key("run"),
    _key("generation"),
    _key("step"),
    _key("rank"),
    _text("digest"),
    _int("revision"),
    _int("num_tokens"),
    _int("num_loss_tokens"),
    Column("step_s", Float, nullable=False, server_default="0"),
    Column("wait_s", Float, nullable=False, server_default="0"),
    _int("at_ms"),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    _key("run"),
    _key("generation"),
    _key("step"),
    _text("uri"),
    _text("digest"),
    _int("final"),
    _int("committed_ms"),
)

# Objects that may be deleted. A row goes when a worker confirms it; until then its bytes count as reserved.
outbox = Table(
    "outbox",
    metadata,
    Column("id", _Id, primary_key=True),
    Column("run", BigInteger, nullable=False, index=True),
    _int("seq"),
    _int("attempt"),
    _text("store"),
    # Keys, one a line.
    _text("keys"),
    _int("num_bytes"),
    _int("created_ms"),
    _int("published_ms"),
    _int("publications"),
    # Ids are never used twice, so that a late confirmation cannot delete a newer row.
    sqlite_autoincrement=True,
)
Index("ix_outbox_published", outbox.c.published_ms)

gate_reports = Table(
    "gate_reports",
    metadata,
    Column("gate_id", Text, primary_key=True),
    _text("run_id"),
    _text("verdict"),
    _text("report"),
    _int("recorded_ms"),
)
