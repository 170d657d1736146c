"""What each strategy asks capture for: layers, final state. Torch-free, so that a contract can be written anywhere."""

from dataclasses import dataclass

from specfleet.config.models import RunConfig
from specfleet.config.strategies import (
    DFlashSection,
    DominoSection,
    DSparkSection,
    Eagle3Section,
    PEagleSection,
    StrategySection,
)
from specfleet.contracts.errors import ConfigError


@dataclass(frozen=True)
class FeatureRequest:
    """Layers as "output of decoder layer k" (0-based, ascending) and whether the post-norm final state is needed."""

    layers: tuple[int, ...]
    final_state: str


def eagle3_layers(num_hidden_layers: int) -> tuple[int, ...]:
    """The EAGLE family's default: outputs of layers 1, L//2 − 1 and L − 4 (SGLang's before-layer 2, L//2, L − 3).

    Below eight layers those three collide; such small targets (tests) get the first, the middle and the last but one.
    """
    if num_hidden_layers < 8:
        return (0, (num_hidden_layers - 2) // 2, num_hidden_layers - 2)
    return (1, num_hidden_layers // 2 - 1, num_hidden_layers - 4)


def dflash_layers(num_hidden_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """The DFlash family's default: one captured layer per draft layer, spread evenly over 1 … L − 3 (halves to even)."""
    if num_draft_layers == 1:
        return (num_hidden_layers // 2,)
    spread = num_hidden_layers - 4
    return tuple(round(1 + i * spread / (num_draft_layers - 1)) for i in range(num_draft_layers))


def _needs(strategy: StrategySection, num_hidden_layers: int) -> FeatureRequest:
    """Default layers and final state of each strategy."""
    match strategy:
        case Eagle3Section() | PEagleSection():
            return FeatureRequest(eagle3_layers(num_hidden_layers), "post_norm")
        case DSparkSection():
            return FeatureRequest(dflash_layers(num_hidden_layers, strategy.num_layers), "post_norm")
        case DFlashSection() | DominoSection():
            return FeatureRequest(dflash_layers(num_hidden_layers, strategy.num_layers), "none")


def feature_request(strategy: StrategySection, num_hidden_layers: int) -> FeatureRequest:
    """Raises ConfigError SF-CONFIG-LAYERS when a layer id is out of range, repeated or out of order."""
    needs = _needs(strategy, num_hidden_layers)
    layers = tuple(strategy.layers) if strategy.layers is not None else needs.layers
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
