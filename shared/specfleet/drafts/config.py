"""What the configurations of all drafts share: sizes of a decoder layer, and how they are written, read and checked."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from specfleet.contracts.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """layer_ids: captured layers as "output of layer k". Raises ConfigError SF-DRAFT-CONFIG when sizes contradict one another."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    layer_ids: tuple[int, ...]
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if problems := self.problems():
            raise ConfigError("SF-DRAFT-CONFIG", f"{type(self).__name__}: {'; '.join(problems)}")

    def problems(self) -> list[str]:
        """Every contradiction, in words."""
        found = []
        if self.num_attention_heads % self.num_key_value_heads:
            found.append(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of num_key_value_heads "
                f"({self.num_key_value_heads})"
            )
        if not self.layer_ids:
            found.append("layer_ids is empty")
        return found

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it: lists for tuples."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of to_dict. Raises ConfigError SF-DRAFT-CONFIG on unknown or missing keys, too."""
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
        }
        try:
            return cls(**given)
        except TypeError as error:
            unknown = sorted(set(values) - {field.name for field in fields(cls)})
            raise ConfigError(
                "SF-DRAFT-CONFIG", f"{cls.__name__} does not fit: {error}; unknown keys {unknown}"
            ) from error
