"""Launches: assigned to agents, ended with a consequence for their run. Functions run inside a ledger write."""

import secrets

import structlog
from sqlalchemy import Connection

from specfleet.contracts.states import RunState
from specfleet.coordinator.hub import Hub, now_ms
from specfleet.coordinator.ledger import fleet
from specfleet.coordinator.ledger import runs as run_rows
from specfleet.coordinator.ledger.generations import close_generation
from specfleet.policies.launches import MAX_FRUITLESS_LAUNCHES, place, relaunch_delay_ms

log = structlog.get_logger()

# The default port of torch's c10d rendezvous; only launches that span nodes need one.
RENDEZVOUS_PORT = 29_400
# After a planned end the next launch may follow at once; a moment lets the old ranks close their files.
SETTLE_MS = 500

WANTS_TRAINER = (RunState.PREPARING, RunState.RUNNING, RunState.PAUSED)


def assign(hub: Hub, conn: Connection) -> list[str]:
    """Gives every run that waits for a trainer a launch, oldest run first, while agents have room. Returns run ids."""
    assigned = []
    now = now_ms()
    for row in run_rows.active(conn):
        waits = row.wanted == "run" and not row.final and row.state in WANTS_TRAINER and row.next_launch_ms <= now
        if not waits or fleet.nodes(conn, run=row.id):
            continue
        placement = place(hub.facts(row).config.trainer.world, fleet.free_slots(conn))
        if placement is None:
            continue
        rendezvous = ""
        if len(placement) > 1:
            first = fleet.agent(conn, placement[0].agent_id)
            rendezvous = f"{first.host if first else placement[0].agent_id}:{RENDEZVOUS_PORT}"
        launch_id = f"{row.run_id}-{secrets.token_hex(6)}"
        fleet.start_launch(conn, launch_id, row.id, placement, rendezvous, now)
        log.info("launch assigned", run=row.run_id, launch=launch_id, agents=[part.agent_id for part in placement])
        assigned.append(row.run_id)
    return assigned


def end_launch(hub: Hub, conn: Connection, launch_id: str, exit_code: int, message: str) -> bool:
    """A launch is over: its generation trains no more, and its run pauses, finishes or fails. Idempotent."""
    now = now_ms()
    launch = fleet.launch(conn, launch_id)
    if launch is None or not fleet.end_launch(conn, launch_id, exit_code, message, now):
        return False
    row = run_rows.get(conn, launch.run)
    log.info("launch ended", run=row.run_id, launch=launch_id, exit_code=exit_code, message=message[-200:])
    if launch.generation == row.generation:
        end_generation(hub, conn, row, message or f"exit code {exit_code}")
        row = run_rows.get(conn, launch.run)
    if row.final or row.wanted != "run" or row.state not in WANTS_TRAINER:
        return True
    fruitless = row.fruitless_launches + (1 if exit_code else 0)
    delay = relaunch_delay_ms(fruitless) if exit_code else SETTLE_MS
    run_rows.set_values(conn, row.id, fruitless_launches=fruitless, next_launch_ms=now + delay)
    if fruitless >= MAX_FRUITLESS_LAUNCHES:
        reason = f"the trainer ended {fruitless} times in a row without a new step; last: exit code {exit_code}: {message[-1500:]}"
        hub.set_state(conn, row, RunState.FAILED, reason)
    return True


def end_generation(hub: Hub, conn: Connection, row: run_rows.RunRow, reason: str) -> None:
    """Its ranks are gone (or going): nothing more is planned for them. The launch itself ends when the agent says so."""
    if not row.attached_world:
        return
    close_generation(conn, row.id, row.generation, reason, now_ms())
    run_rows.set_values(conn, row.id, attached_world=0)
    if row.state == RunState.RUNNING and not row.final:
        hub.set_state(conn, row, RunState.PAUSED, "trainer detached" if row.wanted == "run" else "paused by user")
