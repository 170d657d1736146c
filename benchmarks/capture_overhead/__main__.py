"""What capturing costs a prefill: plain and captured tokens/s of real SGLang servers side by side, and whether the states are right.

    python -m benchmarks.capture_overhead --device cpu                                   (miniature, two minutes)
    python -m benchmarks.capture_overhead --sglang-flags "--attention-backend triton --sampling-backend pytorch"

Two servers with the same flags share one device, one of them without capture; the clients (load.py) load them in turn, plain,
captured, plain, captured, for every prompt length, while the other one idles. Each captured sample is published in a real
Mooncake pool, checksummed, and removed when it was answered. Some stay, are read back with their checksums and compared with
transformers (fidelity.py). limits.py measures what copies, hashes and puts cost by themselves on this machine.

The result file is written after every step, so that a run that is stopped leaves what it has; server logs are in WORK/logs.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import logging
import shutil
import signal
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import structlog
import torch

from benchmarks.capture_overhead import fidelity, limits, profiling, report
from benchmarks.capture_overhead.load import Client, Job, Outcome, Setup, prompt_ids
from benchmarks.capture_overhead.servers import Load, Pair, pair_options, processes, started, watch
from benchmarks.capture_overhead.target import random_target
from benchmarks.host import ROOT, host
from benchmarks.mooncake_pool import mooncake_pool
from specfleet.config.features import eagle3_layers
from specfleet.contracts.capture import bytes_per_token
from specfleet.contracts.errors import SpecfleetError
from specfleet.store.factory import open_store
from specfleet.target.facts import read_target_facts
from specfleet.wire.records_pb2 import CaptureContract, SampleRef

SEED = 20_260_101
PACKAGES = ("sglang", "sglang-kernel", "transformers", "mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine")
# A client's transfer memory serves canaries only; the one that reads samples back and measures puts needs more.
CLIENT_BUFFER, READER_BUFFER = 64 << 20, 512 << 20
# Below this share of plain it is worth knowing where the time goes.
PROFILE_BELOW = 0.9
PROFILE_S = 3.0


@dataclasses.dataclass(frozen=True)
class Defaults:
    dtype: str
    lengths: str
    in_flight_tokens: int
    chunk: int
    settle_s: float
    window_s: float
    rounds: int
    clients: int
    pool_bytes: int
    limit_s: float


DEFAULTS = {
    # Chunks as SGLang itself chooses on an H200. Twice as many tokens under way as the plugin admits at 8 KiB each.
    "cuda": Defaults("bfloat16", "512,1024,2048,4096", 131_072, 8192, 0.6, 1.8, 3, 4, 4 << 30, 280.0),
    "cpu": Defaults("float32", "64", 1024, 256, 0.5, 3.0, 2, 1, 256 << 20, 180.0),
}


def parse() -> argparse.Namespace:
    options = argparse.ArgumentParser(
        prog="python -m benchmarks.capture_overhead",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    options.add_argument("--model", type=Path, help="Directory of a target; default: a random Qwen3 (target.py).")
    options.add_argument("--dtype", help="Of features; the servers compute in it too.")
    options.add_argument("--lengths", help="Prompt lengths, separated by commas.")
    options.add_argument("--in-flight-tokens", type=int, help="Prompt tokens under way at a time.")
    options.add_argument("--chunk", type=int, help="SGLang's --chunked-prefill-size and --max-prefill-tokens.")
    options.add_argument("--settle", dest="settle_s", type=float, help="Seconds under load before a measurement.")
    options.add_argument("--window", dest="window_s", type=float, help="Seconds of a measurement.")
    options.add_argument("--rounds", type=int, help="Measurements of each server at each length.")
    options.add_argument("--clients", type=int, help="Client processes.")
    options.add_argument("--pool", dest="pool_bytes", type=int, help="Bytes of the Mooncake pool.")
    options.add_argument("--limit", dest="limit_s", type=float, help="Seconds for the whole run: rounds are left out.")
    options.add_argument("--samples", type=int, default=8, help="Samples to compare with transformers.")
    options.add_argument("--sglang-flags", default="", help="Further flags of both servers, after all others.")
    options.add_argument(
        "--plain-graphs",
        action="store_true",
        help="Leave the plain server the CUDA graphs SGLang would use by default.",
    )
    options.add_argument(
        "--profile",
        action="store_true",
        help=f"Sample the threads of both servers, also above {PROFILE_BELOW} of plain.",
    )
    options.add_argument("--work", type=Path, default=ROOT / "runs" / "capture-overhead", help="Model, logs, profiles.")
    options.add_argument("--out", type=Path, help="Result file; default: benchmarks/results/capture-DEVICE-DATE.json.")
    args = options.parse_args()
    for name, value in dataclasses.asdict(DEFAULTS[args.device]).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.lengths = [int(length) for length in args.lengths.split(",")]
    args.work = args.work.resolve()
    return args


class Run:
    """One run of the benchmark: what it knows so far, and where that is kept."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.began = args, time.monotonic()
        self.result = host("benchmarks.capture_overhead", torch.device(args.device), PACKAGES)
        slug = self.result["device"].lower().split()[-1]
        self.out = args.out or ROOT / "benchmarks" / "results" / f"capture-{slug}-{self.result['date']}.json"
        self.profile = args.work / "profile"

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def say(self, text: str) -> None:
        print(f"{self.seconds:6.1f} s  {text}", flush=True)

    def write(self, **facts: Any) -> None:
        self.result.update(facts, total_s=round(self.seconds, 1))
        self.out.parent.mkdir(parents=True, exist_ok=True)
        partial = self.out.with_suffix(".partial")
        partial.write_text(json.dumps(self.result, indent=1) + "\n")
        partial.replace(self.out)

    async def measure(self, pool_url: str) -> None:
        args, contract = self.args, self.contract()
        flags = f"--chunked-prefill-size {args.chunk} --max-prefill-tokens {args.chunk} {args.sglang_flags}"
        plain, captured = pair_options(contract, args.device, pool_url, flags, args.plain_graphs, self.profile)
        self.write(bytes_per_token=bytes_per_token(contract))
        async with started(plain, captured, args.work / "logs") as pair, contextlib.AsyncExitStack() as stack:
            self.say("both servers are ready")
            self.write(flags=pair.flags, boot_s=round(self.seconds, 1))
            clients = []
            for index in range(args.clients):
                setup = Setup(
                    index, pair.plain.url, pair.captured.url, f"{pool_url}&buffer={CLIENT_BUFFER}",
                    contract.SerializeToString(), SEED,
                )  # fmt: skip
                clients.append(Client(setup))
                stack.callback(clients[-1].close)
            await asyncio.gather(*(client.ready() for client in clients))
            self.say(f"{len(clients)} clients have probed the capture server")
            store = open_store(f"{pool_url}&buffer={READER_BUFFER}")
            stack.callback(store.close)
            kept = await self.rounds(pair, clients, bytes_per_token(contract))
            samples = [(sent_ids(ref, contract.vocab_size), store.get(ref)) for ref in kept]
            with self.phase("profile"):
                await self.find_out_why(pair, clients)
            with self.phase("limits"):
                found = limits.measure(args.device, store, contract)
                self.write(limits=found, floor_us_per_token=report.floor_us_per_token(found, bytes_per_token(contract)))
        # The servers are gone: their memory is free.
        with self.phase("fidelity"):
            self.write(fidelity=fidelity.compare(contract, args.device, samples))

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A part that others do not need: when it fails, they are still worth having."""
        self.say(name)
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.write(failed={**self.result.get("failed", {}), name: f"{type(error).__name__}: {error}"})

    def contract(self) -> CaptureContract:
        args = self.args
        target = args.model or random_target(args.work, args.device, args.dtype)
        facts = read_target_facts(target)
        contract = CaptureContract(
            target=str(facts.path), weights_hash=facts.weights_hash, tokenizer_hash=facts.tokenizer_hash,
            layers=eagle3_layers(facts.num_hidden_layers), final_state="post_norm", dtype=args.dtype,
            hidden_size=facts.hidden_size, num_hidden_layers=facts.num_hidden_layers, vocab_size=facts.vocab_size,
            engine="sglang",
        )  # fmt: skip
        self.write(
            model={
                "architecture": facts.architecture, "weights": "random" if args.model is None else facts.path.name,
                "layers": facts.num_hidden_layers, "hidden_size": facts.hidden_size, "vocab_size": facts.vocab_size,
                "captured_layers": list(contract.layers), "dtype": args.dtype,
            },
            load={
                name: getattr(args, name)
                for name in ("in_flight_tokens", "chunk", "settle_s", "window_s", "rounds", "clients", "pool_bytes")
            },
        )  # fmt: skip
        self.say(f"{self.result['model']}")
        return contract

    async def rounds(self, pair: Pair, clients: list[Client], token_bytes: int) -> list[SampleRef]:
        """Every length in every round, so that what disturbs a moment disturbs none of them alone."""
        args = self.args
        found: dict[tuple[int, bool], list[report.Measurement]] = defaultdict(list)
        kept: list[bytes] = []
        for length in args.lengths:
            for captured in (False, True):  # kernels are chosen and compiled at the first use of a size
                await self.drive(pair, clients, captured, length, args.settle_s)
        self.say("warm")
        began = self.seconds
        for number in range(args.rounds):
            # Profile, limits and fidelity take about as long as a round.
            if number and self.seconds + 2 * (self.seconds - began) / number > args.limit_s:
                self.say(f"{number} of {args.rounds} rounds fit the limit of {args.limit_s:.0f} s")
                break
            for length in args.lengths:
                for captured in (False, True):
                    keep = -(-args.samples // len(args.lengths)) if captured and number == 0 else 0
                    job, outcomes, server = await self.drive(pair, clients, captured, length, args.window_s, keep)
                    found[length, captured].append(report.measurement(job, outcomes, server))
                    kept += [ref for outcome in outcomes for ref in outcome.kept]
                by_length = {
                    str(size): report.summary(found[size, False], found[size, True], token_bytes)
                    for size in args.lengths
                    if found[size, True]
                }
                self.write(**report.overall(by_length), by_length=by_length)
                rates = [found[length, captured][-1].tokens_per_s for captured in (False, True)]
                self.say(
                    f"round {number + 1}, prompts of {length}: plain {rates[0]:,.0f} tokens/s, captured {rates[1]:,.0f}, "
                    f"{rates[1] / rates[0]:.3f}"
                )
        return [SampleRef.FromString(ref) for ref in kept]

    async def drive(
        self,
        pair: Pair,
        clients: list[Client],
        captured: bool,
        length: int,
        window_s: float,
        keep: int = 0,
        ordinary: bool = False,
    ) -> tuple[Job, list[Outcome], Load]:
        """One server under load of one prompt length. ordinary: see Job."""
        in_flight = max(1, self.args.in_flight_tokens // length // len(clients))
        measure_from = time.monotonic() + self.args.settle_s
        job = Job(captured, length, in_flight, measure_from, measure_from + window_s, 0, ordinary)
        jobs = [dataclasses.replace(job, keep=keep if index == 0 else 0) for index in range(len(clients))]
        server, outcomes = await asyncio.gather(
            watch(pair.of(captured or ordinary), job.measure_from, job.measure_until),
            asyncio.gather(*(client.run(own) for client, own in zip(clients, jobs, strict=True))),
        )
        return job, outcomes, server

    async def find_out_why(self, pair: Pair, clients: list[Client]) -> None:
        """At the slowest length, where capturing costs much: requests without capture to the server that captures, and profiles."""
        by_length = self.result["by_length"]
        length, told = min(by_length.items(), key=lambda item: item[1]["ratio"])
        if not self.args.profile and told["ratio"] >= PROFILE_BELOW:
            return
        job, outcomes, server = await self.drive(pair, clients, False, int(length), self.args.window_s, ordinary=True)
        one = report.measurement(job, outcomes, server)
        ordinary = {"prompt_tokens": int(length), "tokens_per_s": round(one.tokens_per_s), **report.server([one])}
        self.say(f"without capture, on the server that captures: {ordinary}")
        self.write(ordinary=ordinary)
        profiles = {}
        for name, captured in (("plain", False), ("captured", True)):
            self.say(f"profile of {name} prefill, prompts of {length}")
            profiling.start(self.profile)
            await self.drive(pair, clients, captured, int(length), PROFILE_S)
            await profiling.stop(self.profile)
            profiles[name] = profiling.read(self.profile, processes(pair.of(captured)))
            print(f"{name} prefill, prompts of {length}{profiling.render(profiles[name])}\n", flush=True)
            self.write(profile={"prompt_tokens": int(length), **profiles})


def sent_ids(ref: SampleRef, vocab_size: int) -> list[int]:
    return prompt_ids(SEED, ref.attempt.task.prompt_index, ref.num_tokens, vocab_size)


def main() -> int:
    run = Run(parse())
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    # A time limit around this run ends it with SIGTERM: servers and pool end with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    logs = run.args.work / "logs"
    shutil.rmtree(run.profile, ignore_errors=True)
    for folder in (logs, run.profile):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        with mooncake_pool("bench", run.args.pool_bytes, log=logs / "mooncake.log") as url:
            run.say("the pool is ready")
            asyncio.run(run.measure(url))
    except (SpecfleetError, RuntimeError, ValueError, TimeoutError) as error:
        run.write(error=str(error))
        print(f"{error}\nserver logs: {logs}", file=sys.stderr)
        return 1
    finally:
        if "by_length" in run.result:
            report.show(run.result)
            print(run.out)
    return 1 if run.result.get("failed") else 0


if __name__ == "__main__":
    sys.exit(main())
