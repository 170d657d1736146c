"""Mooncake's two processes for supervisors: command lines, readiness and metrics. Imports neither torch nor Mooncake.

The master keeps the index. The owner (`mooncake_client`) holds the bytes in a process of its own, so that a crash of
capture or trainer loses none, and serves this host over shared memory (found through an abstract Unix socket: clients
must be in its network namespace). Neither authenticates anyone, and the owner's data ports listen on all addresses
whatever it is told (Mooncake 0.3.13): run them in a private network only.
"""

import asyncio
import http.client

DEFAULT_CLIENT_TTL_S = 10


def master_command(
    *,
    port: int,
    metrics_port: int,
    host: str = "127.0.0.1",
    client_ttl_s: int = DEFAULT_CLIENT_TTL_S,
    lease_ttl_s: float = 10.0,
) -> list[str]:
    """argv of the master. An owner that was silent for client_ttl_s is forgotten together with its objects.

    lease_ttl_s is how long a read keeps its object in place; put-start timeouts free what a writer that died left open.
    """
    return [
        "mooncake_master",
        f"--rpc_address={host}",
        f"--rpc_port={port}",
        f"--metrics_host={host}",
        f"--metrics_port={metrics_port}",
        f"--client_ttl={client_ttl_s}",
        f"--default_kv_lease_ttl={round(lease_ttl_s * 1000)}",
        "--put_start_discard_timeout_sec=30",
        "--put_start_release_timeout_sec=60",
        "--logtostderr",
        "--minloglevel=2",  # a full pool is normal here and would warn at every put
    ]


def owner_command(*, port: int, master: str, pool_bytes: int, host: str = "127.0.0.1", threads: int = 2) -> list[str]:
    """argv of the segment owner: it holds pool_bytes of objects and serves local processes on host:port.

    In a fleet `host` must be an address that peers reach. After a crash start it again only client_ttl_s later: before,
    the master still believes in the old objects.
    """
    return [
        "mooncake_client",
        f"--host={host}",
        f"--port={port}",
        f"--global_segment_size={pool_bytes}",
        # Serves get() on bytes only, which nothing here calls.
        "--local_buffer_size=0",
        f"--master_server_address={master}",
        "--metadata_server=P2PHANDSHAKE",
        "--protocol=tcp",
        f"--threads={threads}",
        "--logtostderr",
        "--minloglevel=2",
    ]


def read_metrics(address: str, timeout_s: float = 2.0) -> dict[str, float]:
    """The master's unlabelled metrics, for example master_total_capacity_bytes and master_allocated_bytes.

    Raises OSError when HOST:PORT does not answer properly.
    """
    values = {}
    for line in _fetch(address, "/metrics", timeout_s).decode(errors="replace").splitlines():
        name, _, value = line.partition(" ")
        if name.startswith("master_") and "{" not in name:
            try:
                values[name] = float(value)
            except ValueError:
                continue
    return values


async def master_ready(metrics: str) -> bool:
    """Whether the master at metrics HOST:PORT says it is healthy."""
    try:
        await asyncio.to_thread(_fetch, metrics, "/health", 2.0)
    except OSError:
        return False
    return True


async def owner_ready(address: str, metrics: str, pool_bytes: int = 1) -> bool:
    """Whether the owner at HOST:PORT accepts connections and the master counts at least pool_bytes of capacity."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(2.0):
            _, writer = await asyncio.open_connection(host, int(port))
        writer.close()
        metrics_now = await asyncio.to_thread(read_metrics, metrics)
    except OSError:  # TimeoutError is one
        return False
    return metrics_now.get("master_total_capacity_bytes", 0) >= pool_bytes


def _fetch(address: str, path: str, timeout_s: float) -> bytes:
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=timeout_s)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        if response.status != 200:
            raise OSError(f"http://{address}{path} answered {response.status}")
        return response.read()
    except http.client.HTTPException as error:
        raise OSError(f"http://{address}{path}: {error!r}") from error
    finally:
        connection.close()
