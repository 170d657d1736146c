"""The strategy section of a run configuration: one class per drafting family."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, PositiveInt, Tag, model_validator

from specfleet.config.section import Fraction, NonNegativeInt, Section


class _DraftSection(Section):
    """What every drafting family can be told."""

    layers: list[NonNegativeInt] | None = Field(
        None, description='Captured layers as "output of layer k"; default per strategy.'
    )
    intermediate_size: NonNegativeInt = Field(
        0,
        description="Width of the draft's MLP; 0: what one token passes through in the target (its dense MLP, or the experts "
        "chosen for a token).",
    )
    init_from: str = Field(
        "", description="Directory of an exported draft (SGLang, vLLM or SpecForge layout) to start from."
    )


MaskAlign = Literal["strict", "input", "compat"]


class Eagle3Section(_DraftSection):
    """EAGLE-3 (arXiv 2503.01840); fc_norm and norm_output make it EAGLE-3.1, lk trains acceptance itself."""

    name: Literal["eagle3"] = "eagle3"
    draft_vocab_size: NonNegativeInt = Field(
        32000, description="Rows of the draft's own head; 0: the target's vocabulary."
    )
    head: Literal["own", "target"] = Field(
        "own", description="target: the target's head, frozen (needs draft_vocab_size 0)."
    )
    ttt_length: Annotated[int, Field(ge=1, le=17)] = Field(7, description="Training-time-test steps.")
    ttt_schedule: Literal["constant", "curriculum", "sampled"] = Field(
        "constant",
        description="curriculum: grows to ttt_length over the first half of the run; sampled: drawn per micro-batch.",
    )
    step_decay: Annotated[float, Field(gt=0.0, le=1.0)] = Field(0.8, description="Weight of step i is step_decay**i.")
    mask_align: MaskAlign = Field(
        "strict", description="Which rows are supervised. compat exists only for parity with other trainers."
    )
    fc_norm: bool = Field(False, description="EAGLE-3.1: normalise each captured layer before the fusion.")
    norm_output: bool = Field(False, description="EAGLE-3.1: feed the normed output back.")
    legacy_v030: bool = Field(False, description="Only for parity tests: norm_output as SpecForge v0.3.0 computed it.")
    lk: Literal["none", "alpha", "lambda"] = Field("none", description="LK loss instead of cross entropy.")
    lk_scale: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        1.0, description="lambda = lk_scale · exp(−lk_decay · acceptance)."
    )
    lk_decay: Annotated[float, Field(ge=0.0)] = 3.0
    lk_lambda: Literal["batch", "token"] = Field(
        "token", description="Whether lambda follows each row's acceptance or the mean."
    )
    experts: NonNegativeInt = Field(
        0, description="Experimental: a mixture-of-experts MLP with this many experts; 0: dense."
    )
    experts_per_token: PositiveInt = 2

    @model_validator(mode="after")
    def _head(self) -> Self:
        if self.head == "target" and self.draft_vocab_size:
            raise ValueError(
                f"strategy.head is 'target' but strategy.draft_vocab_size is {self.draft_vocab_size}: the target's head covers "
                "its whole vocabulary. Set draft_vocab_size to 0"
            )
        if self.experts and self.experts_per_token > self.experts:
            raise ValueError(
                f"strategy.experts_per_token ({self.experts_per_token}) must not exceed strategy.experts ({self.experts})"
            )
        return self


class PEagleSection(_DraftSection):
    """P-EAGLE: parallel drafting with chain-of-depth sampling."""

    name: Literal["peagle"]
    draft_vocab_size: NonNegativeInt = Field(
        32000, description="Rows of the draft's own head; 0: the target's vocabulary."
    )
    num_layers: PositiveInt = 4
    num_depths: PositiveInt = Field(8, description="Tokens drafted in one pass.")
    keep_ratio: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        0.8, description="Share of a depth's chains that go deeper."
    )
    keep_ratio_min: Annotated[float, Field(gt=0.0, le=1.0)] = 0.2
    mask_token_id: int | None = Field(
        None, description="Token of placeholder rows; default: the tokenizer's or the first unused id."
    )
    norm_before_residual: bool = False
    mask_align: MaskAlign = "strict"

    @model_validator(mode="after")
    def _ratios(self) -> Self:
        if self.keep_ratio_min > self.keep_ratio:
            raise ValueError(
                f"strategy.keep_ratio_min ({self.keep_ratio_min}) must not exceed strategy.keep_ratio ({self.keep_ratio})"
            )
        return self


class _BlockSection(_DraftSection):
    """Families that draft a block of tokens in one pass (DFlash and its descendants)."""

    num_layers: PositiveInt = Field(5, description="Draft layers; also the default number of captured layers.")
    block_size: Annotated[int, Field(ge=2)] = 16
    num_anchors: PositiveInt = Field(512, description="Blocks trained per sample and visit, drawn without replacement.")
    loss_decay: Annotated[float, Field(gt=0.0)] | None = Field(
        7.0, description="γ: slot weight exp(−(slot − first)/γ); null: uniform."
    )
    mask_token_id: int | None = Field(
        None, description="Token of the empty slots; default: the tokenizer's or the first unused id."
    )
    contiguous: bool = Field(True, description="A slot counts only when every earlier slot of its block is supervised.")
    sliding_window: NonNegativeInt = Field(
        0, description="Window of the sliding-attention layers; 0: all layers see everything."
    )
    chunk_blocks: PositiveInt = Field(128, description="Blocks whose logits exist at once.")

    @model_validator(mode="after")
    def _window(self) -> Self:
        if self.sliding_window and self.sliding_window < self.block_size:
            raise ValueError(
                f"strategy.sliding_window ({self.sliding_window}) is smaller than strategy.block_size ({self.block_size}): "
                "engines trim the block itself then and training would not match serving"
            )
        return self


class DFlashSection(_BlockSection):
    """DFlash; loss dpace and its two ablations weight slots by the acceptance they buy."""

    name: Literal["dflash"]
    loss: Literal["ce", "dpace", "dpace_cumulative", "dpace_continuation"] = "ce"
    dpace_alpha: Fraction = 0.5
    dpace_norm: Literal["sequence", "token"] = Field(
        "token", description="Divide D-PACE by sequences (as published) or by slots."
    )


class DominoSection(_BlockSection):
    """Domino: a DFlash backbone and a causal GRU correction of its logits."""

    name: Literal["domino"]
    num_anchors: PositiveInt = 256
    gru_hidden_size: PositiveInt = 1024
    embedding_size: PositiveInt = 256
    shift_label: bool = Field(False, description="Slot j predicts token a+1+j instead of a+j.")
    base_weight: Fraction = Field(1.0, description="Weight of the uncorrected loss at the first step (λ₀).")
    base_decay_ratio: Fraction = Field(0.5, description="Share of the run over which that weight falls to zero (ρ).")


class DSparkSection(_BlockSection):
    """DSpark: the anchor slot predicts, a Markov head adds the previous token, a confidence head prices each slot."""

    name: Literal["dspark"]
    block_size: Annotated[int, Field(ge=2)] = 7
    loss_decay: Annotated[float, Field(gt=0.0)] | None = 4.0
    markov_head: Literal["vanilla", "gated", "rnn"] = "vanilla"
    markov_rank: PositiveInt = 256
    confidence_head: bool = True
    confidence_with_markov: bool = True
    ce_weight: Annotated[float, Field(ge=0.0)] = 0.1
    l1_weight: Annotated[float, Field(ge=0.0)] = 0.9
    confidence_weight: Annotated[float, Field(ge=0.0)] = 1.0


def _strategy_name(value: Any) -> Any:
    return value.get("name", "eagle3") if isinstance(value, Mapping) else getattr(value, "name", None)


StrategySection = Annotated[
    Annotated[Eagle3Section, Tag("eagle3")]
    | Annotated[PEagleSection, Tag("peagle")]
    | Annotated[DFlashSection, Tag("dflash")]
    | Annotated[DominoSection, Tag("domino")]
    | Annotated[DSparkSection, Tag("dspark")],
    Discriminator(_strategy_name),
]
STRATEGY_SECTIONS: dict[str, type[Section]] = {
    "eagle3": Eagle3Section,
    "peagle": PEagleSection,
    "dflash": DFlashSection,
    "domino": DominoSection,
    "dspark": DSparkSection,
}
