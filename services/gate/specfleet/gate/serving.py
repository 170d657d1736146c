"""Real serving: SGLang decodes held-out prompts with the exported draft, and must agree with the reference decoder.

Two things are compared on the text the server wrote. Every token must be the target's own choice after the tokens before it:
then the text is the target's greedy text. And the server must have needed as many rounds as the reference needs for that text.

Both sides round differently (other kernels, other batches), so a token may be another one where the target's best two logits
tie. TIE bounds by how much, relative to the largest logit there: between SGLang and transformers the hidden states of one
model were measured to differ by 1e-6 in float32 and by 1 to 2 % in bfloat16. A flipped guess of the draft costs or saves one
round, which ROUNDS bounds over all rows.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specfleet.drafts.acceptance import TextRow, offline_acceptance
from specfleet.drafts.base import Draft
from specfleet.gate.checks import FAIL, PASS, SKIP, Check
from specfleet.gate.rows import EvalRow
from specfleet.sglang.client import SGLangClient
from specfleet.sglang.launch import Server, ServerOptions
from specfleet.sglang.speculation import ALGORITHMS, speculating
from specfleet.target.dtypes import DTYPES, compute_dtype
from specfleet.target.hf import HFTarget

TIE = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 2e-2}
ROUNDS = {"float32": 0.01, "float16": 0.05, "bfloat16": 0.05}
# A CPU interprets the kernels: about a second a token.
_ROW_S = 600.0
# One row at a time needs no more; SGLang would take most of the memory for its cache.
_POOL_TOKENS = 4096
# SGLang refuses prompts within seven tokens of its context length.
_HEADROOM = 8


@dataclass(frozen=True)
class Served:
    """One answer. finish: stop or length. rounds: target passes after the prefill, which gave the first token; histogram[n] of
    them accepted n guesses."""

    row: EvalRow
    ids: list[int]
    finish: str
    rounds: int
    histogram: list[int]

    @property
    def text(self) -> TextRow:
        prompt = list(self.row.text.input_ids[: self.row.text.prompt_tokens])
        return TextRow([*prompt, *self.ids], len(prompt))


@dataclass(frozen=True)
class Serving:
    """How to serve: `depth` guesses a round."""

    python: str
    target_dir: Path
    export_dir: Path
    device: str
    dtype: str
    depth: int
    new_tokens: int
    log_path: Path
    flags: tuple[str, ...] = ()
    """Further flags of the server."""


def serving_depth(draft: Draft, wanted: int) -> int:
    """A block draft was trained to fill whole blocks, and is served so; a chain may have any length."""
    return draft.max_draft_tokens or wanted


def serving_dtype(wanted: str, device: str) -> str:
    """On a CPU in float32: what differs there is a defect, not rounding."""
    return "float32" if device == "cpu" else wanted


async def serve(
    rows: Sequence[EvalRow], kind: str, serving: Serving, progress: Callable[[int, int], None]
) -> tuple[str, list[Served]]:
    """(version of SGLang, answers), one row at a time as the reference decodes. Raises HostError SF-SGLANG-START, EngineError."""
    longest = max(row.text.prompt_tokens for row in rows) + serving.new_tokens + serving.depth + _HEADROOM
    options = ServerOptions(
        serving.target_dir,
        serving.device,
        serving.dtype,
        context_length=longest if serving.device == "cpu" else 0,
        pool_tokens=max(_POOL_TOKENS, 2 * longest),
        # Recording graphs that a few rows hardly replay is most of a start.
        prefill_graphs=False,
        flags=("--cuda-graph-max-bs-decode", "1", *serving.flags),
    )
    server = Server(serving.python, speculating(options, kind, serving.export_dir, serving.depth), serving.log_path)
    progress(0, len(rows))
    await server.start()
    try:
        async with SGLangClient(server.url) as client:
            answers = []
            for row in rows:
                answers.append(await answer(client, row, serving.new_tokens))
                progress(len(answers), len(rows))
            return (await client.facts()).version, answers
    finally:
        await server.stop()


async def answer(client: SGLangClient, row: EvalRow, new_tokens: int) -> Served:
    """The greedy answer to the row's prompt. Raises what SGLangClient raises."""
    prompt = list(row.text.input_ids[: row.text.prompt_tokens])
    request = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens}}
    said = await client.generate(request, _ROW_S)
    meta = said["meta_info"]
    return Served(
        row,
        list(said["output_ids"]),
        str(meta["finish_reason"]["type"]),
        # Absent when the server never verified a guess.
        int(meta.get("spec_verify_ct", 0)),
        list(meta.get("spec_correct_drafts_histogram", [])),
    )


def served_report(
    rows: Sequence[EvalRow], draft: Draft, serving: Serving, progress: Callable[[int, int], None]
) -> dict[str, Any]:
    """Serves the rows and compares. Raises what `serve` raises."""
    if serving.device != "cpu":
        torch.cuda.empty_cache()  # what earlier stages of the job still hold
    version, answers = asyncio.run(serve(rows, draft.kind, serving, progress))
    return {"engine": f"SGLang {version}", **compare(answers, draft, serving)}


def compare(answers: Sequence[Served], draft: Draft, serving: Serving) -> dict[str, Any]:
    """The answers beside the reference's judgement of them, on the same device in the same dtype."""
    target = HFTarget.load(serving.target_dir, draft.config.layer_ids, serving.dtype, serving.device)
    draft = draft.to(serving.device, compute_dtype(DTYPES[serving.dtype], serving.device))
    reference = offline_acceptance([item.text for item in answers], target, draft, serving.depth)
    report_rows = []
    for item, expected in zip(answers, reference, strict=True):
        others = _other_choices(target, item.text)
        report_rows.append(
            {
                "source": item.row.source,
                "id": item.row.id,
                "tokens": len(item.ids),
                "ids": item.ids,
                "finish": item.finish,
                "first_difference": others[0][0] if others else None,
                "differences": len(others),
                "widest_gap": max((gap for _, gap in others), default=0.0),
                "rounds": item.rounds,
                "reference_rounds": expected.rounds,
                "histogram": item.histogram,
            }
        )
    return {
        "algorithm": ALGORITHMS[draft.kind],
        "num_draft_tokens": serving.depth,
        "dtype": serving.dtype,
        "device": serving.device,
        "acceptance_length": _length(report_rows, "rounds"),
        "reference_acceptance_length": _length(report_rows, "reference_rounds"),
        "tolerance": {"tie": TIE[serving.dtype], "rounds": ROUNDS[serving.dtype]},
        "rows": report_rows,
    }


def check_served(report: dict[str, Any]) -> Check:
    """The verdict on what `served_report` found, or on why there was nothing to serve."""
    if "not_served" in report:
        return Check("served", SKIP, report["not_served"])
    rows, tolerance = report["rows"], report["tolerance"]
    how = f"{report['engine']}, {report['algorithm']}, {report['num_draft_tokens']} draft tokens, {report['dtype']}"
    wrong = [
        f"{row['source']} row {row['id']}: token {row['first_difference']} is not the target's (widest gap {row['widest_gap']:.2g})"
        for row in rows
        if row["widest_gap"] > tolerance["tie"]
    ]
    if wrong:
        return Check(
            "served", FAIL, f"{how}: {'; '.join(wrong)}; ties end at {tolerance['tie']:g} of the largest logit"
        )
    rounds, expected = (sum(row[name] for row in rows) for name in ("rounds", "reference_rounds"))
    lengths = (
        f"acceptance length {report['acceptance_length']:.3f}, reference {report['reference_acceptance_length']:.3f}"
    )
    if abs(rounds - expected) > tolerance["rounds"] * expected:
        detail = f"{how}: {lengths} ({rounds} rounds, expected {expected}, tolerance {tolerance['rounds']:.0%})"
        return Check("served", FAIL, detail)
    tokens, ties = (sum(row[name] for row in rows) for name in ("tokens", "differences"))
    return Check("served", PASS, f"{how}: {len(rows)} rows, {tokens} tokens, {ties} rounding ties; {lengths}")


def _length(rows: Sequence[dict[str, Any]], rounds: str) -> float:
    """Tokens committed per target pass; the first token of a row comes from its prefill."""
    passes = sum(row[rounds] for row in rows)
    return round(sum(row["tokens"] - 1 for row in rows) / passes, 4) if passes else 1.0


@torch.no_grad()
def _other_choices(target: HFTarget, text: TextRow) -> list[tuple[int, float]]:
    """(new token from 0, gap) wherever the text is not the target's likeliest token.

    gap: how far its logit lies below the best, relative to the largest magnitude there.
    """
    logits, _, _ = target.forward(torch.tensor([list(text.input_ids[:-1])]))
    chosen_TV = logits[text.prompt_tokens - 1 :].float()
    ids = torch.tensor(list(text.input_ids[text.prompt_tokens :]), device=chosen_TV.device)
    best = chosen_TV.max(-1).values
    gaps = (best - chosen_TV.gather(1, ids[:, None])[:, 0]) / chosen_TV.abs().max(-1).values
    return [(index, gap) for index, gap in enumerate(gaps.tolist()) if gap > 0]
