"""The serving benchmark's own arithmetic: rates, judged texts, what --resume keeps, and the table."""

from pathlib import Path
from typing import Any

import pytest
from fixtures.gate_case import make_gate_case

from benchmarks.serving.__main__ import begin_anew
from benchmarks.serving.measure import total, with_rates
from benchmarks.serving.product import Job, run_id
from benchmarks.serving.reference import judge, serving_of
from benchmarks.serving.results import Results
from benchmarks.serving.table import render
from specfleet.drafts.acceptance import TextRow
from specfleet.drafts.decode import decode_greedy
from specfleet.drafts.export import load_export
from specfleet.gate.exporting import export_checkpoint
from specfleet.gate.rows import EvalRow
from specfleet.target.hf import HFTarget
from specfleet.wire.gate_pb2 import ExportDraftRequest


def test_the_first_token_of_an_answer_is_not_guessed() -> None:
    one = with_rates({"requests": 2, "tokens": 22, "rounds": 10, "seconds": 2.0})
    assert (one["tokens_per_s"], one["acceptance_length"]) == (11.0, 2.0)
    other = with_rates({"requests": 1, "tokens": 8, "rounds": 0, "seconds": 1.0})
    assert "acceptance_length" not in other
    assert total({"a": one, "b": one}) == with_rates({"requests": 4, "tokens": 44, "rounds": 20, "seconds": 4.0})


def test_one_recording_serves_every_case(tiny_target: Path) -> None:
    job = Job(tiny_target, "rows.jsonl", "cpu", ["eagle3", "dflash:strategy.num_layers=2"], 0, 0, 1, 4)
    [layers] = [item for item in job.recording() if item.startswith("strategy.layers=")]
    single = [set(job.layers(name)) for name in job.names]
    assert layers == f"strategy.layers={sorted(set.union(*single))}"
    assert "capture.extras=['teacher_argmax', 'teacher_lse']" in job.recording()
    assert job.config("eagle3").trainer.epochs == 1
    assert run_id("eagle3.1:trainer.lr=1e-3") == "eagle3-1"


def test_served_text_is_judged_by_source(tiny_target: Path, tmp_path: Path) -> None:
    case = make_gate_case(tiny_target, tmp_path / "case", steps=5)
    export = tmp_path / "export"
    export_checkpoint(ExportDraftRequest(checkpoint_uri=str(case.checkpoint), layout="sglang", output_dir=str(export)))
    draft = load_export(export)
    target = HFTarget.load(case.target, draft.config.layer_ids, "float32")
    prompt = list(range(20, 32))
    decoded = decode_greedy(target, draft.drafter(target.embedding_VH, target.head_VH), prompt, 12, 3, [2])
    # Rows are given in any order; answers come source by source.
    rows = [EvalRow(name, name, "length", TextRow([*prompt, 1, 1], len(prompt)), loops=False) for name in ("b", "a")]
    right: dict[str, Any] = {"ids": decoded.ids, "finish": "length", "rounds": len(decoded.committed), "histogram": []}
    other = {**right, "ids": [*decoded.ids[:-1], (decoded.ids[-1] + 1) % 384]}
    told = judge(
        rows, [right, other], [right, right], serving_of(case.target, export, "cpu", "float32", 3, 12), "SGLang 0"
    )
    assert [told["sources"][name]["equal_to_plain"] for name in ("a", "b")] == [1, 0]
    assert (told["sources"]["a"]["differences"], told["sources"]["b"]["differences"]) == (0, 1)
    assert told["sources"]["a"]["acceptance_length"] == round(decoded.acceptance_length, 4)
    assert told["check"]["result"] == "FAIL"
    assert "b row b: token 11 is not the target's" in told["check"]["detail"]


def test_resume_keeps_each_half_under_its_own_settings(tmp_path: Path) -> None:
    def results(lr: int, rows: int) -> Results:
        return Results(tmp_path, tmp_path / "out.json", {}, {"training": [lr], "serving": [lr, rows]})

    first = results(1, 1)
    with first.phase("training"):
        first["training"] = {"eagle3": {"steps": 3}}
    first["serving"] = {"plain": {"1": {}}}
    first.save()
    again = results(1, 1)
    assert (again["training"], again["serving"]) == (first["training"], first["serving"])
    assert "training" in again["seconds"]
    again = results(1, 2)
    assert (again["training"], again["serving"]) == (first["training"], {})
    with pytest.raises(SystemExit, match="other settings"):
        results(2, 1)


def test_only_its_own_folders_are_begun_anew(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with pytest.raises(SystemExit, match="left alone"):
        begin_anew(tmp_path)
    (tmp_path / "result.json").touch()
    begin_anew(tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_table_shows_what_there_is() -> None:
    row = with_rates({"requests": 1, "tokens": 101, "rounds": 0, "seconds": 1.0})
    drafted = with_rates({"requests": 1, "tokens": 101, "rounds": 40, "seconds": 0.5})
    result: dict[str, Any] = {"serving": {}, "reference": {}, "offline": {}}
    assert render(result) == ""
    result["serving"] = {"plain": {"1": {"gsm8k": row}, "8": {"gsm8k": row}}, "eagle3": {"1": {"gsm8k": drafted}}}
    result["offline"] = {"eagle3": {"gsm8k": {"after": 2.25, "ngram": None}}}
    text = render(result)
    assert "eagle3, 1 at a time  202 (2.00x)  202 (2.00x)" in text
    assert "plain, 8 at a time   101          101" in text
    lines = [line.split() for line in text.splitlines()]
    assert ["eagle3:", "SGLang,", "1", "at", "a", "time", "2.50"] in lines
    assert ["eagle3:", "held-out", "answers", "2.25"] in lines
