"""Real SGLang speculates with our exports, on a CPU: the target's own text, in the rounds that the reference decoder needs."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.blocks import LAYERS as BLOCK_LAYERS
from fixtures.blocks import tiny_dflash
from fixtures.eagle3 import LAYERS as EAGLE_LAYERS
from fixtures.eagle3 import tiny_draft, tiny_strategy
from fixtures.gate_case import make_gate_case, write_eval_set
from fixtures.overfit import learn
from fixtures.sglang import sglang_python
from fixtures.tiny import make_tiny_target

from specfleet.config.strategies import DFlashSection
from specfleet.data.prompt_set import PromptSet
from specfleet.drafts.base import Draft
from specfleet.drafts.decode import decode_greedy
from specfleet.drafts.export import export_draft, load_export
from specfleet.gate.evaluate import evaluate
from specfleet.gate.exporting import export_checkpoint
from specfleet.gate.rows import select_rows
from specfleet.gate.serving import Served, Serving, check_served, compare, serve
from specfleet.target.hf import HFTarget
from specfleet.trainer.strategies.dflash import DFlashStrategy
from specfleet.wire.gate_pb2 import ExportDraftRequest, StartGateRequest

pytestmark = [pytest.mark.integration, pytest.mark.sglang, pytest.mark.timeout(600)]

NEW_TOKENS = 10


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights that bfloat16 holds exactly, as those of real targets."""
    return make_tiny_target(tmp_path_factory.mktemp("target"), dtype=torch.bfloat16)


def assert_agreement(served: dict[str, Any], target_dir: Path, eval_set: Path) -> None:
    target = HFTarget.load(target_dir, (1,), "float32")
    prompts = {
        row.id: list(row.text.input_ids[: row.text.prompt_tokens]) for row in select_rows(PromptSet.open(eval_set), 0)
    }
    assert len(served["rows"]) == 2
    for row in served["rows"]:
        plain = decode_greedy(target, None, prompts[row["id"]], NEW_TOKENS, 0, target.facts.eos_token_ids)
        assert row["ids"] == plain.ids
        assert row["differences"] == 0
        assert row["rounds"] == row["reference_rounds"]
        assert sum(row["histogram"]) == row["rounds"]
    # Neither nothing nor everything was accepted: both would hide a fault.
    assert 1 < served["acceptance_length"] < served["num_draft_tokens"] + 1
    assert served["acceptance_length"] == served["reference_acceptance_length"]


def test_a_gate_job_serves_eagle3(target_dir: Path, tmp_path: Path) -> None:
    case = make_gate_case(target_dir, tmp_path, steps=40)
    export = tmp_path / "export"
    export_checkpoint(ExportDraftRequest(checkpoint_uri=str(case.checkpoint), layout="sglang", output_dir=str(export)))
    request = StartGateRequest(
        run_id="gate-test", export_dir=str(export), target=str(target_dir), eval_set_uri=str(case.eval_set),
        num_draft_tokens=3, dtype="float32", output_dir=str(tmp_path / "gate"), serve_engine="sglang",
        serve_new_tokens=NEW_TOKENS,
    )  # fmt: skip
    stages: list[tuple[str, int, int]] = []
    report = evaluate(request, "cpu", lambda *progress: stages.append(progress))
    assert_agreement(report["served"], target_dir, case.eval_set)
    assert report["served"]["engine"] == "SGLang 0.5.14"
    assert report["served"]["algorithm"] == "EAGLE3"
    assert [check["result"] for check in report["checks"] if check["name"] == "served"] == ["PASS"]
    assert report["verdict"] == "PASS", report["checks"]
    assert stages[-1] == ("serving", 2, 2)
    assert "## Served" in (tmp_path / "gate" / "report.md").read_text()


@dataclass(frozen=True)
class Case:
    """Two prompts with their greedy answers; `sample`: the features of the first, to be learnt by heart."""

    target: HFTarget
    rows: list[list[int]]
    sample: dict[str, torch.Tensor]

    @classmethod
    def of(cls, target_dir: Path, layers: tuple[int, ...]) -> "Case":
        target = HFTarget.load(target_dir, layers, "float32")
        rows = [[*p, *decode_greedy(target, None, p, 24, 0).ids] for p in ([300, 12, 80] * 4, [17, 200, 33] * 4)]
        (item,) = target.capture(rows[:1])
        assert isinstance(item, dict)
        mask = torch.ones(len(rows[0]), dtype=torch.uint8)
        return cls(target, rows, {**item, "input_ids": torch.tensor(rows[0], dtype=torch.int32), "loss_mask": mask})

    def serve(self, draft: Draft, folder: Path, depth: int) -> tuple[list[Served], Serving]:
        """Exports, serves and compares; returns the answers and how they came about."""
        export = export_draft(draft, "sglang", folder / "export").directory
        target_dir = Path(self.target.path)
        eval_set = write_eval_set(folder / "eval", target_dir, self.rows)
        serving = Serving(
            python=sglang_python(), target_dir=target_dir, export_dir=export, device="cpu", dtype="float32", depth=depth,
            new_tokens=NEW_TOKENS, log_path=folder / "sglang.log",
        )  # fmt: skip
        chosen = select_rows(PromptSet.open(eval_set), 1)
        version, answers = asyncio.run(serve(chosen, draft.kind, serving, lambda done, total: None))
        served = {"engine": f"SGLang {version}", **compare(answers, load_export(export), serving)}
        assert_agreement(served, target_dir, eval_set)
        assert check_served(served).result == "PASS"
        return answers, serving


def test_eagle31_with_a_vocabulary_of_its_own(target_dir: Path, tmp_path: Path) -> None:
    case = Case.of(target_dir, EAGLE_LAYERS)
    draft = tiny_draft(fc_norm=True, norm_output=True)
    # The answers' tokens and some more: ids of the draft are not those of the target.
    size, said = draft.config.draft_vocab_size, sorted({token for row in case.rows for token in row})
    chosen = torch.tensor(sorted([*said, *[token for token in range(384) if token not in said][: size - len(said)]]))
    draft.set_vocabulary(chosen - torch.arange(size), torch.zeros(384, dtype=torch.bool).index_fill(0, chosen, True))
    learn(tiny_strategy(draft, case.target.embedding_VH, case.target.head_VH), case.sample, steps=40)
    case.serve(draft, tmp_path, depth=3)


def test_dflash_and_another_draft(target_dir: Path, tmp_path: Path) -> None:
    case = Case.of(target_dir, BLOCK_LAYERS)
    draft = tiny_dflash()
    section = DFlashSection(name="dflash", block_size=draft.config.block_size, num_anchors=1000)
    learn(DFlashStrategy(section, draft, case.target.embedding_VH, case.target.head_VH), case.sample, steps=60)
    answers, serving = case.serve(draft, tmp_path, depth=4)

    # Served with one draft and judged with another: the numbers must not agree.
    mistaken = check_served({"engine": "SGLang", **compare(answers, tiny_dflash(seed=5), serving)})
    assert mistaken.result == "FAIL"
    assert "rounds, expected" in mistaken.detail
