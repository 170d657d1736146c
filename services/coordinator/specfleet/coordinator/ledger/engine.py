"""The door to SQL: one writer thread with group commit, readers on connections of their own.

`write` queues a function; the writer thread runs everything that is queued inside one transaction, each function in a
savepoint of its own, commits once, and only then answers. One fsync is shared by all callers that arrived during the last one.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import resources
from typing import Any, TypeVar

from alembic import command
from alembic.config import Config
from prometheus_client import Histogram
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.pool import QueuePool, StaticPool

from specfleet.contracts.errors import ConfigError, HostError, LedgerError

T = TypeVar("T")

# More would delay the first caller of a group; the fsync is shared well enough by then.
MAX_GROUP = 256
READERS = 4

COMMIT_SECONDS = Histogram(
    "specfleet_ledger_commit_seconds",
    "Time of one group commit",
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2),
)
GROUP_SIZE = Histogram(
    "specfleet_ledger_group_size", "Writes that shared one commit", buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256)
)


@dataclass(frozen=True, slots=True)
class _Job:
    run: Callable[[Connection], Any]
    loop: asyncio.AbstractEventLoop
    future: "asyncio.Future[Any]"


def build_engine(url: str, *, writer: bool) -> Engine:
    """SQLite: WAL, synchronous FULL, BEGIN IMMEDIATE for the writer. Postgres: psycopg, read committed.

    Raises ConfigError SF-CONFIG-LEDGER-URL, HostError SF-HOST-DRIVER when the database's driver is not installed.
    """
    try:
        parsed = make_url(url)
        if parsed.get_backend_name() != "sqlite":
            return create_engine(
                parsed, poolclass=QueuePool, pool_size=1 if writer else READERS, max_overflow=0, pool_pre_ping=True
            )
    except ArgumentError as error:
        raise ConfigError(
            "SF-CONFIG-LEDGER-URL",
            f"--ledger: {error}. Forms: sqlite:////ABSOLUTE/PATH.db, postgresql+psycopg://USER@HOST/DATABASE",
        ) from error
    except ModuleNotFoundError as error:
        raise HostError(
            "SF-HOST-DRIVER",
            f"--ledger needs a driver that is not installed ({error}). For Postgres: pip install 'specfleet[postgres]'",
        ) from error
    pool: dict[str, Any] = {"poolclass": StaticPool} if writer else {"poolclass": QueuePool, "pool_size": READERS}
    engine = create_engine(parsed, connect_args={"check_same_thread": False, "timeout": 30.0}, **pool)

    @event.listens_for(engine, "connect")
    def _prepare(dbapi_connection: Any, _record: Any) -> None:
        # Without this the sqlite3 module starts transactions by itself, and never a BEGIN IMMEDIATE.
        dbapi_connection.isolation_level = None
        pragmas = ["journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "cache_size=-65536", "temp_store=MEMORY"]
        for pragma in pragmas if writer else [*pragmas, "query_only=ON"]:
            dbapi_connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writer else "BEGIN")

    return engine


def migrate(connection: Connection, revision: str = "head") -> None:
    """Brings the schema to a revision: upwards to the newest, or downwards ("base": nothing is left)."""
    config = Config()
    config.set_main_option("script_location", str(resources.files("specfleet.coordinator.ledger") / "migrations"))
    config.attributes["connection"] = connection
    if revision == "base":
        command.downgrade(config, revision)
    else:
        command.upgrade(config, revision)


class Ledger:
    def __init__(self, url: str) -> None:
        self.url = url
        self._writer_engine = build_engine(url, writer=True)
        self._reader_engine = build_engine(url, writer=False)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="ledger-read")
        self._thread: threading.Thread | None = None
        self._closed = False

    async def open(self) -> None:
        """Connects, migrates, starts the writer. Raises HostError SF-LEDGER-OPEN when the database cannot be reached."""
        try:
            await asyncio.to_thread(self._migrate)
        except SQLAlchemyError as error:
            where = make_url(self.url).render_as_string(hide_password=True)
            raise HostError("SF-LEDGER-OPEN", f"the ledger {where} cannot be opened: {error}") from error
        self._thread = threading.Thread(target=self._write_forever, name="ledger-write", daemon=True)
        self._thread.start()

    def _migrate(self) -> None:
        with self._writer_engine.begin() as connection:
            migrate(connection)

    async def write(self, job: Callable[[Connection], T]) -> T:
        """Runs `job` in the writer's transaction; returns its result once that is committed.

        What the job raises is raised here, and undone alone. LedgerError SF-LEDGER-COMMIT when the commit itself failed.
        """
        if self._closed or self._thread is None:
            raise LedgerError("SF-LEDGER-CLOSED", "the ledger is closed")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._jobs.put(_Job(job, loop, future))
        return await future

    async def read(self, query: Callable[[Connection], T]) -> T:
        """Runs `query` on a reader connection: a consistent snapshot that contains every answered write."""

        def _read() -> T:
            with self._reader_engine.begin() as connection:
                return query(connection)

        return await asyncio.get_running_loop().run_in_executor(self._readers, _read)

    async def close(self) -> None:
        """Commits what is queued, then closes every connection."""
        self._closed = True
        if self._thread is not None:
            self._jobs.put(None)
            await asyncio.to_thread(self._thread.join)
        self._readers.shutdown(wait=True)
        self._reader_engine.dispose()
        self._writer_engine.dispose()

    def _write_forever(self) -> None:
        stopping = False
        while not stopping:
            group = [self._jobs.get()]
            while len(group) < MAX_GROUP and group[-1] is not None:
                try:
                    group.append(self._jobs.get_nowait())
                except queue.Empty:
                    break
            jobs = [job for job in group if job is not None]
            stopping = len(jobs) < len(group)
            if jobs:
                _deliver(jobs, self._commit(jobs))

    def _commit(self, jobs: list[_Job]) -> list[tuple[Any, BaseException | None]]:
        started = time.perf_counter()
        answers: list[tuple[Any, BaseException | None]] = []
        try:
            with self._writer_engine.begin() as connection:
                for job in jobs:
                    answers.append(_run(connection, job))
        except Exception as error:
            failure = LedgerError("SF-LEDGER-COMMIT", f"the ledger could not commit {len(jobs)} writes: {error}")
            failure.__cause__ = error
            answers = [(None, failure)] * len(jobs)
        COMMIT_SECONDS.observe(time.perf_counter() - started)
        GROUP_SIZE.observe(len(jobs))
        return answers


def _run(connection: Connection, job: _Job) -> tuple[Any, BaseException | None]:
    savepoint = connection.begin_nested()
    try:
        value = job.run(connection)
    except Exception as error:
        # Raises when the connection itself is gone: then the whole group fails, as it must.
        savepoint.rollback()
        return None, error
    savepoint.commit()
    return value, None


def _deliver(jobs: list[_Job], answers: list[tuple[Any, BaseException | None]]) -> None:
    def resolve() -> None:
        for job, (value, error) in zip(jobs, answers, strict=True):
            if job.future.done():
                continue
            if error is None:
                job.future.set_result(value)
            else:
                job.future.set_exception(error)

    # All callers of one coordinator live in one event loop.
    loop = jobs[0].loop
    if not loop.is_closed():
        loop.call_soon_threadsafe(resolve)
