"""The hf engine on a tiny target: exact tensors, isolated items, measured facts; and the checks of every engine."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from specfleet.capture.engines.base import check_task, complete
from specfleet.capture.engines.hf import HFEngine
from specfleet.capture.engines.table import EngineOptions, engine_loader
from specfleet.contracts.capture import contract_hash, contract_mismatches
from specfleet.contracts.errors import CaptureItemError, ConfigError
from specfleet.contracts.ids import task_key
from specfleet.target.facts import read_target_facts
from specfleet.wire.records_pb2 import CaptureContract, PromptTask, TaskAttempt

LAYERS = (1, 2, 4)


def make_contract(target: Path) -> CaptureContract:
    facts = read_target_facts(target)
    return CaptureContract(
        target=str(target),
        weights_hash=facts.weights_hash,
        tokenizer_hash=facts.tokenizer_hash,
        layers=LAYERS,
        final_state="post_norm",
        dtype="float32",
        hidden_size=facts.hidden_size,
        num_hidden_layers=facts.num_hidden_layers,
        vocab_size=facts.vocab_size,
        engine="hf",
    )


def make_task(contract: CaptureContract, index: int, ids: list[int]) -> PromptTask:
    return PromptTask(
        attempt=TaskAttempt(task=task_key("r", 0, index), attempt=1),
        contract_hash=contract_hash(contract),
        input_ids=ids,
        loss_mask=bytes(i % 2 for i in range(len(ids))),
        store="p",
    )


@pytest.fixture(scope="module")
def contract(tiny_target: Path) -> CaptureContract:
    return make_contract(tiny_target)


@pytest.fixture(scope="module")
def engine(tiny_target: Path, contract: CaptureContract) -> HFEngine:
    return HFEngine(tiny_target, contract, "cpu")


def test_attested_facts_are_the_contract(engine: HFEngine, contract: CaptureContract) -> None:
    assert contract_mismatches(contract, engine.attest()) == []
    assert contract_hash(engine.attest()) == contract_hash(contract)


def test_attestation_measures_and_does_not_repeat_the_request(tiny_target: Path, contract: CaptureContract) -> None:
    lie = CaptureContract()
    lie.CopyFrom(contract)
    lie.weights_hash, lie.vocab_size = "0" * 64, 7
    measured = HFEngine(tiny_target, lie, "cpu").attest()
    assert measured.weights_hash == contract.weights_hash
    assert measured.vocab_size == contract.vocab_size


def test_tensors_equal_a_plain_forward(engine: HFEngine, contract: CaptureContract, tiny_target: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, 384, (n,), generator=generator).tolist() for n in (17, 5, 12)]
    results = engine.capture([make_task(contract, i, ids) for i, ids in enumerate(prompts)])
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()
    for ids, result in zip(prompts, results, strict=True):
        assert not isinstance(result, CaptureItemError)
        with torch.no_grad():
            out = model(torch.tensor([ids]), output_hidden_states=True)
        expected = torch.cat([out.hidden_states[layer + 1][0] for layer in LAYERS], dim=-1)
        torch.testing.assert_close(result["aux_states"], expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(result["final_state"], out.hidden_states[-1][0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(model.lm_head(result["final_state"]), out.logits[0], rtol=1e-4, atol=1e-4)


def test_one_failing_prompt_spares_its_neighbours(
    engine: HFEngine, contract: CaptureContract, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = engine._loaded()
    real = target.capture

    def fragile(batch: list[list[int]]) -> list[dict[str, torch.Tensor] | CaptureItemError]:
        if any(13 in ids for ids in batch):
            raise RuntimeError("kernel fault")
        return real(batch)

    monkeypatch.setattr(target, "capture", fragile)
    good, bad, also_good = engine.capture([make_task(contract, i, ids) for i, ids in enumerate(([1, 2], [13], [3]))])
    assert isinstance(bad, CaptureItemError)
    assert "kernel fault" in bad.message
    assert isinstance(good, dict)
    assert isinstance(also_good, dict)
    # Alone in its batch it is still to blame: the engine passes its own probe.
    [alone] = engine.capture([make_task(contract, 0, [13])])
    assert isinstance(alone, CaptureItemError)


def test_a_broken_engine_blames_no_prompt(
    engine: HFEngine, contract: CaptureContract, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(batch: list[list[int]]) -> list[dict[str, torch.Tensor]]:
        raise RuntimeError("device lost")

    monkeypatch.setattr(engine._loaded(), "capture", broken)
    with pytest.raises(RuntimeError, match="device lost"):
        engine.capture([make_task(contract, 0, [1, 2])])


def test_complete_adds_ids_and_mask_in_table_order(engine: HFEngine, contract: CaptureContract) -> None:
    task = make_task(contract, 0, [5, 6, 7])
    [captured] = engine.capture([task])
    assert isinstance(captured, dict)
    tensors = complete(task, contract, captured)
    assert list(tensors) == ["input_ids", "loss_mask", "aux_states", "final_state"]
    assert tensors["input_ids"].dtype == torch.int32
    assert tensors["input_ids"].tolist() == [5, 6, 7]
    assert tensors["loss_mask"].dtype == torch.uint8
    assert tensors["loss_mask"].tolist() == [0, 1, 0]
    task.features.extend(["input_ids", "aux_states"])
    assert list(complete(task, contract, captured)) == ["input_ids", "aux_states"]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda t: t.pop("final_state"), "SF-CAPTURE-MISSING"),
        (lambda t: t.update(aux_states=t["aux_states"][:-1]), "SF-CAPTURE-SHAPE"),
        (lambda t: t.update(aux_states=t["aux_states"].bfloat16()), "SF-CAPTURE-SHAPE"),
        (lambda t: t["final_state"].fill_(float("nan")), "SF-CAPTURE-NONFINITE"),
    ],
)
def test_wrong_tensors_are_item_errors(engine: HFEngine, contract: CaptureContract, change: object, code: str) -> None:
    task = make_task(contract, 0, [5, 6, 7])
    [captured] = engine.capture([task])
    assert isinstance(captured, dict)
    assert callable(change)
    change(captured)
    with pytest.raises(CaptureItemError) as error:
        complete(task, contract, captured)
    assert error.value.code == code


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.ClearField("input_ids"), "no tokens"),
        (lambda t: setattr(t, "loss_mask", b"\1"), "1 bytes for 3 tokens"),
        (lambda t: t.input_ids.__setitem__(0, 384), "6..384"),
        (lambda t: setattr(t, "contract_hash", "f" * 64), "contract"),
        (lambda t: t.features.append("attention_mask"), "attention_mask"),
    ],
)
def test_prompts_that_cannot_be_captured(contract: CaptureContract, change: object, says: str) -> None:
    task = make_task(contract, 0, [5, 6, 7])
    check_task(task, contract, contract_hash(contract))
    assert callable(change)
    change(task)
    with pytest.raises(CaptureItemError, match=says):
        check_task(task, contract, contract_hash(contract))


@pytest.mark.parametrize("options", [EngineOptions("vllm"), EngineOptions("hf", servers=("http://127.0.0.1:1",))])
def test_unusable_engine_options_are_refused(options: EngineOptions) -> None:
    with pytest.raises(ConfigError) as error:
        engine_loader(options)
    assert error.value.code == "SF-CAPTURE-ENGINE"
    assert error.value.exit_code == 2
