"""The numbers of benchmarks/capture_overhead, without servers."""

import asyncio
import json
import sys
from pathlib import Path

import pytest
import torch
from fixtures.capture_site import LAYERS, contract_of
from fixtures.tiny import make_tiny_target

from benchmarks.capture_overhead import fidelity, profiling, report
from benchmarks.capture_overhead.load import Job, Outcome, prompt_ids
from benchmarks.capture_overhead.servers import PREFILL, PROFILER, Load, pair_options
from specfleet.target.hf import HFTarget

JOB = Job(captured=True, length=512, in_flight=4, measure_from=100.0, measure_until=104.0, keep=0)


def test_rate_is_not_misled_by_bursts_or_by_what_lies_outside_the_window() -> None:
    """16 answers of 512 tokens every 40 ms are 204,800 tokens/s, whenever the window begins."""
    for phase in (0.0, 0.013, 0.039):
        bursts = [99.0 + phase + 0.04 * index for index in range(150)]
        moments = [moment for moment in bursts for _ in range(16)]
        assert report.tokens_per_s(JOB, moments) == pytest.approx(204_800, rel=0.003)
    with pytest.raises(ValueError, match="2 answers of 512 tokens are too few"):
        report.tokens_per_s(JOB, [99.0, 101.0, 102.0, 105.0])


def measured(rate: float, hash_s: float = 0.0, failures: int = 0) -> report.Measurement:
    seconds = {"copy": hash_s / 2, "wait": 1.0, "hash": hash_s, "put": hash_s}
    load = Load({"scheduler": 1.0, "idle": 0.01}, batches_per_s=rate / 8000, tokens_per_batch=8000)
    return report.Measurement(rate, seconds, 0.5, load, ["broken"] * failures)


def test_summary_of_rounds() -> None:
    plain = [measured(rate) for rate in (190_000, 200_000, 220_000)]
    captured = [measured(rate, 1e-6, failures=1) for rate in (150_000, 160_000, 170_000)]
    told = report.summary(plain, captured, bytes_per_token=8192)
    assert (told["plain_tokens_per_s"], told["captured_tokens_per_s"], told["ratio"]) == (200_000, 160_000, 0.8)
    assert told["best"]["ratio"] == round(170 / 220, 3)
    assert told["overhead_us_per_token"] == 1.25  # 6.25 µs instead of 5
    assert told["split_over_overhead"] == 2.0  # 2.5 µs of copies, hashes and puts, which overlap
    assert told["busy"] == {"copies": 0.08, "writer": 0.32}
    expected = {"cores": {"scheduler": 1.0}, "batches_per_s": 20.0, "tokens_per_batch": 8000}
    assert told["server"]["captured"] == expected
    assert told["failures"] == {"count": 3, "first": "broken"}
    other = {**told, "plain_tokens_per_s": 100_000, "captured_tokens_per_s": 90_000, "ratio": 0.9}
    whole = report.overall({"512": told, "1024": other})
    # As many tokens of each: 5 + 10 µs, and 6.25 + 11.11 µs, for two tokens.
    assert (whole["plain_tokens_per_s"], whole["captured_tokens_per_s"]) == (133_333, 115_200)
    assert (whole["ratio"], whole["worst_ratio"]) == (0.864, 0.8)


def test_measurement_adds_up_the_clients() -> None:
    moments = [100.0 + 0.1 * index for index in range(40)]
    spent = {"copy": 0.4, "wait": 0.0, "hash": 0.2, "put": 0.1}
    outcomes = [Outcome(moments, cores=cores, seconds=spent, failures=["x"]) for cores in (0.2, 0.7)]
    told = report.measurement(JOB, outcomes, Load({}))
    assert told.tokens_per_s == pytest.approx(20 * 512, rel=0.01)
    assert told.seconds_per_token["copy"] == pytest.approx(0.8 / (80 * 512))
    assert (told.client_cores, told.failures) == (0.7, ["x", "x"])


def test_fidelity_finds_a_wrong_layer_and_a_wrong_sample(tiny_target: Path) -> None:
    contract = contract_of(tiny_target, "sglang")
    target = HFTarget.load(tiny_target, LAYERS, "float32")
    samples = []
    for number in range(2):
        ids = prompt_ids(0, number, 40, contract.vocab_size)
        (captured,) = target.capture([ids])
        assert isinstance(captured, dict)
        samples.append((ids, {**captured, "input_ids": torch.tensor(ids, dtype=torch.int32)}))
    same = fidelity.compare(contract, "cpu", samples)["captured_vs_transformers"]
    exact = {"mean": 0.0, "max": 0.0}
    assert same == {**{f"layer {layer}": exact for layer in LAYERS}, "final_state": exact, "argmax_agreement": 1.0}

    width = contract.hidden_size
    samples[1][1]["aux_states"][3, width : 2 * width] *= 1.5
    told = fidelity.compare(contract, "cpu", samples)["captured_vs_transformers"]
    assert told[f"layer {LAYERS[1]}"] == {"mean": 0.00625, "max": 0.5}  # one token of 80
    assert told[f"layer {LAYERS[0]}"] == told[f"layer {LAYERS[2]}"] == exact

    samples[0][1]["final_state"] *= -1
    assert fidelity.compare(contract, "cpu", samples)["captured_vs_transformers"]["argmax_agreement"] == 0.5
    with pytest.raises(AssertionError, match="other token ids"):
        fidelity.compare(contract, "cpu", [(samples[0][0], samples[1][1])])


def test_noise_of_the_dtype_is_measured_beside(tmp_path: Path) -> None:
    target = make_tiny_target(tmp_path / "target", dtype=torch.bfloat16)
    contract = contract_of(target, "sglang")
    contract.dtype = "bfloat16"
    ids = prompt_ids(0, 0, 40, contract.vocab_size)
    (captured,) = HFTarget.load(target, LAYERS, "bfloat16").capture([ids])
    assert isinstance(captured, dict)
    told = fidelity.compare(contract, "cpu", [(ids, {**captured, "input_ids": torch.tensor(ids)})])
    assert told["captured_vs_transformers"]["final_state"]["max"] == 0.0
    noise = told["transformers_vs_float32"]
    assert 0.0 < noise["final_state"]["mean"] < 0.05
    assert told["captured_vs_float32"] == noise


def test_batches_are_read_from_the_log() -> None:
    line = b"[2026-12-01 16:00:00] Prefill batch, #new-seq: 16, #new-token: 8192, #cached-token: 0, token usage: 0.03\n"
    assert PREFILL.findall(line + b"Decode batch, #running-req: 1\n" + line) == [b"8192", b"8192"]


def test_both_servers_get_the_same_flags_but_for_the_plugin(tiny_target: Path, tmp_path: Path) -> None:
    contract = contract_of(tiny_target, "sglang")
    plain, captured = pair_options(contract, "cpu", "memory://pool", "--chunked-prefill-size 256", False, tmp_path)
    assert "SPECFLEET_CAPTURE" in captured.env
    assert "SPECFLEET_CAPTURE" not in plain.env
    assert plain.flags == captured.flags
    assert "--chunked-prefill-size" in plain.flags
    assert (plain.prefill_graphs, captured.prefill_graphs) == (False, False)
    graphs, _ = pair_options(contract, "cuda", "memory://pool", "", True, tmp_path)
    assert graphs.prefill_graphs


async def test_profiler_names_the_busy_thread_and_its_function(tmp_path: Path) -> None:
    """In an interpreter that knows nothing of it but its PYTHONPATH."""
    program = (
        "import sys, threading\n"
        "def spin():\n"
        "    while True: sum(range(1000))\n"
        "threading.Thread(target=spin, name='spinner', daemon=True).start()\n"
        "sys.stdin.read()\n"
    )
    env = {"PYTHONPATH": str(PROFILER), "SPECFLEET_BENCH_PROFILE": str(tmp_path)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdin=asyncio.subprocess.PIPE, env=env
    )
    path = tmp_path / f"{process.pid}.json"
    profiling.start(tmp_path)
    async with asyncio.timeout(20):
        while not path.with_suffix(".json.partial").exists():  # noqa: ASYNC110  another process
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.3)  # some samples
    await profiling.stop(tmp_path)
    await process.communicate(b"")
    (told,) = profiling.read(tmp_path, {process.pid: "scheduler", 1: "no Python"})
    assert told["process"] == "scheduler"
    assert json.loads(path.read_text())["samples"] == told["samples"] > 0
    assert "spinner" in told["threads"]
    assert "spin" in told["threads"]["spinner"]["own"][0][0]
    assert told["objects"]["count"] > 0
    assert len(told["collections"]["count"]) == 3
    assert "thread spinner" in profiling.render([told])
