"""The services of a stack and how each is started: one table, used by `specctl up` and compared with compose/compose.yaml.

A `Site` says where things are (hosts, ports, folders); `stack(site)` turns it into the list of services in start order.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import quote

StoreKind = Literal["mooncake", "directory"]
EngineName = Literal["hf", "sglang"]

NATS, MASTER, OWNER = "nats", "mooncake-master", "mooncake-client"
COORDINATOR, CAPTURE, TRAINER, GATE = "coordinator", "capture", "trainer", "gate"

# The only pool of an embedded stack; the first part of every feature key.
POOL_NAME = "pool"
# A killed segment owner may come back only after the master has forgotten it: before that, its old metadata wins.
CLIENT_TTL_S = 10

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Site:
    """Where the services of one stack are."""

    ports: Mapping[str, int]
    """Port name → number; the names are port_names(store)."""
    data: Mapping[str, str]
    """Service → its own folder."""
    bind: str = LOOPBACK
    """Address that services listen on."""
    hosts: Mapping[str, str] = field(default_factory=dict)
    """Service → host that others reach it under; loopback when missing."""
    store: StoreKind = "mooncake"
    pool_bytes: int = 1 << 30
    shared_memory: bool = True
    """Workers share memory with the segment owner; False where they run in containers of their own."""
    ledger: str = ""
    """SQLAlchemy URL; empty: a SQLite file in the coordinator's folder."""
    insecure: bool = False
    """Listen beyond loopback without TLS (private networks only)."""
    engine: EngineName = "hf"
    server_log: str = ""
    """Where the capture worker's SGLang server writes; empty: the worker's own choice."""
    slots: int = 0
    """Ranks per trainer node; 0: its CUDA devices, or 1."""

    def address(self, service: str, port: str = "") -> str:
        """host:port that other services use."""
        return f"{self.hosts.get(service, LOOPBACK)}:{self.ports[port or service]}"

    def listen(self, port: str) -> str:
        return f"{self.bind}:{self.ports[port]}"

    @property
    def nats_url(self) -> str:
        return f"nats://{self.address(NATS)}"

    @property
    def store_url(self) -> str:
        if self.store == "directory":
            return f"file://{quote(self.data['store'])}?capacity={self.pool_bytes}"
        client = f"client={self.address(OWNER)}&" if self.shared_memory else ""
        metrics = f"metrics={self.address(MASTER, 'mooncake-metrics')}"
        return f"mooncake://{self.address(MASTER)}/{POOL_NAME}?{client}pool={self.pool_bytes}&{metrics}"

    @property
    def ledger_url(self) -> str:
        return self.ledger or f"sqlite:///{self.data[COORDINATOR]}/ledger.db"


@dataclass(frozen=True)
class Probe:
    """How to tell that a service serves.

    kind: tcp (accepts), nats (sends its INFO line), http (GET path answers 200), pool (the master whose metrics are on this
    port counts a segment: the owner has mounted it).
    """

    kind: Literal["tcp", "nats", "http", "pool"]
    port: str
    path: str = ""


@dataclass(frozen=True)
class Service:
    name: str
    argv: tuple[str, ...]
    ports: tuple[str, ...]
    """Names of the ports it listens on; the first is the one to show."""
    probes: tuple[Probe, ...]
    after: tuple[str, ...] = ()
    """Services that must be ready before it starts, and that outlive it when the stack stops."""
    warm_up: tuple[str, ...] = ()
    """A command that runs once, after the service is ready for the first time and before anything that depends on it."""
    restart_delay_s: float = 0.1
    """Wait before the first restart."""
    ready_s: float = 120.0
    """Longest start-up that is still normal; importing torch takes a minute on a busy small machine."""
    grace_s: float = 15.0
    """From SIGTERM to SIGKILL."""


def port_names(store: StoreKind) -> tuple[str, ...]:
    """Every port a stack listens on."""
    pool = (MASTER, "mooncake-metrics", OWNER) if store == "mooncake" else ()
    return (NATS, *pool, COORDINATOR, "coordinator-metrics", "capture-metrics", "trainer-metrics", GATE, "gate-metrics")


def folder_names(store: StoreKind) -> tuple[str, ...]:
    """Every folder a stack keeps on disk."""
    return (NATS, COORDINATOR, GATE, *(("store",) if store == "directory" else ()))


def embedded_site(
    state_dir: Path,
    ports: Mapping[str, int],
    *,
    store: StoreKind = "mooncake",
    pool_bytes: int = 1 << 30,
    engine: EngineName = "hf",
    slots: int = 0,
) -> Site:
    """Everything on loopback, everything below the state folder."""
    data = {name: str(state_dir / "data" / name) for name in folder_names(store)}
    server_log = str(state_dir / "logs" / "sglang.log") if engine == "sglang" else ""
    return Site(
        ports=ports, data=data, store=store, pool_bytes=pool_bytes, engine=engine, server_log=server_log, slots=slots
    )


def stack(site: Site) -> list[Service]:
    """The services in start order."""
    services = [_nats(site)]
    if site.store == "mooncake":
        services += _mooncake(site)
    return [*services, _coordinator(site), _capture(site), _trainer(site), _gate(site)]


def _nats(site: Site) -> Service:
    argv = ("nats-server", "-a", site.bind, "-p", str(site.ports[NATS]), "-js", "-sd", site.data[NATS])
    return Service(NATS, argv, (NATS,), (Probe("nats", NATS),), grace_s=10)


def _mooncake(site: Site) -> list[Service]:
    from specfleet.store.processes import master_command, owner_command

    master = master_command(
        host=site.bind, port=site.ports[MASTER], metrics_port=site.ports["mooncake-metrics"], client_ttl_s=CLIENT_TTL_S
    )
    owner = owner_command(
        host=site.hosts.get(OWNER, LOOPBACK),
        port=site.ports[OWNER],
        master=site.address(MASTER),
        pool_bytes=site.pool_bytes,
    )
    ready = (Probe("tcp", MASTER), Probe("http", "mooncake-metrics", "/health"))
    return [
        Service(MASTER, tuple(master), (MASTER, "mooncake-metrics"), ready, grace_s=10),
        Service(
            OWNER,
            tuple(owner),
            (OWNER,),
            (Probe("tcp", OWNER), Probe("pool", "mooncake-metrics")),
            after=(MASTER,),
            # Untouched pages make the first puts 20 times slower.
            warm_up=("python3", "-m", "specfleet.store.prefault", site.store_url) if site.shared_memory else (),
            restart_delay_s=CLIENT_TTL_S + 1.0,
            grace_s=10,
        ),
    ]


def _pool(site: Site) -> tuple[str, ...]:
    return (OWNER,) if site.store == "mooncake" else ()


def _insecure(site: Site) -> tuple[str, ...]:
    return ("--insecure",) if site.insecure else ()


def _coordinator(site: Site) -> Service:
    argv = (
        "specfleet-coordinator",
        *("--listen", site.listen(COORDINATOR)),
        *("--metrics", site.listen("coordinator-metrics")),
        *("--nats", site.nats_url),
        *("--ledger", site.ledger_url),
        *("--data-dir", site.data[COORDINATOR]),
        *_insecure(site),
    )
    probes = (Probe("tcp", COORDINATOR), Probe("http", "coordinator-metrics", "/readyz"))
    return Service(COORDINATOR, argv, (COORDINATOR, "coordinator-metrics"), probes, after=(NATS,))


def _capture(site: Site) -> Service:
    argv = (
        "specfleet-capture",
        *("--coordinator", site.address(COORDINATOR)),
        *("--nats", site.nats_url),
        *("--store", site.store_url),
        *("--metrics", f"{LOOPBACK}:{site.ports['capture-metrics']}"),
        *("--worker-id", "capture-0"),
        *("--engine", site.engine),
        *(("--sglang-log", site.server_log) if site.server_log else ()),
    )
    probes = (Probe("http", "capture-metrics", "/readyz"),)
    return Service(CAPTURE, argv, ("capture-metrics",), probes, after=(COORDINATOR, *_pool(site)))


def _trainer(site: Site) -> Service:
    argv = (
        "specfleet-trainer",
        *("--coordinator", site.address(COORDINATOR)),
        *("--nats", site.nats_url),
        *("--store", site.store_url),
        *("--metrics", f"{LOOPBACK}:{site.ports['trainer-metrics']}"),
        *("--agent-id", "trainer-0"),
        *("--slots", str(site.slots)),
    )
    probes = (Probe("http", "trainer-metrics", "/readyz"),)
    # The grace covers the step being trained and its checkpoint.
    return Service(TRAINER, argv, ("trainer-metrics",), probes, after=(COORDINATOR, *_pool(site)), grace_s=90)


def _gate(site: Site) -> Service:
    argv = (
        "specfleet-gate",
        *("--listen", site.listen(GATE)),
        *("--metrics", site.listen("gate-metrics")),
        *("--coordinator", site.address(COORDINATOR)),
        *("--data-dir", site.data[GATE]),
        *_insecure(site),
    )
    probes = (Probe("tcp", GATE), Probe("http", "gate-metrics", "/readyz"))
    return Service(GATE, argv, (GATE, "gate-metrics"), probes, after=(COORDINATOR,))
