"""Starting from an exported draft: every layout the field writes, and every way it may not fit."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.eagle3 import tiny_draft
from fixtures.peagle import MASK_ID, tiny_peagle
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from specfleet.contracts.errors import ContractError, DataError, SpecfleetError
from specfleet.drafts.base import Draft
from specfleet.drafts.export import export_draft
from specfleet.drafts.warm_start import stated_mask_token, warm_start

Tensors = dict[str, torch.Tensor]


def _export(draft: Draft, layout: str, folder: Path) -> Path:
    export_draft(draft, layout, folder, dtype=torch.float32)
    return folder


def _edit(folder: Path, tensors: Callable[[Tensors], Tensors] | None = None, **config: Any) -> Path:
    """Rewrites an export. A value of None removes a key."""
    if tensors is not None:
        changed = tensors(load_file(folder / "model.safetensors"))
        save_file({name: tensor.contiguous() for name, tensor in changed.items()}, folder / "model.safetensors")
    file = folder / "config.json"
    document = {**json.loads(file.read_text()), **config}
    file.write_text(json.dumps({name: value for name, value in document.items() if value is not None}))
    return folder


def _equal(a: Draft, b: Draft) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def _fails(draft: Draft, folder: Path, error: type[SpecfleetError], code: str) -> str:
    before = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    with pytest.raises(error) as caught:
        warm_start(draft, folder)
    assert caught.value.code == code
    assert all(torch.equal(before[name], tensor) for name, tensor in draft.state_dict().items())
    return caught.value.message


@pytest.mark.parametrize("layout", ["sglang", "vllm"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"fc_norm": True}, {"own_head": False, "draft_vocab_size": 384}, {"draft_vocab_size": 384}],
    ids=["eagle3", "fc-norm", "target-head", "full-vocabulary"],
)
def test_own_exports(tmp_path: Path, layout: str, changes: dict[str, Any]) -> None:
    trained, fresh = tiny_draft(seed=1, **changes), tiny_draft(seed=2, **changes)
    with capture_logs() as logs:
        warm_start(fresh, _export(trained, layout, tmp_path / "out"))
    assert _equal(fresh, trained)
    assert not [line for line in logs if line["log_level"] == "warning"]


@pytest.mark.parametrize("prefix", ["draft_model.", "model.", "draft_model.model.", "module.draft_model."])
@pytest.mark.parametrize("layer", ["midlayer.", "layers.0."])
def test_specforge_layouts(tmp_path: Path, prefix: str, layer: str) -> None:
    """Wrapped names, a repeated embedding, a sparse config without layer ids, d2t in another integer type and no t2d."""
    trained, fresh = tiny_draft(seed=1), tiny_draft(seed=2)

    def wrap(tensors: Tensors) -> Tensors:
        tensors = {name.replace("midlayer.", layer): tensor for name, tensor in tensors.items() if name != "t2d"}
        tensors["d2t"] = tensors["d2t"].int()
        tensors["embed_tokens.weight"] = torch.zeros(384, 32)
        return {prefix + name: tensor for name, tensor in tensors.items()}

    _edit(
        _export(trained, "sglang", tmp_path / "out"), wrap,
        eagle_config=None, target_hidden_size=None, num_aux_hidden_states=None, rope_parameters=None, producer=None,
        fc_norm=None, norm_output=None,
    )  # fmt: skip
    warm_start(fresh, tmp_path / "out")
    assert _equal(fresh, trained)


def test_the_vocabulary_comes_along(tmp_path: Path) -> None:
    trained, fresh = tiny_draft(seed=1), tiny_draft(seed=2)
    chosen = torch.arange(128) + 7
    t2d = torch.zeros(384, dtype=torch.bool)
    t2d[chosen] = True
    trained.set_vocabulary(chosen - torch.arange(128), t2d)
    warm_start(fresh, _export(trained, "sglang", tmp_path / "out"))
    assert torch.equal(fresh.d2t, trained.d2t)
    assert torch.equal(fresh.t2d, t2d)


def test_sharded_and_pytorch_files(tmp_path: Path) -> None:
    trained = tiny_draft(seed=1)
    folder = _export(trained, "sglang", tmp_path / "out")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[:7], "b.safetensors": names[7:]}
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    index = {"weight_map": {name: file for file, held in parts.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    sharded = tiny_draft(seed=2)
    warm_start(sharded, folder)
    assert _equal(sharded, trained)
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    shutil.copy(folder / "config.json", bin_folder)
    torch.save(tensors, bin_folder / "pytorch_model.bin")
    pickled = tiny_draft(seed=3)
    warm_start(pickled, bin_folder)
    assert _equal(pickled, trained)


def test_peagle(tmp_path: Path) -> None:
    trained, fresh = tiny_peagle(seed=1), tiny_peagle(seed=2)
    folder = _export(trained, "vllm", tmp_path / "out")
    assert stated_mask_token(str(folder)) == MASK_ID
    assert stated_mask_token("") is None
    warm_start(fresh, folder)
    assert _equal(fresh, trained)
    message = _fails(tiny_peagle(mask_token_id=5), folder, ContractError, "SF-INIT-CONFIG")
    assert f"mask token {MASK_ID}, this run's draft has 5" in message
    assert "num_hidden_layers 2" in _fails(tiny_peagle(num_layers=3), folder, ContractError, "SF-INIT-CONFIG")


def test_every_difference_of_the_config_is_listed(tmp_path: Path) -> None:
    folder = _export(tiny_draft(), "vllm", tmp_path / "out")
    other = tiny_draft(intermediate_size=64, layer_ids=[0, 2, 4], draft_vocab_size=96)
    message = _fails(other, folder, ContractError, "SF-INIT-CONFIG")
    for part in ("intermediate_size 48, this run's draft has 64", "draft_vocab_size 128, this run's draft has 96",
                 "captured layers [1, 2, 4] (outputs), this run captures [0, 2, 4]"):  # fmt: skip
        assert part in message
    assert "norm_output False" in _fails(tiny_draft(norm_output=True), folder, ContractError, "SF-INIT-CONFIG")


def test_every_difference_of_the_tensors_is_listed(tmp_path: Path) -> None:
    def spoil(tensors: Tensors) -> Tensors:
        del tensors["norm.weight"]
        tensors["fc.weight"] = tensors["fc.weight"][:, :64]
        tensors["q_norm.weight"] = torch.zeros(2)
        return tensors

    folder = _edit(_export(tiny_draft(), "sglang", tmp_path / "out"), spoil)
    message = _fails(tiny_draft(), folder, ContractError, "SF-INIT-TENSORS")
    for part in ("3 differences", "missing: norm.weight [32]", "fc.weight: [32, 64], this run's draft has [32, 96]",
                 "not wanted: q_norm.weight [2]"):  # fmt: skip
        assert part in message


def test_unreadable_directories(tmp_path: Path) -> None:
    assert "config.json" in _fails(tiny_draft(), tmp_path / "nowhere", DataError, "SF-INIT-MISSING")
    folder = _export(tiny_draft(), "sglang", tmp_path / "out")
    (folder / "model.safetensors").write_bytes(b"not tensors")
    _fails(tiny_draft(), folder, DataError, "SF-INIT-MISSING")


@pytest.mark.parametrize("norm_output", [True, False])
def test_v030_checkpoints_are_warned_about(tmp_path: Path, norm_output: bool) -> None:
    """Their config says norm_output true; what was trained is false, so either may be asked for."""
    trained = tiny_draft(seed=1, fc_norm=True, norm_output=True)
    folder = _edit(_export(trained, "sglang", tmp_path / "out"), producer=None)
    fresh = tiny_draft(seed=2, fc_norm=True, norm_output=norm_output)
    with capture_logs() as logs:
        warm_start(fresh, folder)
    assert _equal(fresh, trained)
    assert [line["event"] for line in logs if line["log_level"] == "warning" and "v0.3.0" in line["event"]]


def test_another_rotary_base_is_warned_about(tmp_path: Path) -> None:
    folder = _export(tiny_draft(rope_theta=5e5), "sglang", tmp_path / "out")
    with capture_logs() as logs:
        warm_start(tiny_draft(), folder)
    assert [line["stated"] for line in logs if line["log_level"] == "warning"] == [5e5]
