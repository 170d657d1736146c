"""Acceptance length of every strategy on one target after the same number of training tokens, beside an n-gram baseline.

    python benchmarks/strategies.py --target DIR --data FILE [--only eagle3,dflash] [--epochs 6] [--out RESULT.json]

In one process and without services: the target captures every row once, each strategy trains on the same rows in the same
order, and held-out rows are measured with the offline estimator (drafts/acceptance.py). Needs a GPU to be quick; --rows and
--epochs make a CPU-sized run. FILE: conversations with the target's own token ids and a `split` (train, dev, eval) per row.
"""

import argparse
import json
import platform
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from specfleet.config import RunConfig, parse_config
from specfleet.config.features import total_steps
from specfleet.contracts.errors import CaptureItemError
from specfleet.data.prepare import PrepareOptions, prepare_prompt_set
from specfleet.data.prompt_set import PromptSet
from specfleet.drafts.acceptance import Acceptance, TextRow, ngram_acceptance, offline_acceptance, total_acceptance
from specfleet.policies.order import epoch_order
from specfleet.target.facts import TargetFacts, build_contract, read_target_facts
from specfleet.target.hf import HFTarget
from specfleet.trainer.optim import MasterAdamW, learning_rate
from specfleet.trainer.parallel import Ranks
from specfleet.trainer.reduction import accumulate
from specfleet.trainer.strategies.base import Strategy
from specfleet.trainer.strategies.table import build_strategy

# name → (strategy section, learning rate, clip, warmup, guesses per round). Peers' settings where they are known.
EAGLE = "draft_vocab_size: 16384, ttt_length: 7"
# SmolLM2 has no mask token and no unused embedding row: id 16 is reserved and never occurs in the data.
BLOCK = "num_layers: 5, num_anchors: 256, mask_token_id: 16"
CASES: dict[str, tuple[str, float, float, float, int]] = {
    "eagle3": (f"name: eagle3, {EAGLE}", 1e-3, 0.5, 0.015, 5),
    "eagle3-seed43": (f"name: eagle3, {EAGLE}", 1e-3, 0.5, 0.015, 5),
    "eagle3.1": (f"name: eagle3, {EAGLE}, fc_norm: true, norm_output: true", 1e-3, 0.5, 0.015, 5),
    "eagle3-lk": (f"name: eagle3, {EAGLE}, lk: lambda", 1e-3, 0.5, 0.015, 5),
    "peagle": (
        "name: peagle, draft_vocab_size: 16384, num_layers: 4, num_depths: 5, mask_token_id: 16",
        6e-4,
        1.0,
        0.04,
        5,
    ),
    "dflash": (f"name: dflash, block_size: 8, loss_decay: 4.0, {BLOCK}", 6e-4, 1.0, 0.04, 7),
    "dflash-dpace": (f"name: dflash, block_size: 8, loss: dpace, {BLOCK}", 6e-4, 1.0, 0.04, 7),
    "domino": (f"name: domino, block_size: 8, loss_decay: 4.0, {BLOCK}", 6e-4, 1.0, 0.04, 7),
    "dspark": (f"name: dspark, block_size: 7, {BLOCK}", 6e-4, 1.0, 0.04, 7),
}
BATCH = 16


@dataclass
class Rows:
    """Captured rows on the CPU. features: name → tensor; aux_states holds every layer of `layers`, in that order."""

    layers: tuple[int, ...]
    hidden: int
    features: list[dict[str, torch.Tensor]]

    def of(self, index: int, layers: Sequence[int]) -> dict[str, torch.Tensor]:
        sample = dict(self.features[index])
        chunks = sample["aux_states"].split(self.hidden, dim=1)
        sample["aux_states"] = torch.cat([chunks[self.layers.index(layer)] for layer in layers], dim=1)
        return sample


class CapturedTarget:
    """The members of HFTarget that offline_acceptance uses, answered from captured rows."""

    def __init__(self, target: HFTarget, rows: Rows, ids: Sequence[Sequence[int]], layers: Sequence[int]) -> None:
        self.embedding_VH, self.head_VH = target.embedding_VH, target.head_VH
        self._rows, self._layers = rows, layers
        self._index = {tuple(row): index for index, row in enumerate(ids)}

    def capture(self, batch: Sequence[Sequence[int]]) -> list[dict[str, torch.Tensor]]:
        return [self._rows.of(self._index[tuple(ids)], self._layers) for ids in batch]


def configure(name: str, target: Path, epochs: int) -> RunConfig:
    section, lr, clip, warmup, _ = CASES[name]
    seed = int(name.rpartition("-seed")[2]) if "-seed" in name else 42
    return parse_config(
        f"model: {{target: {target}}}\ndata: {{train: [x], max_length: 1024, seed: {seed}}}\nstrategy: {{{section}}}\n"
        f"trainer: {{batch_size: {BATCH}, epochs: {epochs}, lr: {lr}, max_grad_norm: {clip}, warmup_ratio: {warmup}, "
        f"seed: {seed}}}\nflow: {{high_samples: 64, low_samples: 64, tail: drop}}"
    )


def capture(target: HFTarget, prompts: PromptSet, batch_tokens: int) -> Rows:
    features: list[dict[str, torch.Tensor]] = []
    order = sorted(range(len(prompts)), key=prompts.num_tokens_of)
    found: dict[int, dict[str, torch.Tensor]] = {}
    start = 0
    while start < len(order):
        size = max(1, batch_tokens // max(prompts.num_tokens_of(order[min(start + 63, len(order) - 1)]), 1))
        part = order[start : start + size]
        read = prompts.read(part)
        for index, prompt, item in zip(part, read, target.capture([p.input_ids for p in read]), strict=True):
            if isinstance(item, CaptureItemError):
                raise item
            mask = torch.frombuffer(bytearray(prompt.loss_mask), dtype=torch.uint8)
            found[index] = {"input_ids": torch.tensor(prompt.input_ids, dtype=torch.int32), "loss_mask": mask, **item}
        start += size
    features = [found[index] for index in range(len(order))]
    return Rows(target.layers, target.facts.hidden_size, features)


def train(
    name: str, config: RunConfig, facts: TargetFacts, prompts: PromptSet, rows: Rows, device: torch.device
) -> tuple[Strategy, dict[str, Any]]:
    contract = build_contract(config, facts)
    steps = total_steps(config, len(prompts))
    torch.manual_seed(config.trainer.seed)
    strategy = build_strategy(config, contract, Path(facts.path), prompts, steps, device, torch.bfloat16)
    optimizer = MasterAdamW(strategy.draft.named_parameters(), max_grad_norm=config.trainer.max_grad_norm)
    ranks = Ranks(device=device)

    def window(step: int) -> dict[str, torch.Tensor]:
        epoch, place = divmod(step, len(prompts) // BATCH)
        chosen = epoch_order(config.data.seed, epoch, len(prompts))[place * BATCH : (place + 1) * BATCH]
        samples = [
            {**rows.of(int(i), contract.layers), "visit": torch.tensor([epoch, int(i)], dtype=torch.int64)}
            for i in chosen
        ]
        return strategy.collate(samples)

    tokens, first, began = 0, {}, time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        ahead = [pool.submit(window, step) for step in range(min(8, steps))]
        for step in range(steps):
            batch = ahead.pop(0).result()
            if step + 8 < steps:
                ahead.append(pool.submit(window, step + 8))
            strategy.begin_step(step + 1)
            sums = accumulate(strategy, [batch], optimizer, ranks)
            trainer = config.trainer
            optimizer.step(learning_rate(step, peak=trainer.lr, total=steps, warmup_ratio=trainer.warmup_ratio), ranks)
            tokens += sums.num_tokens
            metrics = {key: n / d if d else n for key, (n, d) in sums.pairs.items()}
            first = first or metrics
            if step == 20:
                began, tokens_then = time.monotonic(), tokens  # kernels are warm from here
    seconds = time.monotonic() - began
    speed = (tokens - tokens_then) / seconds if steps > 21 else 0.0
    keep = ("loss", "acc_0", "acc_1", "acc", "tau_greedy", "accept_len")
    told = {key: round(metrics[key], 4) for key in keep if key in metrics}
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    torch.cuda.reset_peak_memory_stats() if device.type == "cuda" else None
    return strategy, {
        "steps": steps, "tokens": tokens, "tokens_per_s": round(speed), "seconds": round(seconds, 1),
        "peak_gib": round(peak, 2), "loss_first": round(first["loss"], 3), **told,
    }  # fmt: skip


def one_case(
    name: str, config: RunConfig, facts: TargetFacts, prompts: PromptSet, training: Rows, device: torch.device,
    target: HFTarget, held_out: Rows, texts: Sequence[TextRow], marks: Sequence[tuple[str, str]],
) -> dict[str, Any]:  # fmt: skip
    strategy, told = train(name, config, facts, prompts, training, device)
    depth, began = CASES[name][4], time.monotonic()
    layers = build_contract(config, facts).layers
    seen: Any = CapturedTarget(target, held_out, [text.input_ids for text in texts], layers)
    counts = offline_acceptance(texts, seen, strategy.draft.eval(), depth, 8192)
    return told | {"k": depth, "tau": per_source(marks, counts), "eval_s": round(time.monotonic() - began, 1)}


def per_source(rows: Sequence[tuple[str, str]], counts: Sequence[Acceptance]) -> dict[str, dict[str, float]]:
    table = {}
    for source in sorted({source for source, _ in rows}):
        every = [c for (s, _), c in zip(rows, counts, strict=True) if s == source]
        stop = [c for (s, finish), c in zip(rows, counts, strict=True) if s == source and finish == "stop"]
        table[source] = {
            "all": round(total_acceptance(every).length, 3),
            "stop": round(total_acceptance(stop).length, 3),
        }
    return table


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--target", type=Path, required=True)
    options.add_argument("--data", type=Path, required=True)
    options.add_argument("--only", default=",".join(CASES))
    options.add_argument("--epochs", type=int, default=6)
    options.add_argument("--rows", type=int, default=0, help="Training rows; 0: all.")
    options.add_argument("--out", type=Path)
    args = options.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts = read_target_facts(args.target)
    names = [name for name in args.only.split(",") if name]
    configs = {name: configure(name, args.target, args.epochs) for name in names}
    layers = sorted({layer for config in configs.values() for layer in build_contract(config, facts).layers})
    with TemporaryDirectory() as scratch:
        sets = [
            prepare_prompt_set(
                [args.data], args.target, Path(scratch),
                PrepareOptions(max_length=1024, max_samples=limit, keep={"split": splits}),
            )
            for splits, limit in ((["train"], args.rows), (["dev", "eval"], 0))
        ]  # fmt: skip
        began = time.monotonic()
        target = HFTarget.load(args.target, layers, "bfloat16", str(device), "post_norm")
        training, held_out = (capture(target, prompts, 32768 if device.type == "cuda" else 4096) for prompts in sets)
        seconds = time.monotonic() - began
        tokens = sum(len(row["input_ids"]) for row in training.features)
        result: dict[str, Any] = {
            "date": time.strftime("%Y-%m-%d"), "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "train_rows": len(sets[0]), "train_tokens_per_epoch": tokens, "epochs": args.epochs,
            "capture_tokens_per_s": round(tokens / seconds), "strategies": {},
        }  # fmt: skip
        prompts = sets[1].read(range(len(sets[1])))
        texts = [TextRow(prompt.input_ids, prompt.prompt_tokens) for prompt in prompts]
        marks = [(prompt.source, prompt.finish) for prompt in prompts]
        for depth in sorted({CASES[name][4] for name in names}):
            result["strategies"][f"ngram (k={depth}, untrained)"] = {
                "tau": per_source(marks, ngram_acceptance(texts, depth))
            }
        for name in names:
            try:
                told = one_case(name, configs[name], facts, sets[0], training, device, target, held_out, texts, marks)
            except Exception as error:  # the other strategies are still worth measuring; the table shows the failure
                traceback.print_exc()
                told = {"error": f"{type(error).__name__}: {error}"[:500], "tau": {}}
            result["strategies"][name] = told
            print(json.dumps({name: told}), flush=True)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    for name, told in result["strategies"].items():
        print(f"{name:28s}", "  ".join(f"{s} {v['all']:.2f} ({v['stop']:.2f})" for s, v in told["tau"].items()))


if __name__ == "__main__":
    main()
