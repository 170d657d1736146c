"""The verdict on what a server said, without a server."""

import sys
from pathlib import Path
from typing import Any

import pytest
from fixtures.blocks import tiny_dflash
from fixtures.gate_case import GateCase, make_gate_case

from specfleet.contracts.errors import HostError
from specfleet.drafts.acceptance import TextRow
from specfleet.drafts.decode import decode_greedy
from specfleet.drafts.export import load_export
from specfleet.gate.evaluate import evaluate
from specfleet.gate.exporting import export_checkpoint
from specfleet.gate.rows import EvalRow
from specfleet.gate.serving import ROUNDS, TIE, Served, Serving, check_served, compare, serving_depth, serving_dtype
from specfleet.target.hf import HFTarget
from specfleet.wire.gate_pb2 import ExportDraftRequest, StartGateRequest


@pytest.fixture(scope="module")
def case(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> GateCase:
    return make_gate_case(tiny_target, tmp_path_factory.mktemp("gate-case"), steps=5)


def exported(case: GateCase, out: Path, layout: str) -> Path:
    export_checkpoint(ExportDraftRequest(checkpoint_uri=str(case.checkpoint), layout=layout, output_dir=str(out)))
    return out


def test_a_reference_answer_passes_and_an_altered_one_does_not(case: GateCase, tmp_path: Path) -> None:
    export = exported(case, tmp_path / "export", "sglang")
    draft = load_export(export)
    target = HFTarget.load(case.target, draft.config.layer_ids, "float32")
    prompt = list(range(20, 32))
    decoded = decode_greedy(target, draft.drafter(target.embedding_VH, target.head_VH), prompt, 12, 3, [2])
    row = EvalRow("r", "s", "length", TextRow([*prompt, 1, 1], len(prompt)), loops=False)
    serving = Serving("python", case.target, export, "cpu", "float32", 3, 12, tmp_path / "log")

    def verdict(ids: list[int], rounds: int) -> tuple[str, str]:
        report = compare([Served(row, ids, "length", rounds, [])], draft, serving)
        check = check_served({"engine": "SGLang 0", **report})
        return check.result, check.detail

    result, detail = verdict(decoded.ids, len(decoded.committed))
    assert result == "PASS", detail
    assert f"acceptance length {decoded.acceptance_length:.3f}" in detail
    altered = [*decoded.ids[:5], (decoded.ids[5] + 1) % 384, *decoded.ids[6:]]
    result, detail = verdict(altered, len(decoded.committed))
    assert result == "FAIL"
    assert "token 5 is not the target's" in detail
    # A server that never verified a guess, and one whose drafts were better than ours.
    for rounds in (0, len(decoded.committed) - 1):
        result, detail = verdict(decoded.ids, rounds)
        assert result == "FAIL"
        assert f"({rounds} rounds, expected {len(decoded.committed)}" in detail


@pytest.mark.parametrize(
    ("gap", "rounds", "result"), [(0.01, 100, "PASS"), (0.03, 100, "FAIL"), (0.0, 94, "FAIL"), (0.0, 96, "PASS")]
)
def test_rounding_is_not_a_defect(gap: float, rounds: int, result: str) -> None:
    row: dict[str, Any] = {
        "source": "s", "id": "r", "tokens": 201, "first_difference": 3, "differences": 1, "widest_gap": gap,
        "rounds": rounds, "reference_rounds": 100,
    }  # fmt: skip
    report = {
        "engine": "SGLang 0", "algorithm": "EAGLE3", "num_draft_tokens": 3, "dtype": "bfloat16", "rows": [row],
        "acceptance_length": 2.0, "reference_acceptance_length": 2.0,
        "tolerance": {"tie": TIE["bfloat16"], "rounds": ROUNDS["bfloat16"]},
    }  # fmt: skip
    assert check_served(report).result == result


def test_how_a_draft_is_served() -> None:
    assert serving_depth(tiny_dflash(), 2) == 4
    assert serving_dtype("bfloat16", "cpu") == "float32"
    assert serving_dtype("bfloat16", "cuda") == "bfloat16"


@pytest.fixture
def nominal_sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An interpreter whose SGLang is a name and a version."""
    metadata = tmp_path / "site" / "sglang-0.5.14.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.14\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    return sys.executable


def test_what_the_engine_does_not_serve_is_not_passed(case: GateCase, tmp_path: Path, nominal_sglang: str) -> None:
    request = StartGateRequest(
        export_dir=str(exported(case, tmp_path / "export", "vllm")), target=str(case.target), eval_set_uri=str(case.eval_set),
        num_draft_tokens=3, max_rows_per_source=1, dtype="float32", output_dir=str(tmp_path / "gate"), serve_engine="sglang",
    )  # fmt: skip
    report = evaluate(request, "cpu", lambda *progress: None, nominal_sglang)
    (served,) = [check for check in report["checks"] if check["name"] == "served"]
    assert served["result"] == "SKIP"
    assert "[SF-SGLANG-SERVE] SGLang does not serve an export for vllm" in served["detail"]
    assert report["served"] == {"not_served": served["detail"]}


def test_a_server_that_cannot_start_is_no_verdict(case: GateCase, tmp_path: Path, nominal_sglang: str) -> None:
    request = StartGateRequest(
        export_dir=str(exported(case, tmp_path / "export", "sglang")), target=str(case.target),
        eval_set_uri=str(case.eval_set), num_draft_tokens=3, max_rows_per_source=1, dtype="float32",
        output_dir=str(tmp_path / "gate"), serve_engine="sglang",
    )  # fmt: skip
    stages: list[str] = []
    for python, code in (
        ("/nowhere/python", "SF-SGLANG-PYTHON"),
        ("/bin/false", "SF-SGLANG-MISSING"),
        (nominal_sglang, "SF-SGLANG-START"),
    ):
        with pytest.raises(HostError) as error:
            evaluate(request, "cpu", lambda stage, *_: stages.append(stage), python)
        assert error.value.code == code
        if code != "SF-SGLANG-START":
            assert set(stages) == {"loading"}, "what is missing is told before the work"
    assert not (tmp_path / "gate" / "report.json").exists()
