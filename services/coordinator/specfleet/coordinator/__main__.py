"""`specfleet-coordinator`: owns the ledger and decides what is captured, trained and deleted."""

from pathlib import Path

import typer


def serve(
    listen: str = typer.Option("127.0.0.1:0", envvar="SPECFLEET_LISTEN", help="HOST:PORT of the gRPC services."),
    metrics: str = typer.Option("127.0.0.1:0", envvar="SPECFLEET_METRICS", help="HOST:PORT of /metrics and health."),
    nats: str = typer.Option(..., envvar="SPECFLEET_NATS", help="URL of the bus, as in nats://127.0.0.1:4222."),
    ledger: str = typer.Option("", envvar="SPECFLEET_LEDGER", help="SQLAlchemy URL; empty: SQLite in the data folder."),
    data_dir: Path = typer.Option(..., envvar="SPECFLEET_DATA_DIR", help="Folder of this service."),
    insecure: bool = typer.Option(False, envvar="SPECFLEET_INSECURE", help="Allow other than loopback addresses."),
) -> None:
    """Serves runs, leases, windows and checkpoints."""
    from specfleet.coordinator.app import Options, run
    from specfleet.telemetry import logs
    from specfleet.telemetry.process import run_service

    logs.configure("coordinator")
    run_service(run(Options(listen, metrics, nats, ledger, data_dir, insecure)))


def main() -> None:
    typer.run(serve)


if __name__ == "__main__":
    main()
