"""One case of the comparison, in a process of its own: trains a draft, measures it, writes one JSON file.

python -m benchmarks.strategies.case NAME --work DIR        (the driver, __main__.py, has written DIR/plan.json)
"""

import argparse
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import torch

from benchmarks.strategies.cases import case_of, configure
from benchmarks.strategies.plan import Plan, result_file
from benchmarks.strategies.table import by_source
from specfleet.config import RunConfig
from specfleet.data.prompt_set import Prompt
from specfleet.drafts.acceptance import Acceptance, TextRow, offline_acceptance
from specfleet.features.source import FeatureSetSource, open_features
from specfleet.policies.order import epoch_order
from specfleet.target.facts import build_contract, read_target_facts
from specfleet.target.hf import HFTarget
from specfleet.target.weights import load_embedding, load_raw_head
from specfleet.trainer.device import DTYPES
from specfleet.trainer.loader import page_locked
from specfleet.trainer.optim import MasterAdamW, learning_rate
from specfleet.trainer.parallel import Ranks
from specfleet.trainer.reduction import Share, Sums, accumulate
from specfleet.trainer.strategies.base import Strategy
from specfleet.trainer.strategies.table import build_strategy
from specfleet.wire.records_pb2 import CaptureContract, SampleRef, TaskAttempt, TaskKey

# Steps before the clock of tokens/s starts: kernels are loaded and memory is pooled by then.
WARM_STEPS = 20
# Training metrics are means over so many last steps, and are read from the device so often.
WINDOW_STEPS = 50
# Tokens (with padding) in one pass of the acceptance measurement.
EVAL_TOKENS = {"cpu": 4096, "cuda": 16384}


class RecordedTarget:
    """The members of HFTarget that offline_acceptance uses, answered from a feature set."""

    def __init__(self, target: Path, source: FeatureSetSource, rows: Sequence[Prompt]) -> None:
        self.embedding_VH, self.head_VH = load_embedding(target), load_raw_head(target)
        self._source = source
        self._index = {tuple(row.input_ids): row.index for row in rows}

    def capture(self, batch: Sequence[Sequence[int]]) -> list[dict[str, torch.Tensor]]:
        return [self._source.get(reference(0, self._index[tuple(ids)]), ["aux_states"]) for ids in batch]


def reference(epoch: int, index: int) -> SampleRef:
    return SampleRef(attempt=TaskAttempt(task=TaskKey(epoch=epoch, prompt_index=index), attempt=1))


def ahead(
    load: Callable[[int], dict[str, torch.Tensor]], count: int, threads: int = 3, depth: int = 8
) -> Iterator[dict[str, torch.Tensor]]:
    """load(0), load(1), …, load(count − 1), computed up to `depth` ahead of the reader."""
    with ThreadPoolExecutor(threads) as pool:
        pending = deque(pool.submit(load, i) for i in range(min(depth, count)))
        for i in range(count):
            result = pending.popleft().result()
            if i + depth < count:
                pending.append(pool.submit(load, i + depth))
            yield result


class Training:
    """The trainer's step (collate, accumulate, update) without its services."""

    def __init__(self, config: RunConfig, plan: Plan, contract: CaptureContract, device: torch.device) -> None:
        self.config, self.plan, self.device = config, plan, device
        self.source, self.recorded = FeatureSetSource(plan.train, contract), open_features(plan.train)
        prompts, trainer = self.recorded.prompts, config.trainer
        torch.manual_seed(trainer.seed)
        self.strategy: Strategy = build_strategy(
            config, contract, Path(plan.target), prompts, plan.steps, device, DTYPES[trainer.dtype]
        )
        self.optimizer = MasterAdamW(
            self.strategy.draft.named_parameters(), betas=trainer.betas, max_grad_norm=trainer.max_grad_norm
        )

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        size, count = self.plan.batch_size, len(self.recorded.num_tokens)
        epoch, place = divmod(step, count // size)
        samples = []
        for index in epoch_order(self.config.data.seed, epoch, count)[place * size : (place + 1) * size].tolist():
            sample = self.source.get(reference(epoch, index))
            samples.append({**sample, "visit": torch.tensor([epoch, index])})
        return page_locked(self.strategy.collate, self.device)(samples)

    def run(self) -> dict[str, Any]:
        """Trains; returns speed, memory and training metrics."""
        trainer, ranks, steps = self.config.trainer, Ranks(device=self.device), self.plan.steps
        shares: list[Share] = []
        first, last = Sums(), Sums()
        tokens = timed_tokens = 0
        began = timed = time.monotonic()
        for step, batch in enumerate(ahead(self.batch, steps)):
            if step == min(WARM_STEPS, steps - 1):
                synchronize(self.device)
                timed, timed_tokens = time.monotonic(), tokens
            self.strategy.begin_step(step + 1)
            shares.append(accumulate(self.strategy, [batch], self.optimizer, ranks))
            lr = learning_rate(step, peak=trainer.lr, total=steps, warmup_ratio=trainer.warmup_ratio)
            self.optimizer.step(lr, ranks)
            tokens += shares[-1].num_tokens
            if step == 0:
                first = shares[0].read()
            if len(shares) == WINDOW_STEPS or step == steps - 1:
                last, count = Sums.total([share.read().fact() for share in shares]), len(shares)
                print(f"step {step + 1} of {steps}: {ratios(last, count)}", flush=True)
                shares = []
        synchronize(self.device)
        now = time.monotonic()
        return {
            "steps": steps,
            "tokens": tokens,
            "tokens_per_s": round((tokens - timed_tokens) / (now - timed)),
            "train_s": round(now - began, 1),
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if self.device.type == "cuda" else None,
            "loss_first": round(first.pairs["loss"][0], 4),
            "training": ratios(last, count),
        }


def ratios(sums: Sums, steps: int) -> dict[str, float]:
    """Means over steps, of the metrics that say how training goes."""
    wanted = ("ce", "l1", "acc", "acc_0", "acc_1", "alpha", "alpha_0", "tau_greedy", "tau_prob", "confidence_bias")
    found = {name: sums.pairs[name] for name in wanted if name in sums.pairs}
    means = {name: numerator / max(denominator, 1.0) for name, (numerator, denominator) in found.items()}
    return {"loss": round(sums.pairs["loss"][0] / steps, 4), **{name: round(x, 4) for name, x in means.items()}}


def measure(training: Training, target: RecordedTarget, rows: Sequence[Prompt]) -> list[Acceptance]:
    texts = [TextRow(row.input_ids, row.prompt_tokens) for row in rows]
    draft, guesses = training.strategy.draft, training.config.gate.num_draft_tokens
    draft.eval()
    counts = offline_acceptance(texts, cast(HFTarget, target), draft, guesses, EVAL_TOKENS[training.device.type])
    draft.train()
    return counts


def run_case(name: str, plan: Plan) -> dict[str, Any]:
    device = torch.device(plan.device)
    config = configure(name, Path(plan.target), plan.batch_size)
    contract = build_contract(config, read_target_facts(plan.target))
    rows = open_features(plan.held_out).prompts.read(plan.measured)
    training = Training(config, plan, contract, device)
    target = RecordedTarget(Path(plan.target), FeatureSetSource(plan.held_out, contract), rows)
    untrained = measure(training, target, rows)
    told = training.run()
    began = time.monotonic()
    trained = measure(training, target, rows)
    trainer = config.trainer
    return {
        "recipe": case_of(name).recipe,
        "settings": {
            "lr": trainer.lr, "warmup_ratio": trainer.warmup_ratio, "max_grad_norm": trainer.max_grad_norm,
            "seed": trainer.seed, "layers": list(contract.layers), **config.strategy.model_dump(mode="json"),
        },
        "parameters": sum(parameter.numel() for parameter in training.strategy.draft.parameters()),
        **told,
        "guesses": config.gate.num_draft_tokens,
        "untrained": by_source(rows, untrained),
        "tau": by_source(rows, trained),
        "measure_s": round(time.monotonic() - began, 2),
    }  # fmt: skip


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("name", help="a case, as in --only of the driver")
    options.add_argument("--work", type=Path, required=True)
    args = options.parse_args()
    plan = Plan.load(args.work)
    result = {**run_case(args.name, plan), "identity": plan.identity(args.name)}
    out = result_file(args.work, args.name)
    partial = out.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    partial.replace(out)


if __name__ == "__main__":
    main()
