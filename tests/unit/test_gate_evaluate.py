"""A whole gate job in this process: what must pass passes, and every negative control fails by name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.gate_case import GateCase, make_gate_case
from fixtures.tiny import make_tiny_target
from safetensors.torch import load_file, save_file

from specfleet.contracts.errors import DataError
from specfleet.drafts.decode import decode_greedy as real_decode_greedy
from specfleet.gate import lossless
from specfleet.gate.evaluate import evaluate
from specfleet.gate.exporting import PROVENANCE, export_checkpoint
from specfleet.wire.gate_pb2 import ExportDraftRequest, StartGateRequest

Change = Callable[[dict[str, torch.Tensor]], None]


@pytest.fixture(scope="module")
def case(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> GateCase:
    return make_gate_case(tiny_target, tmp_path_factory.mktemp("gate-case"))


@pytest.fixture(scope="module")
def exports(case: GateCase, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Trained and untrained."""
    root = tmp_path_factory.mktemp("exports")
    for untrained in (False, True):
        export_checkpoint(
            ExportDraftRequest(
                checkpoint_uri=str(case.checkpoint), layout="sglang", output_dir=str(root / str(untrained)),
                untrained=untrained, run_id="gate-test",
            )
        )  # fmt: skip
    return root / "False", root / "True"


def run(case: GateCase, export: Path, out: Path, baseline: Path | None = None, **fields: Any) -> dict[str, Any]:
    request = StartGateRequest(
        run_id="gate-test", export_dir=str(export), target=str(case.target), eval_set_uri=str(case.eval_set),
        num_draft_tokens=4, lossless_rows=1, lossless_new_tokens=12, output_dir=str(out), dtype="float32",
        baseline_export_dir=str(baseline or ""), require_improvement=baseline is not None,
    )  # fmt: skip
    for name, value in fields.items():
        setattr(request, name, value)
    return evaluate(request, "cpu", lambda stage, done, total: None)


def results(report: dict[str, Any]) -> dict[str, str]:
    return {check["name"]: check["result"] for check in report["checks"]}


def detail(report: dict[str, Any], name: str) -> str:
    return next(check["detail"] for check in report["checks"] if check["name"] == name)


def tampered(exports: tuple[Path, Path], out: Path, change: Change) -> Path:
    """A copy of the trained export with other tensors in it."""
    shutil.copytree(exports[0], out)
    tensors = load_file(out / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out / "model.safetensors")
    return out


def test_a_trained_draft_passes(case: GateCase, exports: tuple[Path, Path], tmp_path: Path) -> None:
    stages: list[tuple[str, int, int]] = []
    request = StartGateRequest(
        run_id="gate-test", export_dir=str(exports[0]), target=str(case.target), eval_set_uri=str(case.eval_set),
        num_draft_tokens=4, lossless_rows=1, output_dir=str(tmp_path), baseline_export_dir=str(exports[1]),
        require_improvement=True,
    )  # fmt: skip
    report = evaluate(request, "cpu", lambda *progress: stages.append(progress))
    assert report["verdict"] == "PASS", report["checks"]
    assert results(report) == dict.fromkeys(
        ("tokenizer", "loader_table", "weights", "config", "target", "improvement", "lossless"), "PASS"
    )
    assert sorted(report["acceptance_length"]) == ["alpha", "beta"]
    for row in report["acceptance_length"].values():
        assert row["after"] > 1.5 > row["before"] >= 1.0
        assert (row["rows"], row["stop_rows"], len(row["per_position"])) == (8, 4, 4)
        assert row["after_stop_rows"] >= 1.0
        assert row["ngram"] >= 1.0
        assert row["ngram_stop_rows"] >= 1.0
    assert report["dtype"] == "bfloat16"
    assert {row["source"] for row in report["lossless"]["rows"]} == {"alpha", "beta"}
    # A draft trained on these answers must really speed decoding up, not only the offline count.
    assert max(row["acceptance_length"] for row in report["lossless"]["rows"]) > 1.2
    assert stages[0][0] == "loading"
    assert ("acceptance", 16, 16) in stages
    assert json.loads((tmp_path / "report.json").read_text()) == report
    assert "# Gate: PASS" in (tmp_path / "report.md").read_text()
    assert "| alpha |" in (exports[0] / "README.md").read_text()


def test_untrained_exports_are_the_same_every_time(case: GateCase, exports: tuple[Path, Path], tmp_path: Path) -> None:
    again = export_checkpoint(
        ExportDraftRequest(checkpoint_uri=str(case.checkpoint), output_dir=str(tmp_path / "u"), untrained=True)
    )
    assert again["weights_hash"] == json.loads((exports[1] / PROVENANCE).read_text())["weights_hash"]
    trained, untrained = (load_file(export / "model.safetensors") for export in exports)
    assert torch.equal(trained["t2d"], untrained["t2d"])
    assert not torch.equal(trained["fc.weight"], untrained["fc.weight"])


def test_no_improvement_fails_only_when_required(case: GateCase, exports: tuple[Path, Path], tmp_path: Path) -> None:
    report = run(case, exports[1], tmp_path, baseline=exports[1])
    assert report["verdict"] == "FAIL"
    assert results(report)["improvement"] == "FAIL"
    assert "alpha: " in detail(report, "improvement")
    relaxed = run(case, exports[1], tmp_path, baseline=exports[1], require_improvement=False)
    assert relaxed["verdict"] == "PASS"


@pytest.mark.parametrize(
    ("change", "check", "says"),
    [
        (lambda t: t.update({"fc.weight": t["fc.weight"].roll(32, dims=1)}), "weights", "changed since"),
        (lambda t: t.update({"norm.weight": torch.ones_like(t["norm.weight"])}), "weights", "changed since"),
        (lambda t: t.update({"fc.weight": t["fc.weight"][:, :-1]}), "loader_table", "fc.weight"),
        (lambda t: t.pop("midlayer.hidden_norm.weight"), "loader_table", "midlayer.hidden_norm.weight"),
        (lambda t: t.update({"extra.weight": t["norm.weight"].clone()}), "loader_table", "extra.weight"),
    ],
    ids=["permuted", "dropped-norm", "wrong-shape", "missing", "leftover"],
)
def test_tampered_weights_fail(
    case: GateCase, exports: tuple[Path, Path], tmp_path: Path, change: Change, check: str, says: str
) -> None:
    report = run(case, tampered(exports, tmp_path / "export", change), tmp_path / "gate")
    assert report["verdict"] == "FAIL"
    assert results(report)[check] == "FAIL"
    assert says in detail(report, check)


def test_weights_swapped_together_with_their_hash_fail(
    case: GateCase, exports: tuple[Path, Path], tmp_path: Path
) -> None:
    # As if another checkpoint had been exported under this one's name.
    shutil.copytree(exports[1], tmp_path / "export")
    provenance = json.loads((tmp_path / "export" / PROVENANCE).read_text()) | {"untrained": False}
    (tmp_path / "export" / PROVENANCE).write_text(json.dumps(provenance))
    report = run(case, tmp_path / "export", tmp_path / "gate")
    assert results(report)["weights"] == "FAIL"
    assert "fc.weight" in detail(report, "weights")


def test_wrong_layers_in_the_config_fail(case: GateCase, exports: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(exports[0], tmp_path / "export")
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [0, 1, 3]
    (tmp_path / "export" / "config.json").write_text(json.dumps(config))
    report = run(case, tmp_path / "export", tmp_path / "gate")
    assert results(report)["config"] == "FAIL"
    assert "layer_ids: trained [1, 2, 4], exported [0, 1, 3]" in detail(report, "config")
    good = run(case, exports[0], tmp_path / "good")
    for source, row in good["acceptance_length"].items():
        assert report["acceptance_length"][source]["after"] < row["after"]


def test_another_target_fails(case: GateCase, exports: tuple[Path, Path], tmp_path: Path) -> None:
    other = make_tiny_target(tmp_path / "other", seed=5)
    report = run(case, exports[0], tmp_path / "gate", target=str(other))
    assert results(report)["target"] == "FAIL"
    assert report["verdict"] == "FAIL"


def test_an_export_of_a_run_must_be_provable(case: GateCase, exports: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(exports[0], tmp_path / "export")
    (tmp_path / "export" / PROVENANCE).unlink()
    assert results(run(case, tmp_path / "export", tmp_path / "gate"))["weights"] == "FAIL"
    foreign = run(case, tmp_path / "export", tmp_path / "gate", run_id="")
    assert results(foreign)["weights"] == "SKIP"
    assert foreign["verdict"] == "PASS"


@pytest.mark.parametrize("rule", ["rejection", "target_only"])
def test_sampled_decoding_is_reported_with_its_rule(
    case: GateCase, exports: tuple[Path, Path], tmp_path: Path, rule: str
) -> None:
    report = run(case, exports[0], tmp_path / "gate", temperature=0.7, top_k=1, acceptance_rule=rule)
    assert report["sampling"] == {"rule": rule, "temperature": 0.7, "top_k": 1, "top_p": 1.0}
    for row in report["lossless"]["rows"]:
        assert row["identical"]
        # Of one token there is nothing to choose: sampling is greedy decoding then.
        assert row["sampled_acceptance_length"] == row["acceptance_length"]
    assert f"{rule} at temperature 0.7, top-k 1" in (tmp_path / "gate" / "report.md").read_text()
    # Seeded: the same request gives the same numbers.
    sampled = [
        run(case, exports[0], tmp_path / name, temperature=0.7, top_p=0.9, acceptance_rule=rule) for name in ("a", "b")
    ]
    assert sampled[0]["lossless"] == sampled[1]["lossless"] != report["lossless"]
    assert sampled[0]["sampling"] == {"rule": rule, "temperature": 0.7, "top_k": 0, "top_p": 0.9}
    assert all(1.0 <= row["sampled_acceptance_length"] <= 5.0 for row in sampled[0]["lossless"]["rows"])


def test_without_a_temperature_nothing_is_sampled(case: GateCase, exports: tuple[Path, Path], tmp_path: Path) -> None:
    report = run(case, exports[0], tmp_path)
    assert report["sampling"] is None
    assert {row["sampled_acceptance_length"] for row in report["lossless"]["rows"]} == {None}


def test_a_decoder_that_changes_the_text_fails(
    case: GateCase, exports: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def careless(target: Any, drafter: Any, *args: Any) -> Any:
        decoded = real_decode_greedy(target, drafter, *args)
        if drafter is not None:
            decoded.ids[5] ^= 1
        return decoded

    monkeypatch.setattr(lossless, "decode_greedy", careless)
    report = run(case, exports[0], tmp_path)
    assert report["verdict"] == "FAIL"
    assert "first difference at new token 5" in detail(report, "lossless")
    assert report["lossless"]["rows"][0]["logit_gap"] > 0
    assert "NO, from token 5" in (tmp_path / "report.md").read_text()


def test_a_missing_evaluation_set_is_an_error_and_no_verdict(
    case: GateCase, exports: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(DataError):
        run(case, exports[0], tmp_path, eval_set_uri=str(tmp_path / "nothing"))
