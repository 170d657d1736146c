"""Chains on a CPU, and how a server is told to speculate."""

from itertools import pairwise, takewhile
from pathlib import Path

import pytest
import torch

from specfleet.sglang.cpu_speculation import build_chain, keep_dtype, verify_chain
from specfleet.sglang.launch import ServerOptions, server_argv
from specfleet.sglang.speculation import speculating, why_not_served

CPU = ServerOptions(Path("/target"), "cpu", "float32", flags=("--mine",))


def links(batch: int, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    index, following, sibling = torch.full((3, batch, rows), -1)
    return index, following, sibling


def test_a_chain_is_a_tree_with_one_branch() -> None:
    lengths, rows = torch.tensor([3, 1]), 3
    index, following, sibling = links(2, rows)
    positions = torch.empty(2 * rows, dtype=torch.long)
    mask = torch.ones(int(lengths.sum()) * rows + 2 * rows * rows, dtype=torch.bool)
    build_chain(mask, mask, lengths, mask, positions, index, following, sibling, 1, 2, rows, 0)
    assert index.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert following.tolist() == [[1, 2, -1], [1, 2, -1]]
    assert (sibling == -1).all()
    assert positions.tolist() == [3, 4, 5, 1, 2, 3]
    first, second = mask[:18].view(3, 6), mask[18:].view(3, 4)
    assert first.tolist() == [[True] * 4 + [False] * 2, [True] * 5 + [False], [True] * 6]
    assert second.tolist() == [[True] * 2 + [False] * 2, [True] * 3 + [False], [True] * 4]


def test_guesses_count_until_the_first_wrong_one() -> None:
    generator = torch.Generator().manual_seed(3)
    batch, rows = 64, 5
    candidates, choices = torch.randint(0, 2, (2, batch, rows), generator=generator)
    index, following, sibling = links(batch, rows)
    lengths, mask = torch.ones(batch, dtype=torch.long), torch.empty(batch * rows * rows)
    positions = torch.empty(batch * rows, dtype=torch.long)
    build_chain(mask, mask, lengths, mask, positions, index, following, sibling, 1, 4, rows, 1)
    predicts = torch.zeros(batch * rows, dtype=torch.int32)
    rows_taken = torch.full((batch, rows), -1, dtype=torch.int32)
    counts = torch.empty(batch, dtype=torch.int32)
    verify_chain(predicts, rows_taken, counts, candidates, index, following, sibling, choices)
    seen = set()
    for b in range(batch):
        pairs = zip(candidates[b, 1:].tolist(), choices[b].tolist(), strict=False)
        accepted = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        seen.add(accepted)
        assert counts[b] == accepted
        taken = [b * rows + i for i in range(accepted + 1)]
        assert rows_taken[b].tolist() == taken + [-1] * (rows - len(taken))
        assert predicts[taken].tolist() == choices[b, : accepted + 1].tolist()
    assert seen == set(range(rows))


def test_embeddings_keep_their_dtype() -> None:
    class Batch:
        input_embeds = torch.tensor([1.0 + 2**-12])

    kept = keep_dtype({"input_embeds": Batch.input_embeds.bfloat16()}, None, Batch)
    assert kept["input_embeds"].equal(Batch.input_embeds)
    assert keep_dtype({}, None, Batch) == {}


def test_the_command_line_says_what_to_speculate_with() -> None:
    options = speculating(CPU, "eagle3", Path("/draft"), 4)
    argv = server_argv("python", options, 1)
    flags = dict(pairwise(argv))
    assert flags["--speculative-algorithm"] == "EAGLE3"
    assert flags["--speculative-draft-model-path"] == "/draft"
    assert (flags["--speculative-num-steps"], flags["--speculative-num-draft-tokens"]) == ("4", "5")
    # argparse takes the last of two.
    assert flags["--attention-backend"] == "triton"
    assert options.env["TRITON_INTERPRET"] == "1"
    assert "--mine" in argv
    on_gpu = speculating(ServerOptions(Path("/target"), "cuda", "bfloat16"), "dflash", Path("/draft"), 15)
    assert on_gpu.env == {}
    assert "--speculative-num-steps" not in on_gpu.flags
    assert dict(pairwise(on_gpu.flags))["--speculative-num-draft-tokens"] == "16"


@pytest.mark.parametrize(
    ("kind", "engine", "version", "device", "says"),
    [
        ("eagle3", "sglang", "0.5.14", "cpu", ""),
        ("dflash", "sglang", "0.5.23", "cuda", ""),
        ("dspark", "sglang", "0.5.17.post1", "cuda", ""),
        ("domino", "sglang", "0.5.23", "cuda", ""),
        ("peagle", "sglang", "0.5.23", "cuda", "no release of SGLang serves peagle"),
        ("dflash", "vllm", "0.5.14", "cuda", "--layout sglang"),
        ("dspark", "sglang", "0.5.14", "cuda", "SGLang 0.5.17 and later, this is 0.5.14"),
        ("domino", "sglang", "0.5.17", "cuda", "SGLang 0.5.23 and later, this is 0.5.17"),
        ("dspark", "sglang", "0.5.23", "cpu", "on a GPU only"),
        ("eagle3", "sglang", "0.5.17", "cpu", "written for SGLang 0.5.14, this is 0.5.17"),
    ],
)
def test_what_is_not_served_is_said(kind: str, engine: str, version: str, device: str, says: str) -> None:
    reason = why_not_served(kind, engine, version, device)
    assert says in reason
    assert reason.startswith("[SF-SGLANG-SERVE] ") == bool(says)


def test_the_algorithm_of_every_served_draft() -> None:
    on_gpu = ServerOptions(Path("/target"), "cuda", "bfloat16")
    for kind, algorithm in (("dspark", "DSPARK"), ("domino", "DFLASH")):
        flags = dict(pairwise(speculating(on_gpu, kind, Path("/draft"), 7).flags))
        assert flags["--speculative-algorithm"] == algorithm
        assert flags["--speculative-num-draft-tokens"] == "8"
