"""specfleet-capture: runs the frozen target over prompts and stores its hidden states."""

import os

import typer

app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def capture(
    coordinator: str = typer.Option(..., envvar="SPECFLEET_COORDINATOR", help="host:port of the coordinator."),
    nats: str = typer.Option(..., envvar="SPECFLEET_NATS", help="nats://host:port."),
    store: str = typer.Option(..., envvar="SPECFLEET_STORE", help="Feature store, as in mooncake://HOST:PORT/NAME."),
    metrics: str = typer.Option("127.0.0.1:0", envvar="SPECFLEET_METRICS", help="host:port of /metrics."),
    worker_id: str = typer.Option("", envvar="SPECFLEET_WORKER_ID", help="Stable name; default: the host's."),
    engine: str = typer.Option("hf", envvar="SPECFLEET_ENGINE", help="hf: transformers."),
    device: str = typer.Option("auto", envvar="SPECFLEET_DEVICE", help="auto, cpu, cuda or cuda:N."),
    target: str = typer.Option("", envvar="SPECFLEET_TARGET", help="Serve this directory only."),
) -> None:
    # OpenMP threads that spin at barriers slow everything down when a trainer shares the cores; read when torch loads.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # After the command line is parsed: --help must not wait for grpc.
    from specfleet.capture.service import Settings, serve
    from specfleet.telemetry.process import run_service

    run_service(serve(Settings(coordinator, nats, store, metrics, worker_id, engine, device, target)))


def main() -> None:
    app()


if __name__ == "__main__":
    main()
