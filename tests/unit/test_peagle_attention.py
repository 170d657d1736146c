"""The element forward of P-EAGLE against the dense boolean mask it stands for, and against its decoder."""

import math
from pathlib import Path

import pytest
import torch
from fixtures.eagle3 import LAYERS
from fixtures.peagle import tiny_peagle
from torch.nn import functional

from specfleet.drafts.acceptance import TextRow, walk_drafter
from specfleet.drafts.decode import decode_greedy
from specfleet.drafts.peagle import PEagleDraft
from specfleet.target.hf import HFTarget

Elements = list[tuple[int, int, int]]
"""(sample, anchor, depth)."""


def element_mask(elements: Elements, lengths: list[int]) -> torch.Tensor:
    """[E, E] bool, from the definition: same text; depth 0 of rows up to the anchor, or the own chain up to the own depth."""

    def sees(q: tuple[int, int, int], k: tuple[int, int, int]) -> bool:
        same = q[0] == k[0] and q[1] < lengths[q[0]] and k[1] < lengths[k[0]]
        return same and ((k[2] == 0 and k[1] <= q[1]) or (k[1] == q[1] and k[2] <= q[2]))

    return torch.tensor([[sees(q, k) for k in elements] for q in elements])


def test_mask_example() -> None:
    """Two texts of 3 and 2 tokens; the last element is a padding row."""
    elements = [(0, 0, 0), (0, 1, 0), (0, 1, 1), (0, 2, 0), (1, 0, 0), (1, 0, 1), (1, 1, 0), (2, 0, 0)]
    mask = element_mask(elements, [3, 2, 0])
    seen = [set(row.nonzero().flatten().tolist()) for row in mask]
    assert seen[2] == {0, 1, 2}
    assert 2 not in seen[1]
    assert 3 not in seen[4]
    assert seen[7] == set()


def dense(
    draft: PEagleDraft, ids_BT: torch.Tensor, aux_BTK: torch.Tensor, elements: Elements, lengths: list[int]
) -> torch.Tensor:
    """Last-layer outputs [E, H] by plain masked attention over all elements."""
    place_mask = torch.full((), draft.config.mask_token_id)
    tokens, features = [], []
    for b, a, d in elements:
        tokens.append(
            ids_BT[b, a + 1]
            if d == 0 and a + 1 < ids_BT.shape[1]
            else torch.zeros_like(place_mask)
            if d == 0
            else place_mask
        )
        features.append(draft.fc(aux_BTK[b, a]) if d == 0 else draft.fc(draft.mask_hidden[0, 0]))
    embedded, hidden = draft.embed_tokens(torch.stack(tokens)), torch.stack(features)
    rotation = draft.rope.at(torch.tensor([a + d for _, a, d in elements]), hidden.dtype)
    mask = element_mask(elements, lengths)
    for index, layer in enumerate(draft.layers):
        if index:
            mixed = layer.input_layernorm(hidden)
            residual = hidden
        else:
            normed = layer.hidden_norm(hidden)
            mixed = torch.cat((layer.input_layernorm(embedded), normed), -1)
            residual = normed if draft.config.norm_before_residual else hidden
        q = layer.self_attn.queries(mixed, rotation)
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in layer.self_attn.keys_values(mixed, rotation))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
        weights = scores.masked_fill(~mask, -math.inf).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", weights, v)
        hidden = residual + functional.linear(attended.flatten(1), layer.self_attn.o_proj.weight)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return hidden


@pytest.mark.parametrize("changes", [{}, {"norm_before_residual": True, "num_layers": 3}, {"num_layers": 1}])
def test_elements_equal_dense_attention_with_its_gradients(changes: dict[str, object]) -> None:
    draft = tiny_peagle(dtype=torch.float64, **changes)
    generator = torch.Generator().manual_seed(3)
    lengths, padded = [9, 6], 9
    ids = torch.randint(0, 384, (2, padded), generator=generator)
    aux = torch.randn(2, padded, 96, generator=generator, dtype=torch.float64)
    chains = [torch.tensor(rows) for rows in ([1, 2, 4, 9, 11, 12], [0, 2, 4, 5, 11, 12], [2, 5, 11], [2])]
    every = [(b, t, 0) for b in range(2) for t in range(lengths[b])]
    deep = [(*divmod(row, padded), depth) for depth, rows in enumerate(chains) if depth for row in rows.tolist()]
    elements = every + deep
    expected_all = dense(draft, ids, aux, elements, lengths)
    picks = [elements.index((*divmod(row, padded), 0)) for row in chains[0].tolist()] + list(
        range(len(every), len(elements))
    )
    got, expected = torch.cat(draft.elements(ids, aux, chains)), expected_all[picks]
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10)
    weights = torch.randn(got.shape, generator=generator, dtype=got.dtype)
    names, parameters = zip(
        *((n, p) for n, p in draft.named_parameters() if not n.startswith(("norm", "lm_head"))), strict=True
    )
    ours = torch.autograd.grad((got * weights).sum(), parameters)
    reference = torch.autograd.grad((expected * weights).sum(), parameters)
    for name, a, b in zip(names, ours, reference, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9, msg=name)
        assert a.any(), name


def test_no_element_sees_what_it_is_to_guess() -> None:
    """An element of anchor a may depend on tokens up to a + 1 and states up to a, at any depth."""
    draft, row, length = tiny_peagle(dtype=torch.float64), 5, 14
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(0, 384, (1, length), generator=generator)
    aux = torch.randn(1, length, 96, generator=generator, dtype=torch.float64)
    chains = [torch.tensor([row])] * 4
    before = draft.elements(ids, aux, chains)
    later_ids, later_aux = ids.clone(), aux.clone()
    later_ids[:, row + 2 :] = (later_ids[:, row + 2 :] + 1) % 384
    later_aux[:, row + 1 :] += 1.0
    assert all(torch.equal(a, b) for a, b in zip(before, draft.elements(later_ids, later_aux, chains), strict=True))
    own = ids.clone()
    own[:, row + 1] = (own[:, row + 1] + 1) % 384
    assert not any(torch.equal(a, b) for a, b in zip(before, draft.elements(own, aux, chains), strict=True))
    # Other chains change nothing either.
    more = [torch.tensor([row - 1, row, row + 1])] * 4
    for a, b in zip(before, draft.elements(ids, aux, more), strict=True):
        torch.testing.assert_close(b[1:2], a, rtol=1e-12, atol=1e-12)


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> HFTarget:
    return HFTarget.load(tiny_target, LAYERS, dtype="float32", final_state="none")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_before_residual": True, "num_layers": 3, "num_depths": 7},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    ],
    ids=["default", "deep", "yarn"],
)
@torch.no_grad()
def test_training_logits_equal_decoding_logits(target: HFTarget, changes: dict[str, object]) -> None:
    draft = tiny_peagle(seed=1, **changes)
    depths, embedding = draft.config.num_depths, target.embedding_VH
    generator = torch.Generator().manual_seed(5)
    texts = [torch.randint(0, 384, (n,), generator=generator).tolist() for n in (26, 17)]
    ids = torch.zeros(2, 26, dtype=torch.int64)
    # Padding is filled with large numbers: nothing may read it.
    aux = torch.full((2, 26, 96), 1e3)
    for index, (text, item) in enumerate(zip(texts, target.capture(texts), strict=True)):
        assert isinstance(item, dict)
        ids[index, : len(text)] = torch.tensor(text)
        aux[index, : len(text)] = item["aux_states"]
    chains = [
        torch.tensor([26 * b + a for b, text in enumerate(texts) for a in range(len(text) - 1 - d)])
        for d in range(depths)
    ]
    trained = [draft.logits(output) for output in draft.elements(ids, aux, chains)]
    for b, text in enumerate(texts):
        drafter, done = draft.drafter(embedding), 0
        # Uneven strides, as rounds that accept different numbers of guesses.
        for row in [r for r in (0, 1, 4, 5, 9, 13, 14) if r + 2 <= len(text)]:
            drafter.extend(text[done + 1 : row + 2], aux[b, done : row + 1])
            done = row + 1
            for depth, logits in enumerate(drafter.chain(depths)):
                if row < len(text) - 1 - depth:
                    place = int((chains[depth] == 26 * b + row).nonzero())
                    torch.testing.assert_close(trained[depth][place], logits, rtol=0, atol=1e-4)


def test_proposing_twice_and_extending_twice_change_nothing(target: HFTarget) -> None:
    draft = tiny_peagle(seed=2)
    text = torch.randint(0, 384, (12,), generator=torch.Generator().manual_seed(1)).tolist()
    item = target.capture([text])[0]
    assert isinstance(item, dict)
    aux = item["aux_states"]
    whole, parts = draft.drafter(target.embedding_VH), draft.drafter(target.embedding_VH)
    whole.extend(text[1:], aux[:-1])
    expected = whole.propose(4)
    assert whole.propose(4) == expected
    assert whole.propose(2) == expected[:2]
    assert whole.propose(99) == expected
    assert whole.propose(0) == []
    for cut in ((0, 3), (3, 4), (4, 11)):
        parts.extend(text[cut[0] + 1 : cut[1] + 1], aux[cut[0] : cut[1]])
    assert parts.propose(4) == expected


def test_batched_hits_equal_the_drafters_walk(target: HFTarget) -> None:
    """On text made of the draft's own guesses, so that there are hits of every length."""
    draft = tiny_peagle(seed=3)
    prompt = [300, 12, 12, 80, 33, 6]
    text = prompt + decode_greedy(target, None, prompt, 30, 0).ids
    item = target.capture([text])[0]
    assert isinstance(item, dict)
    aux = item["aux_states"]
    embedding = target.embedding_VH
    # Every row's own guesses, written over the text behind it, one row at a time.
    for row in (7, 12, 20):
        drafter = draft.drafter(embedding)
        drafter.extend(text[1 : row + 2], aux[: row + 1])
        text[row + 2 : row + 6] = drafter.propose(4)
    hits = draft.chain_hits(torch.tensor([text]), aux[None], embedding, 6)[0]
    assert hits.shape == (len(text), 6)
    assert not hits[:, 4:].any()  # beyond what the draft proposes
    assert hits[20].tolist() == [True] * 4 + [False] * 2
    for row in range(len(text) - 2):
        drafter = draft.drafter(embedding)
        drafter.extend(text[1 : row + 2], aux[: row + 1])
        run = 0
        for guess, token in zip(drafter.propose(6), text[row + 2 :], strict=False):
            if guess != token:
                break
            run += 1
        assert int(hits[row].sum()) == run
    wanted = torch.zeros(1, len(text), dtype=torch.bool)
    wanted[0, 20] = True
    some = draft.chain_hits(torch.tensor([text]), aux[None], embedding, 6, wanted_BT=wanted)[0]
    assert torch.equal(some[20], hits[20])
    walked = walk_drafter(draft.drafter(embedding), TextRow(text, len(prompt)), aux, 4)
    assert walked.rounds


def test_decoding_is_lossless(target: HFTarget) -> None:
    draft = tiny_peagle(seed=4)
    prompt = [5, 99, 250, 14]
    plain = decode_greedy(target, None, prompt, 20, 0)
    assert decode_greedy(target, draft.drafter(target.embedding_VH), prompt, 20, 6).ids == plain.ids
