"""From a launch record to a running loop: device, ranks, strategy, restore, and everything closed again."""

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import structlog
import torch
from google.protobuf.json_format import Parse

from specfleet.config import parse_config
from specfleet.contracts.capture import contract_hash
from specfleet.contracts.errors import ContractError
from specfleet.contracts.ids import steps_subject
from specfleet.data.prompt_set import PromptSet
from specfleet.features.source import FeatureSetSource, is_features_url
from specfleet.features.writer import FeatureSetWriter
from specfleet.store.base import FeatureSource
from specfleet.store.factory import open_store
from specfleet.target.hub import target_dir
from specfleet.trainer.checkpoint import CheckpointFolder, Facts, Saved, restore
from specfleet.trainer.device import DTYPES, pick_device
from specfleet.trainer.link import Link, LinkAbandoned
from specfleet.trainer.loader import Collate, Loader, page_locked
from specfleet.trainer.loop import Seat
from specfleet.trainer.metrics import FILE as METRICS_FILE
from specfleet.trainer.metrics import MetricsFile, TensorBoard
from specfleet.trainer.optim import MasterAdamW
from specfleet.trainer.parallel import Ranks
from specfleet.trainer.plans import PlanBook
from specfleet.trainer.recording import RecordLoop, sole
from specfleet.trainer.stop import Stop
from specfleet.trainer.strategies.base import Strategy
from specfleet.trainer.training import TrainLoop
from specfleet.wire.trainer_pb2 import JoinRunRequest, JoinRunResponse, Launch

log = structlog.get_logger()

_LOCK_POLL_S = 0.2


def read_launch(path: Path) -> Launch:
    return Parse(path.read_text(), Launch())


def run_directory(launch: Launch) -> Path:
    """`{output_dir}/{run_id}` (docs/design.md §6)."""
    return Path(launch.output_dir).resolve() / launch.run_id


class Session:
    """One rank's life in one launch."""

    def __init__(
        self, launch: Launch, *, coordinator: str, nats: str, store: str, agent_id: str, device: str = "auto"
    ) -> None:
        self._launch = launch
        self._config = parse_config(launch.config_yaml, f"configuration of run {launch.run_id}")
        self._store_url = store
        self._agent_id = agent_id
        # The agent's flag says what this node has, the run's configuration what it wants; `auto` gives way.
        self._device = device if device != "auto" else self._config.trainer.device
        self._directory = run_directory(launch)
        self._link = Link(coordinator, nats)
        self._stop = Stop()

    def run(self, rank: int, world: int, parent_pid: int) -> str:
        """Joins, trains or records, leaves. Returns the loop's outcome, or `stop` when told to leave before it began."""
        self._stop.on_signals()
        self._stop.watch_parent(parent_pid)
        if self._config.trainer.num_threads:
            torch.set_num_threads(self._config.trainer.num_threads)
        with contextlib.ExitStack() as cleanup:
            device = pick_device(self._device, int(os.environ.get("LOCAL_RANK", rank)))
            ranks = Ranks(rank, world, device)
            cleanup.callback(ranks.close)
            cleanup.callback(self._link.close)
            try:
                self._link.start(self._leave)
                if ranks.leads:
                    cleanup.enter_context(self._sole_writer())
                joined = self._link.join(self._join_request(rank, world), self._leave)
            except LinkAbandoned:
                return "stop"
            log.info("joined", generation=joined.generation, restored_step=joined.restored_step, device=str(device))
            if self._config.records:
                return self._record_loop(joined, ranks, cleanup).run()
            return self._train_loop(joined, ranks, device, cleanup).run()

    def _train_loop(
        self, joined: JoinRunResponse, ranks: Ranks, device: torch.device, cleanup: contextlib.ExitStack
    ) -> TrainLoop:
        prompt_set = PromptSet.open(Path(self._launch.prompt_set_uri))
        strategy = self._strategy(joined, prompt_set, device)
        facts = Facts(
            run_id=self._launch.run_id,
            generation=joined.generation,
            strategy=self._config.strategy.name,
            identity=strategy.identity(),
            contract=joined.contract,
            prompt_set=prompt_set.digest,
            target=joined.contract.target,
        )
        optimizer = self._optimizer(strategy, ranks)
        folder = CheckpointFolder(self._directory / "checkpoints")
        if ranks.leads:
            folder.clean()
        # Ranks differ from here on in whatever a strategy draws at random.
        torch.manual_seed(self._config.trainer.seed + ranks.rank)
        saved = Saved(step=joined.restored_step, uri="", digest="")
        if joined.checkpoint_uri:
            directory = Path(joined.checkpoint_uri.removeprefix("file://"))
            saved = restore(directory, joined.checkpoint_digest, facts, strategy.draft, optimizer, ranks)
            if saved.step != joined.restored_step:
                raise ContractError(
                    "SF-CHECKPOINT-STEP",
                    f"{directory} holds step {saved.step}, the ledger restores step {joined.restored_step}",
                )
        seat = self._seat(joined, ranks, saved, page_locked(strategy.collate, device), cleanup)
        trackers = self._trackers(saved.step) if ranks.leads else []
        for tracker in trackers:
            cleanup.callback(tracker.close)
        return TrainLoop(
            seat,
            self._config,
            facts,
            strategy,
            optimizer,
            folder=folder,
            total_steps=joined.total_steps,
            trackers=trackers,
        )

    def _record_loop(self, joined: JoinRunResponse, ranks: Ranks, cleanup: contextlib.ExitStack) -> RecordLoop:
        prompt_set = PromptSet.open(Path(self._launch.prompt_set_uri))
        directory = Path(self._config.record.directory)
        writer = FeatureSetWriter.open(directory, joined.contract, prompt_set, shard_bytes=0)
        cleanup.callback(writer.close)
        saved = Saved(joined.restored_step, joined.checkpoint_uri, joined.checkpoint_digest)
        return RecordLoop(self._seat(joined, ranks, saved, sole, cleanup), self._config, writer)

    def _seat(
        self, joined: JoinRunResponse, ranks: Ranks, saved: Saved, collate: Collate, cleanup: contextlib.ExitStack
    ) -> Seat:
        """With the loader running and following this rank's plans."""
        store = self._open_source(joined)
        cleanup.callback(store.close)
        loader = Loader(
            store,
            collate,
            PlanBook(self._launch.run_id, joined.generation, saved.step + 1),
            contract_hash=contract_hash(joined.contract),
            prefetch=self._config.trainer.prefetch,
            report_lost=self._link.report_lost,
        )
        cleanup.callback(loader.close)
        loader.start()
        subject = joined.steps_subject or steps_subject(self._launch.run_id, joined.generation, ranks.rank)
        self._link.follow(subject, loader.offer)
        return Seat(self._launch.run_id, joined.generation, ranks, self._link, loader, self._stop, saved)

    def _strategy(self, joined: JoinRunResponse, prompt_set: PromptSet, device: torch.device) -> Strategy:
        from specfleet.trainer.strategies.table import build_strategy

        # The same seed on every rank: the same initial weights everywhere.
        torch.manual_seed(self._config.trainer.seed)
        return build_strategy(
            self._config,
            joined.contract,
            target_dir(joined.contract.target, "vocabulary"),
            prompt_set,
            joined.total_steps,
            device,
            DTYPES[self._config.trainer.dtype],
        )

    def _optimizer(self, strategy: Strategy, ranks: Ranks) -> MasterAdamW:
        trainer = self._config.trainer
        for parameter in strategy.draft.parameters():
            ranks.copy_from_first_(parameter.data)
        return MasterAdamW(
            strategy.draft.named_parameters(),
            betas=trainer.betas,
            weight_decay=trainer.weight_decay,
            max_grad_norm=trainer.max_grad_norm,
        )

    def _trackers(self, restored_step: int) -> list[MetricsFile | TensorBoard]:
        trackers: list[MetricsFile | TensorBoard] = [MetricsFile(self._directory / METRICS_FILE, restored_step)]
        if self._config.tracking.tensorboard:
            trackers.append(TensorBoard(self._directory / "tensorboard", restored_step))
        return trackers

    def _open_source(self, joined: JoinRunResponse) -> FeatureSource:
        if is_features_url(joined.store):
            return FeatureSetSource(joined.store, joined.contract)
        expected, store = joined.store, open_store(self._store_url)
        if expected and store.name != expected:
            store.close()
            raise ContractError(
                "SF-TRAIN-STORE",
                f"this trainer reads pool {store.name!r}, the run's features are in pool {expected!r}: check --store",
            )
        return store

    def _join_request(self, rank: int, world: int) -> JoinRunRequest:
        identity = {name: str(value) for name, value in self._config.strategy.model_dump(mode="json").items()}
        identity["strategy"] = identity.pop("name")
        return JoinRunRequest(
            run_id=self._launch.run_id,
            launch_id=self._launch.launch_id,
            world=world,
            rank=rank,
            agent_id=self._agent_id,
            identity=identity,
        )

    def _leave(self) -> bool:
        return self._stop.requested

    @contextlib.contextmanager
    def _sole_writer(self) -> Iterator[None]:
        """Holds the run's lock: a rank 0 of an earlier launch that still writes its last checkpoint goes first.

        The kernel frees the lock when its holder dies, however it dies.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        with (self._directory / "trainer.lock").open("a+") as file:
            waiting = False
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if self._leave():
                        raise LinkAbandoned from None
                    if not waiting:
                        file.seek(0)
                        log.info("waiting for an earlier launch to leave", holder=file.read().strip())
                    waiting = True
                    time.sleep(_LOCK_POLL_S)
            file.truncate(0)
            file.write(f"{socket.gethostname()} pid {os.getpid()} launch {self._launch.launch_id}\n")
            file.flush()
            yield
