"""The sections of a run configuration (docs/design.md §12). Unknown keys are refused; cross-field errors show both numbers."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

NonNegativeInt = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class ModelSection(Section):
    target: str = Field(min_length=1, description="Directory or hub id of the target model.")
    revision: str = Field("", description="Hub revision; empty for a local directory.")
    dtype: Literal["bfloat16", "float16", "float32"] = Field("bfloat16", description="dtype of capture and of stored features.")
    trust_remote_code: bool = False


class DataSection(Section):
    source: Literal["prompts", "features"] = Field("prompts", description="prompts: online capture. features: a captured feature set.")
    train: list[str] = Field(default_factory=list, description="Conversation files (JSON, JSON Lines, Parquet; optionally .gz).")
    prompt_set: str = Field("", description="An already prepared prompt set directory, instead of train.")
    max_length: PositiveInt = Field(2048, description="Tokens per sample; longer ones are cut, or rejected when no answer survives.")
    max_response_tokens: NonNegativeInt = Field(0, description="Cut each answer after this many tokens; 0: no limit.")
    max_samples: NonNegativeInt = Field(0, description="Use at most this many samples; 0: all.")
    filter: dict[str, list[str]] = Field(
        default_factory=dict, description="Keep rows whose field has one of the values, as in {split: [train], source: [gsm8k]}."
    )
    seed: int = Field(42, description="Seed of the per-epoch permutation of prompts.")


class StrategySection(Section):
    name: Literal["eagle3"] = "eagle3"
    layers: list[NonNegativeInt] | None = Field(None, description='Captured layers as "output of layer k"; default per strategy.')
    draft_vocab_size: NonNegativeInt = Field(32000, description="Rows of the draft's own head; 0: the target's vocabulary.")
    ttt_length: Annotated[int, Field(ge=1, le=17)] = Field(7, description="Training-time-test steps (arXiv 2503.01840).")
    step_decay: Annotated[float, Field(gt=0.0, le=1.0)] = Field(0.8, description="Weight of step i is step_decay**i.")
    mask_align: Literal["strict", "input", "compat"] = Field(
        "strict", description="Which rows are supervised. compat exists only for parity with other trainers."
    )
    intermediate_size: NonNegativeInt = Field(0, description="Width of the draft's MLP; 0: the target's.")


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
    dtype: Literal["bfloat16", "float32"] = Field("bfloat16", description="Compute dtype; master weights are always fp32.")
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: int = 42
    prefetch: PositiveInt = Field(2, description="Windows a rank keeps resolved ahead of the one it trains.")
    num_threads: NonNegativeInt = Field(0, description="torch CPU threads per rank; 0: torch's default.")


class CaptureSection(Section):
    engine: Literal["hf", "sglang"] = "hf"
    max_batch_tokens: PositiveInt = Field(4096, description="Tokens (with padding) in one capture batch.")
    extras: list[Literal["teacher_argmax", "teacher_lse"]] = Field(default_factory=list)


class FlowSection(Section):
    global_batch: NonNegativeInt = Field(0, description="Samples per optimizer step; 0: world × batch_size × accumulation.")
    high_bytes: NonNegativeInt = Field(0, description="Reserve at most this much of the pool; 0: 85 % of its capacity.")
    low_bytes: NonNegativeInt = Field(0, description="Resume dispatch below this; 0: 75 % of high_bytes.")
    high_samples: PositiveInt = 256
    low_samples: PositiveInt = 192
    order: Literal["deterministic", "arrival"] = "deterministic"
    lookahead: PositiveInt = Field(3, description="Windows planned ahead of the one being trained.")
    tail: Literal["drop", "pad", "carry"] = Field(
        "carry", description="Samples left over when an epoch does not fill a window: dropped, trained in a short window, or carried on."
    )
    retain: Literal["until_trained", "until_checkpoint"] = "until_trained"
    lease_s: PositiveFloat = Field(60.0, description="A claimed prompt returns to the queue when not renewed for this long.")
    sample_budget: PositiveInt = Field(3, description="Failures of a prompt itself (NaN, wrong length) before it is DEAD.")
    max_dead_fraction: Fraction = Field(0.01, description="More dead prompts than this: FAILED instead of DEGRADED.")
    starved_deadline_s: NonNegativeInt = Field(0, description="Fail when no capture worker lives for this long; 0: wait for ever.")

    @model_validator(mode="after")
    def _marks(self) -> Self:
        if self.low_samples > self.high_samples:
            raise ValueError(f"flow.low_samples ({self.low_samples}) must not exceed flow.high_samples ({self.high_samples})")
        if self.high_bytes and self.low_bytes > self.high_bytes:
            raise ValueError(f"flow.low_bytes ({self.low_bytes}) must not exceed flow.high_bytes ({self.high_bytes})")
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


class DeploymentSection(Section):
    mode: Literal["embedded", "fleet"] = "embedded"
    output_dir: str = Field("runs", description="Where run directories are written.")


class RunConfig(Section):
    run_id: str = ""
    model: ModelSection
    data: DataSection
    strategy: StrategySection = StrategySection()
    trainer: TrainerSection = TrainerSection()
    capture: CaptureSection = CaptureSection()
    flow: FlowSection = FlowSection()
    checkpoint: CheckpointSection = CheckpointSection()
    tracking: TrackingSection = TrackingSection()
    gate: GateSection = GateSection()
    deployment: DeploymentSection = DeploymentSection()

    @property
    def quantum(self) -> int:
        """Samples one optimizer step needs: world × batch_size × accumulation."""
        return self.trainer.world * self.trainer.batch_size * self.trainer.accumulation

    @property
    def global_batch(self) -> int:
        return self.flow.global_batch or self.quantum

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
        if self.data.source == "prompts" and not self.data.train and not self.data.prompt_set:
            raise ValueError("data.train is empty and data.prompt_set is not given: name at least one conversation file")
        if self.global_batch > self.quantum or self.quantum % self.global_batch and self.global_batch < self.trainer.world:
            raise ValueError(
                f"flow.global_batch ({self.global_batch}) must lie between trainer.world ({self.trainer.world}) and "
                f"trainer.world × batch_size × accumulation ({self.quantum})"
            )
        return self
