"""The sections of a run configuration. Unknown keys are refused; cross-field errors show both numbers."""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from specfleet.config.section import Fraction, NonNegativeInt, Section
from specfleet.config.strategies import Eagle3Section, StrategySection


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
