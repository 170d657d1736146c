"""The ledger under random orders of everything that can happen, on SQLite and on Postgres."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from fixtures.ledger_world import World, new_database, new_run, sample_ref
from sqlalchemy import Connection, insert, inspect, select, text

from specfleet.contracts.errors import ConfigError, DataError, HostError, LedgerError
from specfleet.contracts.states import RunState, TaskState
from specfleet.coordinator.ledger import (
    Ledger,
    fleet,
    generations,
    leases,
    moves,
    outbox,
    runs,
    samples,
    tasks,
    windows,
)
from specfleet.coordinator.ledger import tables as t
from specfleet.coordinator.ledger.engine import migrate
from specfleet.coordinator.ledger.verify import explain, verify
from specfleet.features.feature_set import FeatureSet
from specfleet.features.manifest import Manifest
from specfleet.policies.credits import CreditGate, Marks
from specfleet.policies.retries import Failure

BACKENDS = ["sqlite", pytest.param("postgres", marks=pytest.mark.integration)]
WIDE = Marks(1 << 40, 1 << 40, 1 << 20, 1 << 20)


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    from fixtures.postgres import serve

    yield from serve()


@pytest.fixture(params=BACKENDS)
async def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Ledger]:
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path / 'ledger.db'}"
    else:
        url = new_database(request.getfixturevalue("postgres"), f"t{random.getrandbits(60)}")
    found = Ledger(url)
    await found.open()
    yield found
    await found.close()


async def test_migrations_build_exactly_the_tables(ledger: Ledger) -> None:
    differences = await ledger.write(lambda conn: compare_metadata(MigrationContext.configure(conn), t.metadata))
    assert differences == []
    again = Ledger(ledger.url)
    await again.open()
    assert (
        await again.read(lambda conn: conn.execute(text("SELECT version_num FROM alembic_version")).scalar()) == "0001"
    )
    await again.close()


async def test_migrations_can_be_undone(ledger: Ledger) -> None:
    """Down to nothing and up again, with nothing left behind."""

    def down_and_up(conn: Connection) -> tuple[set[str], set[str]]:
        migrate(conn, "base")
        left = set(inspect(conn).get_table_names())
        migrate(conn)
        return left, set(inspect(conn).get_table_names())

    left, back = await ledger.write(down_and_up)
    assert left == {"alembic_version"}
    assert back == {"alembic_version", *t.metadata.tables}


async def test_sqlite_is_durable(tmp_path: Path) -> None:
    found = Ledger(f"sqlite:///{tmp_path / 'ledger.db'}")
    await found.open()
    pragmas = await found.write(
        lambda conn: [
            conn.execute(text(f"PRAGMA {name}")).scalar() for name in ("journal_mode", "synchronous", "foreign_keys")
        ]
    )
    assert pragmas == ["wal", 2, 1]
    await found.close()


async def test_a_ledger_that_cannot_be_opened_says_so_without_the_password() -> None:
    with pytest.raises(HostError) as refused:
        await Ledger("postgresql+psycopg://user:secret@127.0.0.1:1/none").open()
    assert refused.value.code == "SF-LEDGER-OPEN"
    assert "secret" not in refused.value.message


@pytest.mark.parametrize("url", ["nonsense", "coffee://host/database"])
async def test_a_url_of_no_database_is_refused(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        await Ledger(url).open()
    assert caught.value.code == "SF-CONFIG-LEDGER-URL"


async def test_group_commit_shares_commits_and_isolates_failures(ledger: Ledger) -> None:
    """A write that fails is undone alone; its neighbours in the same transaction are committed."""

    def put(conn: Connection, name: str) -> str:
        conn.execute(insert(t.gate_reports), [{"gate_id": name}])
        if name.endswith("7"):
            raise ValueError(name)
        return name

    names = [str(n) for n in range(60)]
    answers = await asyncio.gather(
        *(ledger.write(lambda conn, n=n: put(conn, n)) for n in names), return_exceptions=True
    )
    kept = [name for name in names if not name.endswith("7")]
    assert [a for a in answers if not isinstance(a, Exception)] == kept
    assert [str(a) for a in answers if isinstance(a, ValueError)] == [name for name in names if name.endswith("7")]
    stored = await ledger.read(lambda conn: conn.execute(select(t.gate_reports.c.gate_id)).scalars().all())
    assert sorted(stored, key=int) == kept
    # The unique key is the authority, and its violation costs only the offender.
    outcome = await asyncio.gather(
        ledger.write(lambda conn: put(conn, "1")), ledger.write(lambda conn: put(conn, "100")), return_exceptions=True
    )
    assert isinstance(outcome[0], Exception)
    assert outcome[1] == "100"


async def test_a_closed_ledger_refuses(tmp_path: Path) -> None:
    found = Ledger(f"sqlite:///{tmp_path / 'ledger.db'}")
    await found.open()
    await found.close()
    with pytest.raises(LedgerError, match="closed"):
        await found.write(lambda conn: None)


@pytest.mark.parametrize(
    ("seed", "order", "retain", "tail", "world", "reuse_bytes"),
    [
        (1, "deterministic", "until_trained", "carry", 1, 0),
        (2, "arrival", "until_trained", "carry", 2, 0),
        (3, "deterministic", "until_checkpoint", "pad", 2, 0),
        (4, "arrival", "until_checkpoint", "drop", 1, 0),
        (6, "deterministic", "until_trained", "carry", 2, 4_000),
    ],
)
async def test_any_order_of_events_conserves_and_trains_once(
    ledger: Ledger, seed: int, order: str, retain: str, tail: str, world: int, reuse_bytes: int
) -> None:
    facts = await new_run(
        ledger, "r", 23, trainer={"world": world, "batch_size": 4 // world, "epochs": 2},
        flow={
            "order": order, "retain": retain, "tail": tail, "sample_budget": 2, "high_samples": 24, "low_samples": 20,
            "reuse_bytes": reuse_bytes,
        },
    )  # fmt: skip
    w = World(ledger, facts, random.Random(seed), world=world, poisoned={3})
    usual = [w.ingest, w.dispatch, w.claim, w.capture, w.capture, w.accept, w.plan, w.train, w.reap]
    rare = [w.bus_forgets, w.worker_dies, w.lose, w.save, w.lose, w.join]
    await w.join()
    await w.ingest()
    for turn in range(1, 400):
        await (rare[turn // 12 % len(rare)] if turn % 12 == 0 else w.rng.choice(usual))()
        if turn % 80 == 0:
            await check(w)
    seen = {name for name, n in w.done.items() if n}
    assert {"accepted", "expired", "lost", "recalled"} <= seen, w.done
    assert ("taken over" in seen) == (reuse_bytes > 0)
    await finish(w)
    await check(w)
    counts = await w.state_counts()
    model = Counter(prompt for _, prompts in w.trained for prompt in prompts)
    assert set(model.values()) == {1}
    assert (counts["SETTLED"], counts["DEAD"]) == (len(model), 2)
    assert len(model) + 2 + counts.get("DROPPED_TAIL", 0) == 46
    assert {row.reserved_bytes for row in await w.all_tasks()} == {None}


@pytest.mark.parametrize(
    ("seed", "order", "retain", "tail", "world"),
    [
        (1, "deterministic", "until_trained", "carry", 2),
        (2, "arrival", "until_checkpoint", "pad", 1),
        (3, "deterministic", "until_trained", "drop", 1),
    ],
)
async def test_an_offline_run_needs_neither_message_nor_deletion(
    ledger: Ledger, seed: int, order: str, retain: str, tail: str, world: int
) -> None:
    facts = await new_run(
        ledger, "r", 23, data={"source": "features", "features": "/set", "prompt_set": ""},
        trainer={"world": world, "batch_size": 4 // world, "epochs": 2},
        flow={"order": order, "retain": retain, "tail": tail, "high_samples": 24, "low_samples": 20},
    )  # fmt: skip
    manifest = Manifest(facts.contract, "digest", 23, complete=True, dead={3: "NaN"})
    w = World(
        ledger, facts, random.Random(seed), world=world, features=FeatureSet(Path("/set"), manifest, "d" * 64, [])
    )
    usual, rare = [w.ingest, w.dispatch, w.plan, w.train], [w.save, w.join]
    await w.join()
    for turn in range(1, 200):
        await (rare[turn // 20 % len(rare)] if turn % 20 == 0 else w.rng.choice(usual))()
        if turn % 50 == 0:
            await check(w)
    assert w.generation > 2
    await finish(w)
    await check(w)
    counts = await w.state_counts()
    model = Counter(prompt for _, prompts in w.trained for prompt in prompts)
    assert set(model.values()) == {1}
    assert (counts["SETTLED"], counts["DEAD"]) == (len(model), 2)
    assert len(model) + 2 + counts.get("DROPPED_TAIL", 0) == 46
    assert w.on_bus == []
    for table in (t.samples, t.outbox):
        assert await ledger.read(lambda conn, table=table: conn.execute(select(table)).first()) is None


async def finish(w: World) -> None:
    """Everything goes well from here on."""
    w.sent = []
    await w.bus_forgets()
    await w.worker_dies()
    for _ in range(400):
        for part in (w.ingest, w.dispatch, w.claim, w.capture, w.accept, w.plan, w.train):
            await part()
        await w.reap()
        await w.write(lambda conn: tasks.evict(conn, w.facts, w.gate, w.marks, w.now))
        if w.trained and w.trained[-1][0] % 3 == 0:
            await w.save()
        if not await w.ledger.read(lambda conn: windows.unfinished(conn, w.facts)):
            break
    await w.save(final=True)
    for _ in range(20):
        await w.reap()


async def check(w: World) -> None:
    verdict = await w.ledger.read(lambda conn: verify(conn, "r"))
    assert verdict.violations == []
    assert verdict.conserved
    for row in await w.all_tasks():
        # What is reserved and what is leased follows from the state.
        flying = row.state == TaskState.READY and row.dispatched_ms is not None
        kept = row.state == TaskState.TRAINED and w.facts.retains
        assert (row.reserved_bytes is not None) == (flying or kept or row.state in ("LEASED", "CAPTURED"))
        assert (row.lease_ms is not None) == (row.state == TaskState.LEASED)


async def captured_run(ledger: Ledger, count: int = 8) -> World:
    """All tasks CAPTURED, generation 1 open, nothing planned."""
    facts = await new_run(ledger, "r", count, trainer={"world": 1, "batch_size": 4})
    w = World(ledger, facts, random.Random(0))
    await w.join()
    while w.facts.num_tasks > (await ledger.read(lambda conn: runs.get(conn, facts.run))).ingested:
        await w.ingest()
    keys = [
        (d.epoch, d.prompt_index, d.attempt)
        for d in await ledger.write(lambda conn: tasks.dispatch(conn, facts, CreditGate(), WIDE, 1 << 40, count, 1))
    ]
    await ledger.write(lambda conn: leases.claim(conn, facts, "w1", keys, 1))
    await ledger.write(lambda conn: samples.accept(conn, facts, [sample_ref(facts, *key) for key in keys], 1))
    return w


async def test_only_listed_transitions_and_no_lost_updates(ledger: Ledger) -> None:
    w = await captured_run(ledger)
    rows = await w.all_tasks()
    with pytest.raises(LedgerError, match="cannot go from CAPTURED to SETTLED"):
        await ledger.write(lambda conn: moves.move(conn, rows[:1], TaskState.SETTLED, "no"))
    await ledger.write(lambda conn: moves.move(conn, rows[:1], TaskState.READY, "yes", **tasks.CLEARED))
    with pytest.raises(LedgerError) as fenced:
        await ledger.write(lambda conn: moves.move(conn, rows[:2], TaskState.DROPPED_TAIL, "stale read"))
    assert fenced.value.code == "SF-LEDGER-FENCE"
    assert await w.state_counts() == {"READY": 1, "CAPTURED": 7}
    with pytest.raises(LedgerError, match="cannot go from PREPARING to SUCCEEDED"):
        await ledger.write(lambda conn: runs.set_state(conn, w.facts.run, RunState.SUCCEEDED, "", 1))


async def test_a_checkpoint_implies_the_acks_that_are_under_way(ledger: Ledger) -> None:
    w = await captured_run(ledger)
    await w.plan()
    commit = generations.commit_checkpoint
    with pytest.raises(LedgerError, match="only steps up to 2 were planned"):
        await ledger.write(lambda conn: commit(conn, w.facts, 1, 3, "/c", "d", final=False, now_ms=1))
    assert await ledger.write(lambda conn: commit(conn, w.facts, 1, 1, "/c", "d", final=False, now_ms=1))
    assert await w.state_counts() == {"SETTLED": 4, "CAPTURED": 4}
    late = generations.Ack(1, 1, 0, "", 0, 1, 1, 0.1, 0.1, {})
    assert (await ledger.write(lambda conn: generations.ack(conn, w.facts, late, 1))).accepted
    with pytest.raises(LedgerError, match="recorded with digest d, now it comes with e"):
        await ledger.write(lambda conn: commit(conn, w.facts, 1, 1, "/c", "e", final=False, now_ms=1))
    assert (await ledger.read(lambda conn: verify(conn, "r"))).violations == []


async def test_samples_that_are_not_what_was_asked_for_are_refused(ledger: Ledger) -> None:
    facts = await new_run(ledger, "r", 4, flow={"sample_budget": 2})
    w = World(ledger, facts, random.Random(0))
    await w.ingest()
    await w.dispatch()
    keys = sorted(w.on_bus)
    await ledger.write(lambda conn: leases.claim(conn, facts, "w1", keys, 1))
    short, foreign, lacking = (sample_ref(facts, *key) for key in keys[:3])
    short.num_tokens = 4
    foreign.contract_hash = "f" * 64
    del lacking.features[-1]
    result = await ledger.write(lambda conn: samples.accept(conn, facts, [short, foreign, lacking], 1))
    assert ["4 tokens captured, the prompt has 5" in line for line in result.rejected] == [True, False, False]
    assert "contract ffffffffffff instead of" in result.rejected[1]
    assert "features ['final_state'] are missing" in result.rejected[2]
    assert await w.state_counts() == {"READY": 3, "LEASED": 1}
    state, attempt, _, history = await ledger.read(lambda conn: explain(conn, "r", keys[0][0], keys[0][1]))
    assert (state, attempt) == ("READY", 1)
    assert history[-1].endswith("READY attempt 1: SAMPLE: 4 tokens captured, the prompt has 5")
    with pytest.raises(DataError, match="it has 4 prompts, and 4 tasks were begun"):
        await ledger.read(lambda conn: explain(conn, "r", 0, 99))


async def test_what_a_failed_server_may_have_stored_is_deleted(ledger: Ledger) -> None:
    """A lost answer says nothing about the objects; a prompt's own fault and a returned prompt leave none."""
    facts = await new_run(ledger, "r", 4)
    w = World(ledger, facts, random.Random(0))
    await w.ingest()
    await w.dispatch()
    keys = sorted(w.on_bus)[:3]
    await ledger.write(lambda conn: leases.claim(conn, facts, "w1", keys, 1))
    kinds = (Failure.INFRA, Failure.SAMPLE, Failure.RETURNED)
    failures = [(*key, kind, "test") for key, kind in zip(keys, kinds, strict=True)]
    before = await ledger.read(lambda conn: tasks.held(conn, facts.run))
    await ledger.write(lambda conn: leases.fail(conn, facts, "w1", failures, 1))
    [due] = await ledger.write(lambda conn: outbox.due(conn, 1, 1_000))
    store = due.release.store
    assert list(due.release.keys) == outbox.attempt_keys(facts, store, *keys[0])
    # The bytes stay reserved until the deletion is confirmed.
    after = await ledger.read(lambda conn: tasks.held(conn, facts.run))
    assert before.num_bytes - after.num_bytes == 2 * due.release.num_bytes > 0
    await ledger.write(lambda conn: outbox.confirm(conn, [due.release.outbox_id]))
    assert (
        await ledger.read(lambda conn: tasks.held(conn, facts.run))
    ).num_bytes == after.num_bytes - due.release.num_bytes


async def test_verify_sees_what_is_wrong(ledger: Ledger) -> None:
    """The checker is checked: each kind of damage is named."""
    w = await captured_run(ledger)
    await w.plan()
    await w.train()
    await w.train()
    assert (await ledger.read(lambda conn: verify(conn, "r"))).violations == []

    async def damaged(*statements: str) -> list[str]:
        def spoil(conn: Connection) -> list[str]:
            for statement in statements:
                conn.execute(text(statement))
            found = verify(conn, "r").violations
            raise Spoilt(found)

        try:
            await ledger.write(spoil)
        except Spoilt as spoilt:
            return spoilt.found
        raise AssertionError

    assert "accounted for" in (await damaged("DELETE FROM tasks WHERE seq = 0"))[0]
    assert "differ from the tasks" in (await damaged("UPDATE task_counts SET n = n + 1 WHERE state = 'DEAD'"))[0]
    twice = await damaged(
        "INSERT INTO window_members SELECT run, generation, 2, seq, epoch, prompt_index, attempt, 0, 9, 9"
        " FROM window_members WHERE step = 1"
    )
    assert twice == ["4 prompts are in more than one step of the surviving lineage"]
    assert "without a step" in (await damaged("UPDATE windows SET state = 'ABANDONED' WHERE step = 2"))[0]
    gone = await damaged("UPDATE runs SET checkpoint_step = 3")
    assert gone == ["the surviving lineage has 2 steps up to its checkpoint of step 3, 2 in all"]


class Spoilt(Exception):
    def __init__(self, found: list[str]) -> None:
        self.found = found


async def test_breakers_and_launches_survive_in_sql(ledger: Ledger) -> None:
    await ledger.write(lambda conn: fleet.put_worker(conn, worker_id="w1", host="h", seen_ms=5))

    def fail(conn: Connection) -> None:
        row = fleet.worker(conn, "w1")
        assert row is not None
        state = fleet.breaker(row)
        state.failed(1_000)
        fleet.put_breaker(conn, "w1", state)

    for _ in range(3):
        await ledger.write(fail)
    row = await ledger.read(lambda conn: fleet.worker(conn, "w1"))
    assert row is not None
    assert not fleet.breaker(row).may_pull(1_001)
    await ledger.write(lambda conn: fleet.see_everyone(conn, 99))
    row = await ledger.read(lambda conn: fleet.worker(conn, "w1"))
    assert row is not None
    assert row.seen_ms == 99
