"""`specfleet-gate`: exports drafts and measures them by real decoding."""

from pathlib import Path
from typing import Literal

import typer


def gate(
    listen: str = typer.Option("127.0.0.1:0", envvar="SPECFLEET_LISTEN", help="HOST:PORT of the gRPC service."),
    metrics: str = typer.Option("127.0.0.1:0", envvar="SPECFLEET_METRICS", help="HOST:PORT of /metrics and health."),
    coordinator: str = typer.Option("", envvar="SPECFLEET_COORDINATOR", help="HOST:PORT; empty: record no reports."),
    data_dir: Path = typer.Option(..., envvar="SPECFLEET_DATA_DIR", help="Folder of this service."),
    device: Literal["auto", "cpu", "cuda"] = typer.Option(
        "auto", envvar="SPECFLEET_DEVICE", help="auto: CUDA where there is any."
    ),
    sglang_python: str = typer.Option(
        "",
        envvar="SPECFLEET_SGLANG_PYTHON",
        help="Interpreter that has SGLang, for jobs that serve; default: this one or .venv-sglang.",
    ),
    sglang_flags: str = typer.Option(
        "", envvar="SPECFLEET_SGLANG_FLAGS", help="Further flags of its servers, as one string."
    ),
    insecure: bool = typer.Option(False, envvar="SPECFLEET_INSECURE", help="Allow other than loopback addresses."),
) -> None:
    """Serves exports and gate jobs."""
    from specfleet.gate.app import Options, serve
    from specfleet.telemetry.process import run_service

    run_service(serve(Options(listen, metrics, coordinator, data_dir, device, sglang_python, sglang_flags, insecure)))


def main() -> None:
    typer.run(gate)


if __name__ == "__main__":
    main()
