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
    engine: str = typer.Option("hf", envvar="SPECFLEET_ENGINE", help="hf: transformers. sglang: SGLang servers."),
    device: str = typer.Option("auto", envvar="SPECFLEET_DEVICE", help="auto, cpu, cuda or cuda:N."),
    target: str = typer.Option(
        "", envvar="SPECFLEET_TARGET", help="Serve this target only: a directory or a hub name."
    ),
    server: list[str] = typer.Option(
        [], envvar="SPECFLEET_SERVER", help="http://HOST:PORT of a running SGLang server; repeatable. None: start one."
    ),
    sglang_python: str = typer.Option(
        "", envvar="SPECFLEET_SGLANG_PYTHON", help="Interpreter that has SGLang; default: this one or .venv-sglang."
    ),
    sglang_flags: str = typer.Option("", envvar="SPECFLEET_SGLANG_FLAGS", help="Further flags of the SGLang server."),
    sglang_log: str = typer.Option(
        "", envvar="SPECFLEET_SGLANG_LOG", help="Log file of the SGLang server; default: in the temporary folder."
    ),
    tp: int = typer.Option(1, envvar="SPECFLEET_TP", min=1, help="GPUs of the SGLang server (tensor parallel)."),
    memory_fraction: float = typer.Option(
        0.0, envvar="SPECFLEET_MEMORY_FRACTION", help="Share of GPU memory for the SGLang server; 0: its own choice."
    ),
    insecure: bool = typer.Option(False, envvar="SPECFLEET_INSECURE", help="Let --metrics listen beyond loopback."),
) -> None:
    # OpenMP threads that spin at barriers slow everything down when a trainer shares the cores; read when torch loads.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # After the command line is parsed: --help must not wait for grpc.
    from specfleet.capture.engines.table import EngineOptions
    from specfleet.capture.service import Settings, serve
    from specfleet.telemetry.process import run_service

    options = EngineOptions(
        engine=engine,
        device=device,
        target=target,
        store_url=store,
        servers=tuple(server),
        sglang_python=sglang_python,
        sglang_flags=sglang_flags,
        sglang_log=sglang_log,
        tensor_parallel=tp,
        memory_fraction=memory_fraction,
    )
    run_service(serve(Settings(coordinator, nats, store, metrics, worker_id, options, insecure)))


def main() -> None:
    app()


if __name__ == "__main__":
    main()
