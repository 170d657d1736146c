"""What each strategy asks capture for: layers, final state. Torch-free, so that a contract can be written anywhere."""

from collections.abc import Callable
from dataclasses import dataclass

from specfleet.config.models import RunConfig, StrategySection
from specfleet.contracts.errors import ConfigError


@dataclass(frozen=True)
class FeatureRequest:
    """Layers as "output of decoder layer k" (0-based, ascending) and whether the post-norm final state is needed."""

    layers: tuple[int, ...]
    final_state: str


def eagle3_layers(num_hidden_layers: int) -> tuple[int, ...]:
    """The EAGLE3 default: outputs of layers 1, L//2 − 1 and L − 4 (SGLang's before-layer 2, L//2, L − 3)."""
    return (1, num_hidden_layers // 2 - 1, num_hidden_layers - 4)


@dataclass(frozen=True)
class _Needs:
    default_layers: Callable[[int], tuple[int, ...]]
    final_state: str


_NEEDS: dict[str, _Needs] = {
    "eagle3": _Needs(eagle3_layers, "post_norm"),
}


def feature_request(strategy: StrategySection, num_hidden_layers: int) -> FeatureRequest:
    """Raises ConfigError SF-CONFIG-LAYERS when a layer id is out of range, repeated or out of order."""
    needs = _NEEDS[strategy.name]
    layers = tuple(strategy.layers) if strategy.layers is not None else needs.default_layers(num_hidden_layers)
    chosen = "strategy.layers" if strategy.layers is not None else f"the default layers of {strategy.name}"
    if not layers or list(layers) != sorted(set(layers)):
        raise ConfigError("SF-CONFIG-LAYERS", f"{chosen} {list(layers)} must be distinct and ascending")
    # The last layer is refused: its output enters the final norm, and engines disagree about which side of it they hand out.
    if layers[0] < 0 or layers[-1] > num_hidden_layers - 2:
        raise ConfigError(
            "SF-CONFIG-LAYERS",
            f"{chosen} {list(layers)} must lie in 0..{num_hidden_layers - 2}: the target has {num_hidden_layers} layers "
            "and the last one cannot be captured. Choose layers in that range",
        )
    return FeatureRequest(layers, needs.final_state)


def total_steps(config: RunConfig, num_prompts: int) -> int:
    """Optimizer steps of a run that trains every prompt of every epoch, honouring flow.tail and trainer.max_steps."""
    batch, epochs = config.global_batch, config.trainer.epochs
    match config.flow.tail:
        case "drop":
            steps = num_prompts // batch * epochs
        case "pad":
            steps = -(-num_prompts // batch) * epochs
        case "carry":
            # What an epoch leaves over is carried into the next; only the last window of the run may be short.
            steps = -(-num_prompts * epochs // batch)
    return min(steps, config.trainer.max_steps) if config.trainer.max_steps else steps
