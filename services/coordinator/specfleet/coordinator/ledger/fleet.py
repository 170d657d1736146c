"""Capture workers, trainer agents and launches."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, insert, select, update

from specfleet.coordinator.ledger.tables import agents, launch_nodes, launches, workers
from specfleet.policies.breaker import Breaker
from specfleet.policies.launches import AgentSlots, Placement

WorkerRow = Row[Any]
AgentRow = Row[Any]


def _upsert(conn: Connection, table: Any, key: str, values: Mapping[str, Any]) -> None:
    column = table.c[key]
    rest = {name: value for name, value in values.items() if name != key}
    if not conn.execute(update(table).where(column == values[key]).values(**rest)).rowcount:
        conn.execute(insert(table), [dict(values)])


def worker(conn: Connection, worker_id: str) -> WorkerRow | None:
    return conn.execute(select(workers).where(workers.c.worker_id == worker_id)).first()


def all_workers(conn: Connection) -> list[WorkerRow]:
    return list(conn.execute(select(workers).order_by(workers.c.worker_id)))


def live_workers(conn: Connection) -> list[WorkerRow]:
    """Heard of lately. A quarantined worker or one with an open breaker is alive, but of no use."""
    return list(conn.execute(select(workers).where(workers.c.lost == 0).order_by(workers.c.worker_id)))


def put_worker(conn: Connection, **values: Any) -> None:
    _upsert(conn, workers, "worker_id", values)


def breaker(row: WorkerRow) -> Breaker:
    return Breaker.from_dict(json.loads(row.breaker or "{}"))


def put_breaker(conn: Connection, worker_id: str, state: Breaker) -> None:
    conn.execute(update(workers).where(workers.c.worker_id == worker_id).values(breaker=json.dumps(state.to_dict())))


def see_everyone(conn: Connection, now_ms: int) -> None:
    """After a restart of the coordinator: silence until now was ours."""
    conn.execute(update(workers).where(workers.c.lost == 0).values(seen_ms=now_ms))
    conn.execute(update(agents).where(agents.c.lost == 0).values(seen_ms=now_ms))


def agent(conn: Connection, agent_id: str) -> AgentRow | None:
    return conn.execute(select(agents).where(agents.c.agent_id == agent_id)).first()


def all_agents(conn: Connection) -> list[AgentRow]:
    return list(conn.execute(select(agents).order_by(agents.c.agent_id)))


def put_agent(conn: Connection, **values: Any) -> None:
    _upsert(conn, agents, "agent_id", values)


@dataclass(frozen=True)
class Node:
    """One agent's part of a launch that is not over."""

    launch_id: str
    run: int
    world: int
    node_rank: int
    agent_id: str
    nproc: int
    launch_state: str
    node_state: str
    rendezvous: str
    nnodes: int


def nodes(conn: Connection, *, agent_id: str = "", run: int = 0) -> list[Node]:
    """Nodes of launches that are not ENDED, of one agent or one run (or all)."""
    query = (
        select(
            launches,
            launch_nodes.c.node_rank,
            launch_nodes.c.agent_id,
            launch_nodes.c.nproc,
            launch_nodes.c.state.label("node"),
        )
        .join(launch_nodes, launch_nodes.c.launch_id == launches.c.launch_id)
        .where(launches.c.state != "ENDED")
        .order_by(launches.c.created_ms, launch_nodes.c.node_rank)
    )
    rows = conn.execute(query).all()
    sizes: dict[str, int] = {}
    for row in rows:
        sizes[row.launch_id] = sizes.get(row.launch_id, 0) + 1
    return [
        Node(
            row.launch_id, row.run, row.world, row.node_rank, row.agent_id, row.nproc, row.state, row.node, row.rendezvous,
            sizes[row.launch_id],
        )
        for row in rows
        if (not agent_id or row.agent_id == agent_id) and (not run or row.run == run)
    ]  # fmt: skip


def launch(conn: Connection, launch_id: str) -> Row[Any] | None:
    return conn.execute(select(launches).where(launches.c.launch_id == launch_id)).first()


def free_slots(conn: Connection) -> list[AgentSlots]:
    """Agents that are alive, with the slots no launch uses."""
    used: dict[str, int] = {}
    for node in nodes(conn):
        used[node.agent_id] = used.get(node.agent_id, 0) + node.nproc
    return [AgentSlots(row.agent_id, row.slots - used.get(row.agent_id, 0)) for row in all_agents(conn) if not row.lost]


def start_launch(
    conn: Connection, launch_id: str, run: int, placement: Sequence[Placement], rendezvous: str, now_ms: int
) -> None:
    world = sum(part.nproc for part in placement)
    conn.execute(
        insert(launches),
        [{"launch_id": launch_id, "run": run, "world": world, "rendezvous": rendezvous, "created_ms": now_ms}],
    )
    conn.execute(
        insert(launch_nodes),
        [
            {"launch_id": launch_id, "node_rank": part.node_rank, "agent_id": part.agent_id, "nproc": part.nproc}
            for part in placement
        ],
    )


def set_node_state(conn: Connection, launch_id: str, agent_id: str, state: str) -> None:
    where = (launch_nodes.c.launch_id == launch_id, launch_nodes.c.agent_id == agent_id)
    conn.execute(update(launch_nodes).where(*where).values(state=state))


def end_launch(conn: Connection, launch_id: str, exit_code: int, message: str, now_ms: int) -> bool:
    """Returns False when it had ended before."""
    where = (launches.c.launch_id == launch_id, launches.c.state != "ENDED")
    values = {"state": "ENDED", "exit_code": exit_code, "message": message[-2000:], "ended_ms": now_ms}
    return bool(conn.execute(update(launches).where(*where).values(**values)).rowcount)
