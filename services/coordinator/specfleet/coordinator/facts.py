"""What never changes about a run while it runs, parsed once: configuration, contract, features, sizes."""

from dataclasses import dataclass
from typing import Any

from specfleet.config import RunConfig, parse_config
from specfleet.contracts.capture import bytes_per_token, feature_table
from specfleet.policies.leases import LeasePolicy
from specfleet.wire.records_pb2 import CaptureContract


@dataclass(frozen=True, eq=False)
class RunFacts:
    run: int
    """runs.id"""
    run_id: str
    config: RunConfig
    contract: CaptureContract
    contract_hash: str
    features: tuple[str, ...]
    bytes_per_token: int
    """In the pool; 0 offline."""
    prompt_set_uri: str
    num_prompts: int
    total_steps: int
    window_tokens: int
    output_dir: str

    @property
    def num_tasks(self) -> int:
        """Tasks of the whole run, ingested or not."""
        return self.num_prompts * self.config.trainer.epochs

    @property
    def lease(self) -> LeasePolicy:
        return LeasePolicy(self.config.flow.lease_s)

    @property
    def offline(self) -> bool:
        """Trains from a feature set: nothing is captured, reserved in a pool, or deleted."""
        return self.config.data.source == "features"

    @property
    def retains(self) -> bool:
        """Features are kept until a checkpoint contains their step."""
        return self.config.flow.retain == "until_checkpoint"

    @classmethod
    def of(cls, row: Any) -> "RunFacts":
        """From a row of `runs`."""
        contract = CaptureContract.FromString(row.contract)
        config = parse_config(row.config_yaml, origin=f"run {row.run_id}")
        return cls(
            run=row.id,
            run_id=row.run_id,
            config=config,
            contract=contract,
            contract_hash=row.contract_hash,
            features=tuple(feature_table(contract)),
            bytes_per_token=bytes_per_token(contract) if config.data.source == "prompts" else 0,
            prompt_set_uri=row.prompt_set_uri,
            num_prompts=row.num_prompts,
            total_steps=row.total_steps,
            window_tokens=row.window_tokens,
            output_dir=row.output_dir,
        )
