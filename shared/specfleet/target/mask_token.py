"""The token that stands for "not known yet" in parallel drafts (P-EAGLE, DFlash and its descendants). Imports no torch.

Its row of the target's embedding is frozen, so training and every serving engine must use the same id.
"""

import json
from pathlib import Path
from typing import Any

from specfleet.contracts.errors import ConfigError
from specfleet.target.facts import TextFacts, read_text_facts


def resolve_mask_token(target_dir: str | Path, explicit: int | None = None, draft: int | None = None) -> int:
    """First that is given: explicit (strategy.mask_token_id), the starting draft's, the tokenizer's mask token, the first
    id below the target's vocab_size that no token of the tokenizer uses.

    Raises ConfigError SF-CONFIG-MASK-TOKEN: there is none, it is a padding or end token, it is outside the vocabulary, or
    it differs from the tokenizer's mask token (SGLang refuses to serve such a draft).
    """
    directory = Path(target_dir)
    facts = read_text_facts(directory)
    tokens = _token_ids(directory)
    special = _special_ids(directory, tokens)
    own = special.get("mask_token")
    for value, origin in (
        (explicit, "strategy.mask_token_id"),
        (draft, "the starting draft's mask_token_id"),
        (own, "its mask token"),
    ):
        if value is not None:
            return _checked(value, origin, facts, special, directory)
    free = _first_unused(set(tokens.values()), facts.vocab_size)
    if free is None or not tokens:
        raise ConfigError(
            "SF-CONFIG-MASK-TOKEN",
            f"{directory}: the tokenizer has no mask token and "
            + (f"all {facts.vocab_size} embedding rows belong to tokens" if tokens else "its vocabulary cannot be read")
            + ". Set strategy.mask_token_id to a token that never occurs in the data (a reserved one, say); not the padding "
            "or an end token",
        )
    return _checked(free, "the first unused embedding row", facts, special, directory)


def _checked(value: int, origin: str, facts: TextFacts, special: dict[str, int], directory: Path) -> int:
    reason = ""
    if not 0 <= value < facts.vocab_size:
        reason = f"outside the target's vocabulary of {facts.vocab_size}"
    elif value in facts.eos_token_ids or value == special.get("eos_token"):
        reason = "an end token: the draft would learn that answers end in every empty slot"
    elif value == special.get("pad_token"):
        reason = "the padding token"
    elif special.get("mask_token", value) != value:
        reason = f"not the tokenizer's mask token {special['mask_token']}, and SGLang refuses to serve such a draft"
    if reason:
        raise ConfigError(
            "SF-CONFIG-MASK-TOKEN",
            f"{directory}: {value} ({origin}) cannot be the mask token: it is {reason}. "
            "Set strategy.mask_token_id to a token that never occurs in the data",
        )
    return value


def _first_unused(used: set[int], vocab_size: int) -> int | None:
    return next((token for token in range(vocab_size) if token not in used), None)


def _token_ids(directory: Path) -> dict[str, int]:
    """Token → id, of tokenizer.json; {} where the tokenizer is stored in another form."""
    document = _json(directory / "tokenizer.json")
    vocabulary = (document.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, list):  # Unigram models list [token, score] in id order
        vocabulary = {str(entry[0]): index for index, entry in enumerate(vocabulary)}
    added = {token["content"]: token["id"] for token in document.get("added_tokens") or []}
    # Tokens that only the configuration of the tokenizer knows are added after the others.
    decoder = _json(directory / "tokenizer_config.json").get("added_tokens_decoder") or {}
    return {**vocabulary, **added, **{token["content"]: int(index) for index, token in decoder.items()}}


def _special_ids(directory: Path, tokens: dict[str, int]) -> dict[str, int]:
    """mask_token, pad_token, eos_token → id, those that exist."""
    named = {**_json(directory / "special_tokens_map.json"), **_json(directory / "tokenizer_config.json")}
    found: dict[str, int] = {}
    for name in ("mask_token", "pad_token", "eos_token"):
        token = named.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if text in tokens:
            found[name] = tokens[text]
    return found


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("SF-CONFIG-MASK-TOKEN", f"{path} is not readable JSON: {error}") from error
    return document if isinstance(document, dict) else {}
