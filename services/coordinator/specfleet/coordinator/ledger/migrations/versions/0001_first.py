"""The first schema: runs, tasks, samples, fleet, generations, windows, checkpoints, outbox, history."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# SQLite gives auto-increment only to INTEGER.
_ID = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def _int(name: str, default: int = 0) -> "sa.Column[int]":
    return sa.Column(name, sa.BigInteger, nullable=False, server_default=str(default))


def _text(name: str, default: str = "") -> "sa.Column[str]":
    return sa.Column(name, sa.Text, nullable=False, server_default=default)


def _keys(*names: str) -> "list[sa.Column[int]]":
    return [sa.Column(name, sa.BigInteger, primary_key=True, autoincrement=False) for name in names]


def _work() -> None:
    op.create_table(
        "runs",
        sa.Column("id", _ID, primary_key=True),
        sa.Column("run_id", sa.Text, nullable=False, unique=True),
        _text("state"),
        _text("reason"),
        _text("wanted", "run"),
        _text("strategy"),
        _text("target"),
        _text("config_yaml"),
        sa.Column("contract", sa.LargeBinary, nullable=False),
        _text("contract_hash"),
        _text("prompt_set"),
        _text("prompt_set_uri"),
        _text("output_dir"),
        _int("num_prompts"),
        _int("bytes_per_token"),
        _int("window_tokens"),
        _int("total_steps"),
        _int("ingested"),
        _int("generation"),
        _int("attached_world"),
        _int("trained_step"),
        _int("checkpoint_step"),
        _int("captured_tokens"),
        _int("trained_tokens"),
        _text("store"),
        _text("identity"),
        _text("metrics"),
        _int("fruitless_launches"),
        _int("next_launch_ms"),
        _int("starved_since_ms"),
        _int("final"),
        _int("drain_deadline_ms"),
        _int("submitted_ms"),
        _int("updated_ms"),
    )
    op.create_table(
        "prompt_sets",
        sa.Column("digest", sa.Text, primary_key=True),
        _text("uri"),
        _int("num_prompts"),
        _int("num_tokens"),
        _int("max_tokens"),
    )
    op.create_table(
        "tasks",
        sa.Column("run", sa.BigInteger, sa.ForeignKey("runs.id"), primary_key=True, autoincrement=False),
        *_keys("seq"),
        _int("epoch"),
        _int("prompt_index"),
        _int("num_tokens"),
        _text("state", "READY"),
        _int("attempt"),
        _int("failures"),
        sa.Column("reserved_bytes", sa.BigInteger),
        sa.Column("dispatched_ms", sa.BigInteger),
        sa.Column("lease_ms", sa.BigInteger),
        sa.Column("worker", sa.Text),
        sa.Column("arrived_us", sa.BigInteger),
        sa.Column("step", sa.BigInteger),
        _text("reason"),
        sa.UniqueConstraint("run", "epoch", "prompt_index", name="uq_tasks_prompt"),
        sqlite_with_rowid=False,
    )
    where = sa.text("dispatched_ms IS NOT NULL")
    op.create_index(
        "ix_tasks_dispatched", "tasks", ["run", "dispatched_ms"], sqlite_where=where, postgresql_where=where
    )
    where = sa.text("lease_ms IS NOT NULL")
    op.create_index("ix_tasks_lease", "tasks", ["run", "lease_ms"], sqlite_where=where, postgresql_where=where)
    where = sa.text("reserved_bytes IS NOT NULL")
    op.create_index("ix_tasks_reserved", "tasks", ["run", "reserved_bytes"], sqlite_where=where, postgresql_where=where)
    op.create_index("ix_tasks_state", "tasks", ["run", "state", "seq"])
    op.create_table(
        "task_counts",
        *_keys("run", "epoch"),
        sa.Column("state", sa.Text, primary_key=True),
        _int("n"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "transitions",
        *_keys("run", "seq", "at_us"),
        _text("state"),
        _int("attempt"),
        _text("detail"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "samples",
        *_keys("run", "seq", "attempt"),
        _text("store"),
        _int("num_tokens"),
        _int("num_loss_tokens"),
        _int("num_bytes"),
        _text("worker"),
        _int("captured_ms"),
        sa.Column("ref", sa.LargeBinary, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "kept",
        *_keys("run", "prompt_index"),
        _int("seq"),
        _int("attempt"),
        _int("num_bytes"),
        sqlite_with_rowid=False,
    )


def _fleet() -> None:
    op.create_table(
        "workers",
        sa.Column("worker_id", sa.Text, primary_key=True),
        _text("host"),
        _int("pid"),
        _text("engine"),
        _text("engine_version"),
        _text("bound_target"),
        _text("state"),
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
        _int("lost"),
    )
    op.create_table(
        "agents",
        sa.Column("agent_id", sa.Text, primary_key=True),
        _text("host"),
        _int("pid"),
        _int("slots"),
        _text("device"),
        _text("versions"),
        _int("registered_ms"),
        _int("seen_ms"),
        _int("lost"),
    )
    op.create_table(
        "launches",
        sa.Column("launch_id", sa.Text, primary_key=True),
        sa.Column("run", sa.BigInteger, nullable=False),
        _int("world"),
        _text("state", "ASSIGNED"),
        _int("generation"),
        _text("rendezvous"),
        _int("exit_code"),
        _text("message"),
        _int("created_ms"),
        _int("ended_ms"),
    )
    op.create_index("ix_launches_run", "launches", ["run"])
    op.create_table(
        "launch_nodes",
        sa.Column("launch_id", sa.Text, primary_key=True),
        *_keys("node_rank"),
        _text("agent_id"),
        _int("nproc"),
        _text("state", "ASSIGNED"),
    )


def _training() -> None:
    op.create_table(
        "generations",
        *_keys("run", "generation"),
        _text("launch_id"),
        _int("world"),
        _int("restored_step"),
        _text("checkpoint_uri"),
        _text("checkpoint_digest"),
        _int("opened_ms"),
        _int("closed_ms"),
        _text("close_reason"),
    )
    op.create_table(
        "windows",
        *_keys("run", "generation", "step"),
        _int("epoch"),
        _text("state", "PLANNED"),
        _int("revision"),
        _int("waiting"),
        _int("world"),
        _int("num_samples"),
        _int("num_tokens"),
        _int("planned_ms"),
        _int("trained_ms"),
    )
    op.create_index("ix_windows_state", "windows", ["run", "state", "step"])
    op.create_table(
        "window_members",
        *_keys("run", "generation", "step", "seq"),
        _int("epoch"),
        _int("prompt_index"),
        _int("attempt"),
        _int("rank"),
        _int("micro"),
        _int("position"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_members_task", "window_members", ["run", "seq"])
    op.create_table(
        "acks",
        *_keys("run", "generation", "step", "rank"),
        _text("digest"),
        _int("revision"),
        _int("num_tokens"),
        _int("num_loss_tokens"),
        sa.Column("step_s", sa.Float, nullable=False, server_default="0"),
        sa.Column("wait_s", sa.Float, nullable=False, server_default="0"),
        _int("at_ms"),
    )
    op.create_table(
        "checkpoints",
        *_keys("run", "generation", "step"),
        _text("uri"),
        _text("digest"),
        _int("final"),
        _int("committed_ms"),
    )
    op.create_table(
        "outbox",
        sa.Column("id", _ID, primary_key=True),
        sa.Column("run", sa.BigInteger, nullable=False),
        _int("seq"),
        _int("attempt"),
        _text("store"),
        _text("keys"),
        _int("num_bytes"),
        _int("created_ms"),
        _int("published_ms"),
        _int("publications"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_outbox_published", "outbox", ["published_ms"])
    op.create_index("ix_outbox_run", "outbox", ["run"])
    op.create_table(
        "gate_reports",
        sa.Column("gate_id", sa.Text, primary_key=True),
        _text("run_id"),
        _text("verdict"),
        _text("report"),
        _int("recorded_ms"),
    )


def upgrade() -> None:
    _work()
    _fleet()
    _training()


def downgrade() -> None:
    for table in (
        "kept",
        "tasks",
        "workers",
        "windows",
        "window_members",
        "transitions",
        "task_counts",
        "samples",
        "runs",
        "prompt_sets",
        "outbox",
        "launches",
        "launch_nodes",
        "generations",
        "gate_reports",
        "checkpoints",
        "agents",
        "acks",
    ):
        op.drop_table(table)
