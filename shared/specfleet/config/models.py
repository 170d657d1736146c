"""The sections of a run configuration. Unknown keys are refused; cross-field errors show both numbers."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Discriminator, Field, PositiveFloat, PositiveInt, Tag, model_validator

NonNegativeInt = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


class ModelSection(Section):
    target: str = Field(
        min_length=1,
        description="Directory of the target model, ORG/NAME[@REVISION] of the Hugging Face Hub (pinned to a commit when the run "
        "is submitted), or builtin:smollm2-135m-instruct.",
    )
    dtype: Literal["bfloat16", "float16", "float32"] = Field(
        "bfloat16", description="dtype of capture and of stored features."
    )
    trust_remote_code: bool = False


class DataSection(Section):
    source: Literal["prompts", "features"] = Field(
        "prompts", description="prompts: online capture. features: a captured feature set."
    )
    train: list[str] = Field(
        default_factory=list, description="Conversation files (JSON, JSON Lines, Parquet; optionally .gz)."
    )
    prompt_set: str = Field("", description="An already prepared prompt set directory, instead of train.")
    features: str = Field(
        "",
        description="Directory of a feature set (source: features). It holds its prompts: train, max_length and filter "
        "applied when it was recorded.",
    )
    max_length: PositiveInt = Field(
        2048, description="Tokens per sample; longer ones are cut, or rejected when no answer survives."
    )
    max_response_tokens: NonNegativeInt = Field(0, description="Cut each answer after this many tokens; 0: no limit.")
    max_samples: NonNegativeInt = Field(0, description="Use at most this many samples; 0: all.")
    filter: dict[str, list[str]] = Field(
        default_factory=dict,
        description="Keep rows whose field has one of the values, as in {split: [train], source: [gsm8k]}.",
    )
    seed: int = Field(42, description="Seed of the per-epoch permutation of prompts.")


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


class TrainerSection(Section):
    world: PositiveInt = Field(1, description="Data-parallel ranks.")
    batch_size: PositiveInt = Field(8, description="Samples per rank and micro-batch.")
    accumulation: PositiveInt = 1
    epochs: PositiveInt = 1
    max_steps: NonNegativeInt = Field(0, description="Stop after this many optimizer steps; 0: run all epochs.")
    lr: PositiveFloat = 1e-4
    lr_schedule: Literal["cosine", "constant"] = "cosine"
    warmup_ratio: Fraction = 0.015
    max_grad_norm: PositiveFloat = 0.5
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    dtype: Literal["bfloat16", "float32"] = Field(
        "bfloat16", description="Compute dtype; master weights are always fp32."
    )
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: int = 42
    prefetch: PositiveInt = Field(2, description="Windows a rank keeps resolved ahead of the one it trains.")
    num_threads: NonNegativeInt = Field(0, description="torch CPU threads per rank; 0: torch's default.")


class CaptureSection(Section):
    engine: Literal["hf", "sglang"] = "hf"
    max_batch_tokens: PositiveInt = Field(
        4096, description="Tokens (with padding) in one batch of engine hf; tokens under way at first of engine sglang."
    )
    extras: list[Literal["teacher_argmax", "teacher_lse"]] = Field(default_factory=list)


class FlowSection(Section):
    global_batch: NonNegativeInt = Field(
        0, description="Samples per optimizer step; 0: world × batch_size × accumulation."
    )
    high_bytes: NonNegativeInt = Field(0, description="Reserve at most this much of the pool; 0: 85 % of its capacity.")
    low_bytes: NonNegativeInt = Field(0, description="Resume dispatch below this; 0: 75 % of high_bytes.")
    high_samples: PositiveInt = 256
    low_samples: PositiveInt = 192
    order: Literal["deterministic", "arrival"] = "deterministic"
    lookahead: PositiveInt = Field(3, description="Windows planned ahead of the one being trained.")
    tail: Literal["drop", "pad", "carry"] = Field(
        "carry",
        description="Samples left over when an epoch does not fill a window: dropped, trained in a short window, or carried on.",
    )
    retain: Literal["until_trained", "until_checkpoint"] = "until_trained"
    reuse_bytes: NonNegativeInt = Field(
        0,
        description="Keep up to this many bytes of captured features for later epochs, beside what is in flight; 0: every "
        "epoch captures anew.",
    )
    lease_s: PositiveFloat = Field(
        60.0, description="A claimed prompt returns to the queue when not renewed for this long."
    )
    sample_budget: PositiveInt = Field(
        3, description="Failures of a prompt itself (NaN, wrong length) before it is DEAD."
    )
    max_dead_fraction: Fraction = Field(0.01, description="More dead prompts than this: FAILED instead of DEGRADED.")
    starved_deadline_s: NonNegativeInt = Field(
        0, description="Fail when no capture worker lives for this long; 0: wait for ever."
    )

    @model_validator(mode="after")
    def _marks(self) -> Self:
        if self.low_samples > self.high_samples:
            raise ValueError(
                f"flow.low_samples ({self.low_samples}) must not exceed flow.high_samples ({self.high_samples})"
            )
        if self.high_bytes and self.low_bytes > self.high_bytes:
            raise ValueError(f"flow.low_bytes ({self.low_bytes}) must not exceed flow.high_bytes ({self.high_bytes})")
        if self.reuse_bytes and self.retain == "until_checkpoint":
            raise ValueError(
                f"flow.reuse_bytes ({self.reuse_bytes}) and flow.retain (until_checkpoint) exclude each other: features kept for "
                "later epochs already survive a restore"
            )
        return self


class CheckpointSection(Section):
    every_steps: PositiveInt = 100
    keep: PositiveInt = 3


class TrackingSection(Section):
    log_every: PositiveInt = 1
    tensorboard: bool = False


class GateSection(Section):
    eval: list[str] = Field(default_factory=list, description="Held-out conversation files.")
    eval_filter: dict[str, list[str]] = Field(default_factory=dict)
    num_draft_tokens: PositiveInt = 5
    max_rows_per_source: NonNegativeInt = 0
    lossless_rows: NonNegativeInt = 2
    temperature: Annotated[float, Field(ge=0.0)] = Field(
        0.0, description="Decode the lossless rows once more at this temperature; 0: greedily only."
    )
    top_k: NonNegativeInt = Field(0, description="With a temperature: sample from the likeliest tokens only; 0: all.")
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        1.0, description="With a temperature: sample from the smallest set of tokens that reaches this probability."
    )
    acceptance_rule: Literal["rejection", "target_only"] = Field(
        "rejection", description="Sampled guesses: lossless rejection sampling, or SGLang's default."
    )


class DeploymentSection(Section):
    output_dir: str = Field("runs", description="Where run directories are written.")


class RecordSection(Section):
    """A run that records a feature set instead of training (docs/feature-sets.md)."""

    directory: str = Field(
        "", description="Where the set is written. `specctl data capture` sets it; empty: a run trains."
    )
    shard_bytes: PositiveInt = Field(
        256 << 20, description="A shard is written, and what it holds settled, when this much has come together."
    )


class RunConfig(Section):
    run_id: str = ""
    model: ModelSection
    data: DataSection
    strategy: StrategySection = Eagle3Section()
    trainer: TrainerSection = TrainerSection()
    capture: CaptureSection = CaptureSection()
    flow: FlowSection = FlowSection()
    checkpoint: CheckpointSection = CheckpointSection()
    tracking: TrackingSection = TrackingSection()
    gate: GateSection = GateSection()
    deployment: DeploymentSection = DeploymentSection()
    record: RecordSection = RecordSection()

    @property
    def quantum(self) -> int:
        """Samples one optimizer step needs: world × batch_size × accumulation."""
        return self.trainer.world * self.trainer.batch_size * self.trainer.accumulation

    @property
    def global_batch(self) -> int:
        return self.flow.global_batch or self.quantum

    @property
    def records(self) -> bool:
        """Whether the run writes a feature set instead of training."""
        return bool(self.record.directory)

    def to_record(self, directory: str, shard_bytes: int) -> Self:
        """The same target, prompts, features and window of samples, recorded once by one rank."""
        samples = {"world": 1, "batch_size": 1, "accumulation": self.global_batch}
        trainer = {**samples, "epochs": 1, "max_steps": 0, "device": "cpu"}
        flow = {"global_batch": 0, "tail": "carry", "retain": "until_trained", "reuse_bytes": 0}
        return self.model_copy(
            update={
                "trainer": self.trainer.model_copy(update=trainer),
                "flow": self.flow.model_copy(update=flow),
                "record": RecordSection(directory=directory, shard_bytes=shard_bytes),
            }
        )

    @model_validator(mode="after")
    def _cross(self) -> Self:
        for mark in ("high_samples", "low_samples"):
            value = getattr(self.flow, mark)
            if value < self.global_batch:
                raise ValueError(
                    f"flow.{mark} ({value}) is smaller than one window of {self.global_batch} samples "
                    f"(trainer.world {self.trainer.world} × batch_size {self.trainer.batch_size} × accumulation "
                    f"{self.trainer.accumulation}, flow.global_batch {self.flow.global_batch}): training would wait for ever. "
                    f"Raise flow.{mark} to at least {self.global_batch}, or lower the batch"
                )
        if (self.data.source == "features") != bool(self.data.features):
            raise ValueError(
                f"data.source is '{self.data.source}' and data.features is '{self.data.features}': training from a feature "
                "set needs both source: features and its directory; training from prompts needs neither"
            )
        if self.records and self != self.to_record(self.record.directory, self.record.shard_bytes):
            raise ValueError(
                f"record.directory is '{self.record.directory}', but these settings train: recording takes one rank "
                f"(trainer.world {self.trainer.world}), batch_size {self.trainer.batch_size} = 1, epochs "
                f"{self.trainer.epochs} = 1, no max_steps, flow.tail carry and retain until_trained. Use specctl data capture"
            )
        if self.records and self.data.source == "features":
            raise ValueError(
                f"record.directory is '{self.record.directory}' and data.source is 'features': recording starts from prompts"
            )
        if self.data.source == "prompts" and not self.data.train and not self.data.prompt_set:
            raise ValueError(
                "data.train is empty and data.prompt_set is not given: name at least one conversation file"
            )
        if self.global_batch > self.quantum or (
            self.quantum % self.global_batch and self.global_batch < self.trainer.world
        ):
            raise ValueError(
                f"flow.global_batch ({self.global_batch}) must lie between trainer.world ({self.trainer.world}) and "
                f"trainer.world × batch_size × accumulation ({self.quantum})"
            )
        return self
