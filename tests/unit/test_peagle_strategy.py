"""The P-EAGLE objective as a whole, and its export."""

import json
from pathlib import Path

import pytest
import torch
from fixtures.checkpoints import write_checkpoint
from fixtures.eagle3 import LAYERS, random_samples
from fixtures.objective import Samples, assert_exact, assert_same, assert_zero_but_touched, gradient
from fixtures.peagle import MASK_ID, tiny_peagle, tiny_peagle_strategy
from safetensors.torch import load_file

from specfleet.contracts.errors import ConfigError, ExportError
from specfleet.drafts.export import export_draft, load_export
from specfleet.drafts.peagle import PEagleDraft
from specfleet.gate.exporting import PROVENANCE, export_checkpoint
from specfleet.trainer.strategies.peagle import PEagleStrategy
from specfleet.wire.gate_pb2 import ExportDraftRequest

F64 = torch.float64


def _head(seed: int = 11) -> torch.Tensor:
    return torch.randn(384, 32, generator=torch.Generator().manual_seed(seed), dtype=F64)


def _strategy(dtype: torch.dtype = F64, draft: PEagleDraft | None = None, **section: object) -> PEagleStrategy:
    draft = draft or tiny_peagle(dtype=dtype)
    return tiny_peagle_strategy(draft, _head(), **section)


def _samples(lengths: list[int], dtype: torch.dtype = F64, seed: int = 0) -> Samples:
    samples = random_samples(lengths, seed=seed, dtype=dtype)
    for index, sample in enumerate(samples):
        sample["visit"] = torch.tensor([0, index])
    return samples


@pytest.mark.parametrize("align", ["strict", "input", "compat"])
def test_splitting_a_batch_does_not_change_the_gradient(align: str) -> None:
    """The sampled chains too: they belong to the sample's visit."""
    strategy = _strategy(mask_align=align, keep_ratio=0.7, keep_ratio_min=0.3)
    samples = _samples([21, 13, 9, 17])
    whole = gradient(strategy, [samples])
    assert_same(gradient(strategy, [samples[:1], samples[1:]]), whole)
    assert_same(gradient(strategy, [[sample] for sample in samples]), whole)
    assert all(grad.abs().sum() > 0 for grad in whole[1].values())


def test_padding_does_not_change_the_gradient() -> None:
    strategy = _strategy()
    short, unsupervised = _samples([12], seed=1), _samples([40], seed=2)
    unsupervised[0]["loss_mask"].zero_()
    assert_same(gradient(strategy, [short + unsupervised]), gradient(strategy, [short]))
    assert_same(gradient(strategy, [unsupervised + short]), gradient(strategy, [short]))


@pytest.mark.parametrize("chunk_rows", [1, 5, 64])
def test_chunk_size_does_not_change_the_gradient(chunk_rows: int) -> None:
    strategy = _strategy()
    samples = _samples([21, 13])
    whole = gradient(strategy, [samples])
    strategy.chunk_rows = chunk_rows
    assert_same(gradient(strategy, [samples]), whole)


def test_captured_argmax_replaces_the_full_head() -> None:
    samples = _samples([19, 11])
    expected = gradient(_strategy(), [samples])
    for sample in samples:
        sample["teacher_argmax"] = (sample["final_state"] @ _head().T).argmax(-1).int()
    assert_same(gradient(_strategy(full=False), [samples]), expected)


def test_gradient_of_the_whole_objective_is_exact() -> None:
    assert_exact(_strategy(draft=tiny_peagle(dtype=F64, norm_before_residual=True)), _samples([11, 8]))


@pytest.mark.parametrize("how", ["masked", "too short"])
def test_a_batch_without_rows_touches_every_parameter_with_zero(how: str) -> None:
    samples = _samples([9, 6] if how == "masked" else [2, 1], torch.float32)
    for sample in samples:
        sample["loss_mask"].zero_()
    assert_zero_but_touched(_strategy(torch.float32), samples)


def test_shallow_chains_touch_every_parameter_too() -> None:
    """One supervised pair: depth 0 has a row, no depth has a placeholder."""
    samples = _samples([6], torch.float32)
    samples[0]["loss_mask"] = torch.tensor([0, 0, 0, 0, 1, 1], dtype=torch.uint8)
    strategy = _strategy(torch.float32, draft_vocab_size=0, draft=tiny_peagle(draft_vocab_size=384))
    _, found = gradient(strategy, [samples])
    assert found.keys() == dict(strategy.draft.named_parameters()).keys()
    assert not found["mask_hidden"].any()
    assert found["fc.weight"].any()


def test_mean_over_elements_without_weights_per_depth() -> None:
    strategy = _strategy(keep_ratio=1.0, keep_ratio_min=1.0)
    prepared = strategy.prepare(strategy.collate(_samples([20])))
    objective = strategy.objective(prepared)
    per_depth = [objective.metrics[f"loss_{depth}"] for depth in range(4)]
    total, count = (float(sum(pair[part] for pair in per_depth)) for part in (0, 1))
    assert float(objective.numerators["elements"].detach()) == pytest.approx(total)
    assert float(prepared.denominators["elements"]) == count
    assert strategy.term_weights == {"elements": 1.0}
    # 20 tokens, the first 3 a prompt: anchors 2 … 17 at depth 0, one fewer per depth.
    assert [float(objective.metrics[f"acc_{depth}"][1]) for depth in range(4)] == [16.0, 15.0, 14.0, 13.0]
    assert float(objective.metrics["tau_greedy"][1]) == 13.0
    assert 1.0 <= float(objective.metrics["tau_prob"][0]) / 13.0 <= 5.0


def test_a_chain_is_worth_its_leading_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that always says 3, and a target that does too but for teacher row 10."""
    strategy = _strategy(torch.float32, keep_ratio=1.0, keep_ratio_min=1.0)
    samples = _samples([30], torch.float32)
    samples[0]["teacher_argmax"] = torch.full((30,), 3, dtype=torch.int32)  # 3 = draft id 1
    samples[0]["teacher_argmax"][10] = 4  # not in the draft vocabulary
    with torch.no_grad():
        strategy.draft.lm_head.weight.zero_()
        strategy.draft.lm_head.weight[1] = 1.0
    monkeypatch.setattr(strategy.draft, "elements", lambda ids, aux, chains: [torch.ones(len(c), 32) for c in chains])
    metrics = strategy.objective(strategy.prepare(strategy.collate(samples))).metrics
    # Anchors 2 … 24 reach depth 3, judged by rows a + 1 … a + 4; those of 6, 7, 8, 9 are right up to row 10.
    assert [float(x) for x in metrics["tau_greedy"]] == [23.0 + 19 * 4 + 3 + 2 + 1 + 0, 23.0]
    assert [float(x) for x in metrics["acc_0"]] == [25.0, 26.0]


def test_runs_in_bf16_close_to_fp32() -> None:
    # The whole vocabulary: rounding may move a teacher's choice in or out of a reduced one.
    drafts = [tiny_peagle(draft_vocab_size=384, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    samples = _samples([24, 15], torch.float32)
    (exact, _), (low, found) = (gradient(_strategy(draft=draft), [samples]) for draft in drafts)
    assert low == pytest.approx(exact, rel=3e-2)
    assert all(grad.isfinite().all() for grad in found.values())


def test_identity_names_what_a_resumed_run_must_share() -> None:
    base = _strategy(torch.float32).identity()
    assert (base["strategy"], base["mask_token_id"], base["num_depths"]) == ("peagle", str(MASK_ID), "4")
    assert _strategy(torch.float32, keep_ratio=0.5).identity() != base
    assert _strategy(torch.float32, draft=tiny_peagle(norm_before_residual=True)).identity() != base


def test_vllm_layout(tmp_path: Path) -> None:
    draft = tiny_peagle()
    # The embedding is trained, so the target's must not take its place.
    exported = export_draft(draft, "vllm", tmp_path / "out", dtype=torch.float32, embedding_VH=torch.zeros(384, 32))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["parallel_drafting"] is True
    assert config["pard_token"] == config["ptd_token_id"] == MASK_ID
    assert (config["num_depths"], config["num_hidden_layers"], config["draft_vocab_size"]) == (4, 2, 128)
    assert config["eagle_aux_hidden_state_layer_ids"] == [layer + 1 for layer in LAYERS]
    assert "eagle_config" not in config
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors["mask_hidden"].shape == (1, 1, 96)
    assert torch.equal(tensors["embed_tokens.weight"], draft.embed_tokens.weight)
    assert "layers.0.hidden_norm.weight" in tensors
    assert "layers.1.hidden_norm.weight" not in tensors
    assert tensors["layers.1.self_attn.q_proj.weight"].shape == (32, 32)
    loaded = load_export(tmp_path / "out")
    assert isinstance(loaded, PEagleDraft)
    assert loaded.config == draft.config
    assert export_draft(loaded, "vllm", tmp_path / "again", dtype=torch.float32).weights_hash == exported.weights_hash


def test_layouts_nobody_serves_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"SGLang does not serve P-EAGLE; layouts of peagle: vllm"):
        export_draft(tiny_peagle(), "sglang", tmp_path / "out")
    with pytest.raises(ExportError, match="three captured layers"):
        export_draft(tiny_peagle(layer_ids=[0, 1, 2, 4]), "vllm", tmp_path / "out")


def test_a_checkpoint_is_exported_for_the_engine_that_serves_it(tmp_path: Path) -> None:
    """Nobody needs to know that this is not SGLang."""
    draft = tiny_peagle()
    checkpoint = write_checkpoint(tmp_path / "checkpoint", draft)
    request = ExportDraftRequest(checkpoint_uri=str(checkpoint), output_dir=str(tmp_path / "out"))
    export_checkpoint(request)
    assert json.loads((tmp_path / "out" / PROVENANCE).read_text())["layout"] == "vllm"
    assert load_export(tmp_path / "out").config == draft.config


def test_a_mask_token_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"mask_token_id \(384\)"):
        tiny_peagle(mask_token_id=384)
