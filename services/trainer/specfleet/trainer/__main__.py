"""`specfleet-trainer`: the trainer agent of one node."""

import os

import typer


def agent(
    coordinator: str = typer.Option(..., envvar="SPECFLEET_COORDINATOR", help="host:port of the coordinator."),
    nats: str = typer.Option(..., envvar="SPECFLEET_NATS", help="URL of the bus, as in nats://127.0.0.1:4222."),
    store: str = typer.Option(..., envvar="SPECFLEET_STORE", help="URL of the feature store."),
    metrics: str = typer.Option("127.0.0.1:0", envvar="SPECFLEET_METRICS", help="Listen address of /metrics."),
    agent_id: str = typer.Option("", envvar="SPECFLEET_AGENT_ID", help="Stable name; default: the host's."),
    slots: int = typer.Option(0, min=0, envvar="SPECFLEET_SLOTS", help="Ranks this node runs; 0: GPUs, or 1."),
    device: str = typer.Option("auto", envvar="SPECFLEET_DEVICE", help="auto, cpu or cuda."),
    insecure: bool = typer.Option(False, envvar="SPECFLEET_INSECURE", help="Let --metrics listen beyond loopback."),
) -> None:
    """Runs training ranks on this node as the coordinator asks."""
    # Ranks inherit it: a thread that waits for the next window must not spin on a core that capture needs.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # After the command line is parsed: --help must not wait for grpc.
    from specfleet.telemetry.process import run_service
    from specfleet.trainer.agent import AgentOptions, serve

    run_service(serve(AgentOptions(coordinator, nats, store, metrics, agent_id, slots, device, insecure)))


def main() -> None:
    typer.run(agent)


if __name__ == "__main__":
    main()
