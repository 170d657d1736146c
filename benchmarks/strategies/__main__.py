"""Acceptance length of every strategy on one target after the same number of training tokens, beside an n-gram baseline.

    make bench-strategies DATA=conversations.jsonl.gz                    (or: python -m benchmarks.strategies --data …)
    python -m benchmarks.strategies --device cpu --samples 24 --response-tokens 48 --tokens 1000 --batch-size 4 --rows-per-source 1

The target captures every row once into a feature set that serves all cases. Each case (cases.py: a recipe, a seed) then trains
in a process of its own, several at a time on one GPU, and is measured with the offline estimator (drafts/acceptance.py) on
held-out rows before and after. A case's result is kept when it ends: a run that is stopped, or in which a case fails, still
writes and prints the others, and --resume goes on where it stopped.

--data: conversations with a `split` per row (train, dev, eval), best with the target's own token ids.
"""

import argparse
import asyncio
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.host import ROOT, host
from benchmarks.strategies.cases import CASES, DEFAULT, MAX_LENGTH, configure
from benchmarks.strategies.features import Recorder, union_contract
from benchmarks.strategies.plan import Plan, result_file
from benchmarks.strategies.pool import run_all
from benchmarks.strategies.table import by_source, render
from specfleet.data.prepare import PrepareOptions, prepare_prompt_set
from specfleet.data.prompt_set import Prompt, PromptSet
from specfleet.drafts.acceptance import TextRow, ngram_acceptance
from specfleet.target.hub import target_dir
from specfleet.trainer.device import pick_device

# Tokens (with padding) the target runs at once.
CAPTURE_TOKENS = {"cpu": 4096, "cuda": 32768}
# A case with a small target fits into this much of a GPU, logits of a whole step included.
GIB_PER_JOB = 12
# A case has one thread that launches, and three that collate a part of the time.
CORES_PER_JOB = 2


def parse() -> argparse.Namespace:
    cases = f"Cases, in order, of: {', '.join(CASES)}. NAME:section.key=value changes one."
    options = argparse.ArgumentParser(
        prog="python -m benchmarks.strategies",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("--target", default="builtin:smollm2-135m-instruct")
    options.add_argument("--data", default="builtin:smollm2-demo")
    options.add_argument("--only", default=",".join(DEFAULT), help=cases)
    options.add_argument("--tokens", type=int, default=4_730_000, help="Training tokens of each case.")
    options.add_argument("--batch-size", type=int, default=16)
    options.add_argument("--samples", type=int, default=0, help="Use at most so many training rows; 0: all.")
    options.add_argument("--response-tokens", type=int, default=0, help="Cut answers after so many tokens; 0: never.")
    options.add_argument("--rows-per-source", type=int, default=0, help="Measure at most so many rows; 0: all.")
    options.add_argument("--jobs", type=int, default=0, help="Cases at a time; 0: what cores and GPU memory allow.")
    options.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    options.add_argument(
        "--work", type=Path, default=ROOT / "runs" / "bench-strategies", help="Features, logs, results."
    )
    options.add_argument(
        "--resume", action="store_true", help="Keep the results of cases that ended under equal settings."
    )
    options.add_argument(
        "--out", type=Path, help="Result file; default: benchmarks/results/strategies-DEVICE-DATE.json."
    )
    args = options.parse_args()
    args.names = [name for name in args.only.split(",") if name]
    if unknown := [name for name in args.names if name.split(":")[0] not in CASES]:
        options.error(f"--only {','.join(unknown)}: known cases are {', '.join(CASES)}")
    return args


def plan_of(args: argparse.Namespace, device: torch.device, target: Path) -> tuple[Plan, dict[str, Any], list[Prompt]]:
    """Prepares prompts, captures what is missing. Also: facts about it for the result, and the rows to measure."""
    train, held_out = (
        prepare_prompt_set(
            [args.data], target, args.work / "prompts",
            PrepareOptions(MAX_LENGTH, args.response_tokens, limit, keep={"split": splits}),
        )
        for splits, limit in ((["train"], args.samples), (["dev", "eval"], 0))
    )  # fmt: skip
    if len(train) < args.batch_size:
        raise SystemExit(f"{len(train)} training rows do not fill one batch of {args.batch_size}: lower --batch-size")
    rows = chosen_rows(held_out, args.rows_per_source)
    recorder = Recorder(union_contract(target, args.batch_size), device.type, CAPTURE_TOKENS[device.type])
    train_url, held_out_url = (
        recorder.record(args.work / "features", prompts, wanted)
        for prompts, wanted in ((train, range(len(train))), (held_out, [row.index for row in rows]))
    )
    num_tokens = int(train.num_tokens.sum())
    steps = max(1, round(args.tokens * len(train) / num_tokens / args.batch_size))
    facts = {
        "train_rows": len(train),
        "train_tokens_per_epoch": num_tokens,
        "steps": steps,
        "batch_size": args.batch_size,
        "measured_rows": len(rows),
        "capture_tokens_per_s": round(recorder.tokens / recorder.seconds) if recorder.tokens else None,
    }
    measured = tuple(row.index for row in rows)
    plan = Plan(str(target), device.type, args.batch_size, steps, train_url, held_out_url, measured)
    return plan, facts, rows


def chosen_rows(prompts: PromptSet, per_source: int) -> list[Prompt]:
    """The first rows of each source; 0: all."""
    seen: dict[str, int] = {}
    rows = []
    for row in prompts.read(range(len(prompts))):
        seen[row.source] = seen.get(row.source, 0) + 1
        if not per_source or seen[row.source] <= per_source:
            rows.append(row)
    return rows


def baselines(rows: list[Prompt], names: list[str], target: Path, batch_size: int) -> dict[str, Any]:
    texts = [TextRow(row.input_ids, row.prompt_tokens) for row in rows]
    depths = sorted({configure(name, target, batch_size).gate.num_draft_tokens for name in names})
    return {f"n-gram (k={k}), untrained": by_source(rows, ngram_acceptance(texts, k)) for k in depths}


def default_jobs(device: torch.device) -> int:
    cores = len(os.sched_getaffinity(0)) // CORES_PER_JOB
    if device.type == "cuda":
        cores = min(cores, torch.cuda.get_device_properties(device).total_memory // 2**30 // GIB_PER_JOB)
    return max(1, cores)


def finished(args: argparse.Namespace, plan: Plan, name: str) -> dict[str, Any] | None:
    """The result of a case, if it ended under this very plan."""
    path = result_file(args.work, name)
    told: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return told if told.pop("identity", None) == plan.identity(name) else None


def main() -> int:
    args, began = parse(), time.monotonic()
    device = pick_device(args.device, 0)
    target = target_dir(args.target).resolve()
    logs = args.work / "logs"
    if not args.resume:
        shutil.rmtree(args.work / "cases", ignore_errors=True)
    for folder in (args.work / "cases", logs):
        folder.mkdir(parents=True, exist_ok=True)
    plan, facts, rows = plan_of(args, device, target)
    plan.save(args.work)
    jobs = args.jobs or default_jobs(device)
    result: dict[str, Any] = {
        **host("benchmarks.strategies", device), **facts, "jobs": jobs, "setup_s": round(time.monotonic() - began, 1),
        "baselines": baselines(rows, args.names, target, args.batch_size), "strategies": {},
    }  # fmt: skip
    slug = result["device"].lower().split()[-1]
    out = args.out or ROOT / "benchmarks" / "results" / f"strategies-{slug}-{result['date']}.json"

    def write() -> None:
        """After every case, so that a kill loses none that ended."""
        known = {name: finished(args, plan, name) or result["strategies"].get(name) for name in args.names}
        result["strategies"] = {name: told for name, told in known.items() if told}
        result["total_s"] = round(time.monotonic() - began, 1)
        partial = out.with_suffix(".partial")
        partial.write_text(json.dumps(result, indent=1) + "\n")
        partial.replace(out)

    def ended(name: str, code: int) -> None:
        if code:
            tail = (logs / f"{name}.log").read_text(errors="replace").strip().splitlines()[-1:]
            result["strategies"][name] = {"error": f"exit code {code}: {' '.join(tail)[:300]}"}
        write()
        print(f"{time.monotonic() - began:6.1f} s  {name}: {'failed, see its log' if code else 'done'}", flush=True)

    print(f"{time.monotonic() - began:6.1f} s  {facts}, {jobs} at a time, logs in {logs}", flush=True)
    write()
    waiting = [name for name in args.names if name not in result["strategies"]]
    commands = {
        name: [sys.executable, "-m", "benchmarks.strategies.case", name, "--work", str(args.work)] for name in waiting
    }
    threads = max(1, len(os.sched_getaffinity(0)) // jobs)
    env = {
        **os.environ, "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }  # fmt: skip
    completed = asyncio.run(run_all(commands, jobs, logs, env, ended))
    write()
    print(
        f"\nacceptance length, all rows (finished rows), after the same {facts['steps']} steps\n{render(result)}\n\n{out}"
    )
    return 0 if completed and all("error" not in told for told in result["strategies"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
