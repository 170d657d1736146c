"""What is compared: a recipe per case, with the few settings in which a case differs from it.

Every setting of a strategy and the reason for it stand in its recipe, so the table measures what users are told to run. All
cases train on the same rows and for the same number of optimizer steps, hence on the same number of tokens; where a recipe has
another batch or other epochs than the comparison, the comparison's count.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from specfleet.config import RunConfig, load_config

RECIPES = Path(__file__).parents[2] / "recipes"
MAX_LENGTH = 1024


@dataclass(frozen=True)
class Case:
    """recipe: a file of recipes/. settings: `-s` overrides of it. seed: of the initial weights, the order and all draws."""

    recipe: str
    settings: tuple[str, ...] = ()
    seed: int = 42


# Both teacher facts are recorded: no case runs the target's whole head, and all of them report α and τ_prob.
_EAGLE = ("capture.extras=[teacher_argmax, teacher_lse]",)
# Fewer, larger chunks of logits than fit every host: on a GPU their launches are what a step waits for.
_BLOCK = ("strategy.chunk_blocks=1024",)
CASES: dict[str, Case] = {
    "eagle3": Case("smollm2-eagle3", _EAGLE),
    "eagle3-seed43": Case("smollm2-eagle3", _EAGLE, seed=43),
    "eagle3.1": Case("smollm2-eagle3", (*_EAGLE, "strategy.fc_norm=true", "strategy.norm_output=true")),
    "eagle3.1-lk": Case("smollm2-eagle3-lk", _EAGLE),
    "peagle": Case("smollm2-peagle", _EAGLE),
    "dflash": Case("smollm2-dflash", _BLOCK),
    "dflash-dpace": Case("smollm2-dflash", (*_BLOCK, "strategy.loss=dpace")),
    "domino": Case("smollm2-domino", _BLOCK),
    "dspark": Case("smollm2-dspark", _BLOCK),
}
DEFAULT = tuple(name for name in CASES if name != "eagle3.1-lk")
"""LK trains acceptance under sampling, which a greedy table does not show: on demand only."""


def case_of(name: str) -> Case:
    """`NAME` of the table, or `NAME:section.key=value:…` for the same with further settings. Raises KeyError."""
    base, *settings = name.split(":")
    return replace(CASES[base], settings=(*CASES[base].settings, *settings))


def configure(name: str, target: Path, batch_size: int, layers: tuple[int, ...] | None = None) -> RunConfig:
    """The configuration of a case. layers: captured layers other than the strategy's own (to record for all at once)."""
    case = case_of(name)
    chosen = () if layers is None else (f"strategy.layers={list(layers)}",)
    return load_config(
        RECIPES / f"{case.recipe}.yaml",
        (
            f"model.target={target}", f"data.max_length={MAX_LENGTH}", f"data.seed={case.seed}",
            f"trainer.seed={case.seed}", f"trainer.batch_size={batch_size}", *case.settings, *chosen,
        ),
    )  # fmt: skip
