"""Drafts from capture to serving on real SGLang: tokens/s and acceptance length with and without them.

    make bench-serving DATA=conversations.jsonl.gz                       (or: python -m benchmarks.serving --data …)
    python -m benchmarks.serving --tiny --samples 24 … (a CPU, in miniature: README.md)

An embedded stack captures every training row once through a real SGLang server, trains one draft per case (recipe and settings
of strategies/cases.py) from that feature set, and exports them. Then real SGLang servers, one plain and one with each draft,
answer held-out prompts greedily, one server at a time. The reference decoder judges their text, and the gate estimates acceptance
on the target's own answers.

Results are written after every phase; --resume goes on after the last one that ended under equal settings.
"""

import argparse
import asyncio
import json
import shlex
import shutil
import signal
import sys
from pathlib import Path

from benchmarks.host import ROOT, host
from benchmarks.serving.measure import measure, server_options, start, stop
from benchmarks.serving.product import MEMORY_FRACTION, Job, Product, environment, run_id
from benchmarks.serving.reference import estimate, judge, serving_of
from benchmarks.serving.results import FILE, Results, write
from benchmarks.serving.table import PLAIN, render
from benchmarks.serving.tiny import tiny_target
from benchmarks.strategies.cases import CASES, MAX_LENGTH
from specfleet.contracts.errors import HostError, SpecfleetError
from specfleet.data.demo import resolve_builtin
from specfleet.data.prepare import PrepareOptions, prepare_prompt_set
from specfleet.drafts.export import load_export
from specfleet.gate.rows import select_rows
from specfleet.gate.serving import serving_depth, serving_dtype
from specfleet.sglang.client import SGLangClient
from specfleet.sglang.interpreter import find_python, sglang_version
from specfleet.sglang.launch import Server
from specfleet.sglang.speculation import ALGORITHMS, speculating, why_not_served
from specfleet.trainer.device import pick_device

# What a call without --resume begins anew, the result last. Prompt sets and the tiny target would only be made the same again.
BEGUN = ("stack", "runs", "features", "gate", "answers", "logs", FILE)


def parse() -> argparse.Namespace:
    options = argparse.ArgumentParser(
        prog="python -m benchmarks.serving",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = options.add_argument
    add("--target", default="builtin:smollm2-135m-instruct")
    add("--data", default="builtin:smollm2-demo")
    add("--only", default="eagle3,dflash", help="Cases, named and varied as in benchmarks.strategies.")
    add("--epochs", type=int, default=6)
    add("--batch-size", type=int, default=16)
    add("--samples", type=int, default=0, help="Use at most so many training rows; 0: all.")
    add("--response-tokens", type=int, default=0, help="Cut training answers after so many tokens; 0: never.")
    add("--rows-per-source", type=int, default=10, help="Held-out prompts of every source that are served.")
    add("--concurrency", default="1,8", help="Requests in flight; one measurement of every server for each.")
    add("--estimate-rows", type=int, default=0, help="Rows of every source for the offline estimate; 0: all held-out.")
    add("--new-tokens", type=int, default=256, help="Longest served answer.")
    add("--device", default="auto", choices=["auto", "cpu", "cuda"])
    add("--tiny", action="store_true", help="A random narrow target with the tokenizer of --target.")
    add("--store", default="mooncake", choices=["mooncake", "directory"], help="Where captured features travel.")
    add("--pool-gib", type=float, default=4.0)
    add("--sglang-flags", default="", help="Further flags of every server, as one string.")
    add("--graphs", default="auto", choices=["auto", "on", "off"], help="CUDA graphs of decoding; auto: if all can.")
    add("--work", type=Path, default=ROOT / "runs" / "bench-serving", help="Everything in between.")
    add("--resume", action="store_true", help="Keep the phases that ended under equal settings.")
    add("--out", type=Path, help="Result file; default: benchmarks/results/serving-DEVICE-DATE.json.")
    args = options.parse_args()
    args.concurrencies = sorted({1, *(int(count) for count in args.concurrency.split(","))})
    args.names = [name for name in args.only.split(",") if name]
    try:
        version, device = sglang_version(find_python()), pick_device(args.device, 0).type
    except HostError as error:
        options.error(str(error))
    for name in args.names:
        case = name.split(":")[0]
        kind = next((kind for kind in ALGORITHMS if case.startswith(kind)), case)
        reason = why_not_served(kind, "sglang", version, device) if case in CASES else "no such case"
        if reason:
            options.error(f"--only {name}: {reason}")
    return args


def begin_anew(work: Path) -> None:
    """Removes what an earlier call left. Raises SystemExit when the folder holds anything of that name without its result."""
    there = [work / name for name in BEGUN if (work / name).exists()]
    if there and not (work / FILE).exists():
        raise SystemExit(f"{there[0]} is not from this benchmark and is left alone: choose another --work")
    for path in there:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


class Bench:
    """Two halves: from prompts to exported drafts, and serving them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, pick_device(args.device, 0)
        self.work: Path = args.work.resolve()
        if not args.resume:
            begin_anew(self.work)
        self.answers = self.work / "answers"
        target = Path(resolve_builtin(args.target)).resolve()
        data = str(Path(resolve_builtin(args.data)).resolve())
        self.job = Job(
            tiny_target(target, self.work / "target") if args.tiny else target,
            data, self.device.type, args.names, args.samples, args.response_tokens, args.epochs, args.batch_size,
        )  # fmt: skip
        self.held_out = prepare_prompt_set(
            [data], self.job.target, self.work / "prompts", PrepareOptions(MAX_LENGTH, keep={"split": ["dev", "eval"]})
        )
        self.rows = select_rows(self.held_out, args.rows_per_source)
        self.dtype = serving_dtype("bfloat16", self.device.type)
        self.result = self._results()

    def _results(self) -> Results:
        args, job = self.args, self.job
        training = [str(job.target), job.data, *(getattr(args, name) for name in TRAINED_WITH)]
        serving = [*training, *(getattr(args, name) for name in SERVED_WITH)]
        facts = host("benchmarks.serving", self.device, ("sglang", "transformers"))
        facts["settings"] = {name: getattr(args, name) for name in (*TRAINED_WITH, *SERVED_WITH)}
        slug = facts["device"].lower().split()[-1]
        out = args.out or ROOT / "benchmarks" / "results" / f"serving-{slug}-{facts['date']}.json"
        return Results(self.work, out, facts, {"training": training, "serving": serving})

    def train(self) -> None:
        """Capture, training and export, on the product's own stack."""
        result, job = self.result, self.job
        if len(result["exports"]) == len(job.names):
            return
        environment(self.device.type, shlex.split(self.args.sglang_flags))
        with result.phase("stack up"):
            product = Product(self.work, self.args.store, int(self.args.pool_gib * 2**30), len(job.names), result.say)
        with product:
            if not result["capture"]:
                with result.phase("capture"):
                    result["capture"] = product.record(job)
            if not result["training"]:
                with result.phase("training"):
                    result["training"] = product.train(job)
            with result.phase("export"):
                result["exports"] = {run_id(name): product.export(name) for name in job.names}

    def serve(self) -> None:
        result, names = self.result, (PLAIN, *map(run_id, self.job.names))
        missing = [
            (concurrency, name)
            for concurrency in self.args.concurrencies
            for name in names
            if str(concurrency) not in result["serving"].get(name, {})
        ]
        if missing:
            asyncio.run(self._serve(missing))
        with result.phase("reference"):
            plain = json.loads((self.answers / f"{PLAIN}-1.json").read_text())
            for name in names[1:]:
                told = json.loads((self.answers / f"{name}-1.json").read_text())
                export = Path(result["exports"][name])
                serving = serving_of(
                    self.job.target, export, self.device.type, self.dtype, self._depth(name), self.args.new_tokens
                )
                result["reference"][name] = judge(self.rows, told, plain, serving, result["engine"])
                result["offline"][name] = estimate(
                    self.job.target, export, self.held_out.path, self._depth(name), self.args.estimate_rows,
                    self.device.type, self.work / "gate" / name,
                )  # fmt: skip

    async def _serve(self, missing: list[tuple[int, str]]) -> None:
        result = self.result
        with result.phase("servers up"):
            servers = await self._start({name for _, name in missing})
            async with SGLangClient(next(iter(servers.values())).url) as client:
                result["engine"] = f"SGLang {(await client.facts()).version}"
        try:
            for concurrency, name in missing:
                with result.phase(f"serving {name}, {concurrency} at a time"):
                    sources, answers = await measure(servers[name].url, self.rows, self.args.new_tokens, concurrency)
                    write(self.answers / f"{name}-{concurrency}.json", answers)
                    result["serving"].setdefault(name, {})[str(concurrency)] = sources
        finally:
            await stop(servers)

    async def _start(self, names: set[str]) -> dict[str, Server]:
        """With CUDA graphs where all servers start with them, else all without."""
        flags, on_gpu = shlex.split(self.args.sglang_flags), self.device.type == "cuda"
        longest = max(row.text.prompt_tokens for row in self.rows) + self.args.new_tokens
        plain = server_options(
            self.job.target, self.device.type, self.dtype, longest, self.args.concurrencies[-1],
            MEMORY_FRACTION if on_gpu else 0.0, flags,
        )  # fmt: skip
        options = {name: plain for name in names}
        for name in names - {PLAIN}:
            export = Path(self.result["exports"][name])
            options[name] = speculating(plain, load_export(export).kind, export, self._depth(name))
        python, logs, graphs = find_python(), self.work / "logs", on_gpu and self.args.graphs != "off"
        try:
            servers = await start(python, options, logs, graphs)
        except HostError as error:
            if not graphs or self.args.graphs == "on":
                raise
            self.result.say(f"not with CUDA graphs: {error}")
            graphs = False
            servers = await start(python, options, logs, graphs)
        self.result["graphs"] = graphs
        return servers

    def _depth(self, name: str) -> int:
        """Guesses a round: the recipe's, or a block draft's own."""
        case = next(case for case in self.job.names if run_id(case) == name)
        draft = load_export(Path(self.result["exports"][name]))
        return serving_depth(draft, self.job.config(case).gate.num_draft_tokens)


TRAINED_WITH = ("only", "epochs", "batch_size", "samples", "response_tokens")
SERVED_WITH = ("rows_per_source", "new_tokens", "sglang_flags", "graphs", "concurrency", "estimate_rows")


def main() -> int:
    # Whoever stops this still gets to see what was measured.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    bench = Bench(parse())
    try:
        bench.train()
        bench.serve()
    except SpecfleetError as error:
        bench.result.say(f"failed: {error}")
        return 1
    finally:
        bench.result.save()
        print(f"\n{render(bench.result)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
