"""Which engine's layout a draft is exported in unless someone asks for another. Torch-free, so that clients can name folders."""

from specfleet.contracts.errors import ConfigError

_PREFERRED = {"eagle3": "sglang", "peagle": "vllm", "dflash": "sglang", "domino": "sglang", "dspark": "sglang"}


def default_layout(strategy: str) -> str:
    """SGLang's where it serves the strategy, else vLLM's. Raises ConfigError SF-CONFIG-STRATEGY."""
    if strategy not in _PREFERRED:
        raise ConfigError(
            "SF-CONFIG-STRATEGY",
            f"no layout is known for drafts of strategy {strategy!r}; known: {', '.join(_PREFERRED)}",
        )
    return _PREFERRED[strategy]
