"""The demo's verdict and report, rates from snapshots, folders the demo may replace, wire records as JSON."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from specfleet.contracts.errors import HostError
from specfleet.ctl.demo import MARKER, _claim_folder
from specfleet.ctl.demo_report import DemoFacts, build_report, problems_of, render_report, training_curve, write_report
from specfleet.ctl.output import human_bytes, to_dict
from specfleet.ctl.rates import RateMeter
from specfleet.ctl.state import StackLock
from specfleet.ctl.views import five_numbers
from specfleet.wire.gate_pb2 import GateStatus
from specfleet.wire.run_pb2 import Checkpoint, LedgerRow, RunSnapshot, VerifyLedgerResponse


def row(before: float | None, after: float | None) -> dict[str, Any]:
    return {
        "before": before, "before_stop_rows": before, "after": after, "after_stop_rows": after, "ngram": 1.7,
        "ngram_stop_rows": 1.5, "rows": 20, "stop_rows": 12, "looping_rows": 3, "tokens": 99, "per_position": [0.5],
    }  # fmt: skip


def facts(tmp_path: Path, *, verdict: str = "PASS", conserved: bool = True, after: float = 1.9) -> DemoFacts:
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": i, "loss": 10.0 - i, "acc_0": i / 10, "acc_1": i / 20}) + "\n" for i in range(1, 6))
    )
    ledger = VerifyLedgerResponse(run_id="demo", conserved=conserved)
    ledger.rows.append(LedgerRow(epoch=0, ingested=8, tasks={"SETTLED": 7, "DEAD": 1, "READY": 0}, conserved=conserved))
    gate = {"acceptance_length": {"gsm8k": row(1.0, after), "bfcl": row(1.0, 1.2)}, "checks": []}
    return DemoFacts(
        run=RunSnapshot(
            run_id="demo", trained_steps=5, captured_tokens=100, trained_tokens=90, output_dir=str(tmp_path)
        ),
        ledger=ledger,
        checkpoint=Checkpoint(uri="/runs/demo/checkpoints/step-00000005", step=5),
        gate=GateStatus(gate_id="g", state=verdict, message="why", report_json=json.dumps(gate)),
        wall_s=12.34,
        peak_rss_bytes=1 << 30,
    )


def test_a_report_has_what_the_issue_asks_for(tmp_path: Path) -> None:
    report = build_report(facts(tmp_path), quick=False)
    assert report["ok"]
    assert report["acceptance_length"]["gsm8k"].items() >= {
        "before": 1.0, "after": 1.9, "after_stop_rows": 1.9, "ngram": 1.7, "ngram_stop_rows": 1.5,
    }.items()  # fmt: skip
    assert report["tokens"] == {"captured": 100, "trained": 90}
    assert report["ledger"]["conserved"]
    assert report["ledger"]["counts"] == {"DEAD": 1, "SETTLED": 7}
    assert report["wall_s"] == 12.3
    assert report["peak_rss_bytes"] == 1 << 30
    assert report["versions"]["python"]
    assert json.loads(write_report(tmp_path, report).read_text()) == report


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"after": 1.0}, "acceptance length on gsm8k did not rise: 1.0 before, 1.0 after"),
        ({"conserved": False}, "the ledger is not sound"),
        ({"verdict": "FAIL"}, "the gate's verdict is FAIL: why"),
    ],
)
def test_a_demo_that_proved_nothing_fails_loudly(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    report = build_report(facts(tmp_path, **change), quick=False)
    assert not report["ok"]
    assert words in "; ".join(problems_of(report))


def test_quick_mode_forgives_a_bad_draft_but_no_lost_sample(tmp_path: Path) -> None:
    assert build_report(facts(tmp_path, after=1.0, verdict="FAIL"), quick=True)["ok"]
    assert not build_report(facts(tmp_path, conserved=False), quick=True)["ok"]


def test_the_tables_show_the_numbers_and_where_the_files_are(tmp_path: Path) -> None:
    out = io.StringIO()
    report = build_report(facts(tmp_path), quick=True)
    render_report(Console(file=out, width=200), report, tmp_path / "report.json")
    text = out.getvalue()
    for shown in ("100 captured", "90 trained", "1.90", "1.70", "conserved", "quick mode", "data.train='[my.jsonl]'"):
        assert shown in text
    assert str(tmp_path / "report.json") in text


def test_the_training_curve_is_read_from_the_metrics_file(tmp_path: Path) -> None:
    facts(tmp_path)
    curve = training_curve(tmp_path / "metrics.jsonl")
    assert curve["loss_first"] == 9.0
    assert curve["loss_last"] == 5.0
    assert curve["accuracy_per_step"] == [0.5, 0.25]
    assert training_curve(tmp_path / "absent.jsonl") == {}


def test_only_a_folder_the_demo_made_is_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    _claim_folder(folder)
    (folder / "old").write_text("from the last demo")
    _claim_folder(folder)
    assert [path.name for path in folder.iterdir()] == [MARKER]
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("precious")
    with pytest.raises(HostError, match="left alone") as caught:
        _claim_folder(foreign)
    assert caught.value.code == "SF-DEMO-FOLDER"
    assert (foreign / "thesis.tex").exists()
    (folder / "stack").mkdir()
    lock = StackLock(folder / "stack")
    assert lock.acquire()
    with pytest.raises(HostError, match="already runs"):
        _claim_folder(folder)
    lock.release()


def test_rates_count_only_the_time_in_which_something_moved() -> None:
    meter = RateMeter()
    for now, captured, trained in ((0, 0, 0), (10, 0, 0), (11, 100, 0), (12, 200, 50), (13, 200, 100), (60, 200, 100)):
        meter.add(now, RunSnapshot(captured_tokens=captured, trained_tokens=trained, in_flight_bytes=captured))
    assert meter.peak_in_flight_bytes == 200
    # From the last snapshot before the counter moved to the one that saw its last change.
    assert meter.captured.per_s == pytest.approx(200 / 2)
    assert meter.trained.per_s == pytest.approx(100 / 2)
    assert RateMeter().captured.per_s == 0.0


def test_five_numbers_tell_the_trainers_own_speed_from_the_actual_one() -> None:
    numbers = five_numbers(RunSnapshot(capture_rate=100, train_rate=100, wait_share=0.75, in_flight_bytes=7))
    assert numbers == {
        "capture_rate": 100, "training_rate": 400, "actual_rate": 100, "wait_share": 0.75, "in_flight_bytes": 7,
    }  # fmt: skip
    assert five_numbers(RunSnapshot(train_rate=1, wait_share=1.0))["training_rate"] == pytest.approx(100)


def test_wire_records_become_plain_json() -> None:
    run = RunSnapshot(run_id="r", tasks={"READY": 2}, trained_steps=3)
    document = to_dict(run)
    assert document["tasks"] == {"READY": 2}
    assert document["trained_steps"] == 3
    assert document["wait_share"] == 0.0
    nested = to_dict(VerifyLedgerResponse(rows=[LedgerRow(epoch=1)], violations=["x"]))
    assert nested["rows"][0]["epoch"] == 1
    assert nested["violations"] == ["x"]
    json.dumps([document, nested])


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB"), (5 << 40, "5120.0 GiB")]
)
def test_sizes_for_people(count: int, text: str) -> None:
    assert human_bytes(count) == text
