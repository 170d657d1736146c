"""RunSnapshot and fleet members: real numbers from the ledger and the last 30 seconds."""

import json
from pathlib import Path

from sqlalchemy import Connection

from specfleet.coordinator.hub import Hub
from specfleet.coordinator.ledger import fleet
from specfleet.coordinator.ledger import runs as run_rows
from specfleet.coordinator.ledger import tasks as task_rows
from specfleet.policies.breaker import BreakerState
from specfleet.wire.run_pb2 import FleetMember, RunSnapshot


def snapshot(hub: Hub, conn: Connection, row: run_rows.RunRow) -> RunSnapshot:
    facts = hub.facts(row)
    held = task_rows.held(conn, row.id)
    marks = hub.marks(facts, row.store)
    rates = hub.rates[row.id]
    return RunSnapshot(
        run_id=row.run_id,
        state=row.state,
        reason=row.reason,
        strategy=row.strategy,
        target=row.target,
        contract_hash=row.contract_hash,
        prompt_set=row.prompt_set,
        epochs=facts.config.trainer.epochs,
        num_prompts=row.num_prompts,
        generation=row.generation,
        global_batch=facts.config.global_batch,
        total_steps=row.total_steps,
        trained_steps=row.trained_step,
        checkpoint_step=row.checkpoint_step,
        tasks={state: n for state, n in run_rows.counts(conn, row.id).items() if n},
        captured_tokens=row.captured_tokens,
        trained_tokens=row.trained_tokens,
        capture_rate=rates.captured.per_second(),
        train_rate=rates.trained.per_second(),
        wait_share=rates.wait_share(),
        in_flight_bytes=held.num_bytes,
        in_flight_samples=held.num_samples,
        low_bytes=marks.low_bytes if marks else facts.config.flow.low_bytes,
        high_bytes=marks.high_bytes if marks else facts.config.flow.high_bytes,
        low_samples=facts.config.flow.low_samples,
        high_samples=facts.config.flow.high_samples,
        metrics=json.loads(row.metrics or "{}"),
        submitted_at_unix_ms=row.submitted_ms,
        updated_at_unix_ms=row.updated_ms,
        output_dir=str(Path(facts.output_dir) / row.run_id),
        config_yaml=row.config_yaml,
    )


def members(hub: Hub, conn: Connection) -> list[FleetMember]:
    runs = {row.id: row for row in run_rows.every(conn)}
    serving = {hub.facts(row).contract_hash: row.run_id for row in run_rows.active(conn)}
    found = []
    for worker in fleet.all_workers(conn):
        state, reason = _worker_state(worker)
        numbers = {
            **json.loads(worker.numbers or "{}"),
            "pool_capacity_bytes": worker.capacity_bytes,
            "pool_used_bytes": worker.used_bytes,
        }
        found.append(
            FleetMember(
                id=worker.worker_id, kind="capture", state=state, reason=reason, host=worker.host,
                last_seen_unix_ms=worker.seen_ms, contract_hash=worker.contract_hash,
                run_id=serving.get(worker.contract_hash, ""), numbers=numbers,
                labels={"engine": worker.engine, "engine_version": worker.engine_version, "store": worker.store, "phase": worker.state},
            )
        )  # fmt: skip
    nodes = fleet.nodes(conn)
    for agent in fleet.all_agents(conn):
        mine = [node for node in nodes if node.agent_id == agent.agent_id]
        state = "LOST" if agent.lost else "BUSY" if mine else "READY"
        found.append(
            FleetMember(
                id=agent.agent_id, kind="trainer", state=state, host=agent.host, last_seen_unix_ms=agent.seen_ms,
                run_id=runs[mine[0].run].run_id if mine else "",
                numbers={"slots": agent.slots, "busy_slots": sum(node.nproc for node in mine)},
                labels={"device": agent.device, **json.loads(agent.versions or "{}")},
            )
        )  # fmt: skip
    return found


def _worker_state(worker: fleet.WorkerRow) -> tuple[str, str]:
    breaker = fleet.breaker(worker)
    if worker.lost:
        return "LOST", "no heartbeat"
    if worker.quarantined:
        return "QUARANTINED", worker.quarantined
    if breaker.state is BreakerState.OPEN:
        return "BROKEN", f"{breaker.failures} INFRA failures in a row"
    if worker.state == "DRAINING":
        return "DRAINING", ""
    if worker.state in ("STARTING", "LOADING") and worker.assigned_hash:
        return "BUSY", worker.state.lower()
    return "READY", ""
