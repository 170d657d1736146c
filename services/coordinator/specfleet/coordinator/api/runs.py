"""RunService: runs, checkpoints and the ledger, for people and for specctl."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import structlog
from sqlalchemy import Connection

from specfleet.config import RunConfig, dump_config, parse_config
from specfleet.config.features import total_steps
from specfleet.contracts.capture import bytes_per_token, contract_hash
from specfleet.contracts.errors import ConfigError
from specfleet.contracts.ids import check_run_id, new_run_id
from specfleet.contracts.states import TERMINAL_RUN_STATES, RunState
from specfleet.coordinator.facts import RunFacts
from specfleet.coordinator.hub import Hub, now_ms
from specfleet.coordinator.ledger import runs as run_rows
from specfleet.coordinator.ledger.verify import explain, verify
from specfleet.coordinator.snapshot import members, snapshot
from specfleet.coordinator.validate import check_contract, check_features, check_resume, check_sizes, largest_window
from specfleet.features.feature_set import FeatureSet
from specfleet.features.source import features_url
from specfleet.policies.credits import check_window_fits, derive_marks
from specfleet.wire import run_pb2 as pb
from specfleet.wire.run_pb2_grpc import RunServiceServicer

log = structlog.get_logger()

MIN_WATCH_S = 0.1
DEFAULT_WATCH_S = 1.0
# Until a pool reports its size only configured marks can be too small.
ANY_CAPACITY = 1 << 62


class RunApi(RunServiceServicer):
    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    # -- submit ---------------------------------------------------------------------------------------------------

    async def SubmitRun(self, request: pb.SubmitRunRequest, context: Any) -> pb.SubmitRunResponse:
        """Validates everything that can be validated now. Idempotent for the same run id and configuration."""
        config = parse_config(request.config_yaml, "submitted configuration")
        run_id = check_run_id(request.run_id or config.run_id or new_run_id(config.strategy.name))
        config = config.model_copy(update={"run_id": run_id})
        check_contract(config, request.contract)
        prompt_set = await self._hub.prompts.open(request.prompt_set_uri)
        lengths = await self._hub.prompts.lengths(request.prompt_set_uri)
        check_sizes(config, request.contract, lengths)
        window_tokens = largest_window(config, lengths)
        store = ""
        if config.data.source == "features":
            features = await asyncio.to_thread(FeatureSet.open, config.data.features)
            check_features(config, request.contract, features, prompt_set.digest, lengths)
            store = features_url(features)
        else:
            self._check_pools(config, request, window_tokens)
        now = now_ms()
        values = {
            "run_id": run_id, "strategy": config.strategy.name, "target": request.contract.target,
            "config_yaml": dump_config(config), "contract": request.contract.SerializeToString(),
            "contract_hash": contract_hash(request.contract), "prompt_set": prompt_set.digest,
            "prompt_set_uri": request.prompt_set_uri, "output_dir": config.deployment.output_dir,
            "num_prompts": len(lengths), "bytes_per_token": bytes_per_token(request.contract),
            "window_tokens": window_tokens, "total_steps": total_steps(config, len(lengths)),
            "store": store, "submitted_ms": now, "updated_ms": now,
        }  # fmt: skip
        facts_of_set = {
            "digest": prompt_set.digest, "uri": request.prompt_set_uri, "num_prompts": len(lengths),
            "num_tokens": int(lengths.sum(dtype="int64")), "max_tokens": int(lengths.max()),
        }  # fmt: skip
        await self._hub.ledger.write(lambda conn: self._create(conn, values, facts_of_set))
        log.info("run submitted", run=run_id, prompts=len(lengths), steps=values["total_steps"])
        self._hub.care.set()
        self._hub.dispatch.set()
        return pb.SubmitRunResponse(run=await self._snapshot(run_id))

    def _create(self, conn: Connection, values: dict[str, Any], prompt_set: dict[str, Any]) -> None:
        known = {row.run_id: row for row in run_rows.every(conn)}.get(values["run_id"])
        same = ("config_yaml", "contract", "prompt_set")
        if known is not None and all(getattr(known, name) == values[name] for name in same):
            return
        run = run_rows.create(conn, values, prompt_set)
        self._hub.set_state(conn, run_rows.get(conn, run), RunState.PREPARING, "submitted")

    def _check_pools(self, config: RunConfig, request: pb.SubmitRunRequest, window_tokens: int) -> None:
        """Against the largest pool known now; a pool that reports later is checked before the first dispatch."""
        pool = max(self._hub.pools.values(), key=lambda found: found.capacity_bytes, default=None)
        capacity = pool.capacity_bytes if pool else ANY_CAPACITY
        per_token = bytes_per_token(request.contract)
        flow = config.flow
        marks = derive_marks(
            high_bytes=flow.high_bytes, low_bytes=flow.low_bytes, high_samples=flow.high_samples,
            low_samples=flow.low_samples, capacity_bytes=capacity,
        )  # fmt: skip
        check_window_fits(
            marks, capacity_bytes=capacity, window_samples=config.global_batch,
            window_bytes=window_tokens * per_token, bytes_per_token=per_token, store=pool.name if pool else "",
        )  # fmt: skip

    # -- look -----------------------------------------------------------------------------------------------------

    async def GetRun(self, request: pb.GetRunRequest, context: Any) -> pb.GetRunResponse:
        return pb.GetRunResponse(run=await self._snapshot(request.run_id))

    async def ListRuns(self, request: pb.ListRunsRequest, context: Any) -> pb.ListRunsResponse:
        def read(conn: Connection) -> list[pb.RunSnapshot]:
            return [snapshot(self._hub, conn, row) for row in run_rows.every(conn)]

        return pb.ListRunsResponse(runs=await self._hub.ledger.read(read))

    async def WatchRun(self, request: pb.WatchRunRequest, context: Any) -> AsyncIterator[pb.WatchRunResponse]:
        interval_s = max(MIN_WATCH_S, request.interval_s or DEFAULT_WATCH_S)
        while True:
            current = await self._snapshot(request.run_id)
            yield pb.WatchRunResponse(run=current)
            if current.state in TERMINAL_RUN_STATES:
                return
            await asyncio.sleep(interval_s)

    async def ListCheckpoints(self, request: pb.ListCheckpointsRequest, context: Any) -> pb.ListCheckpointsResponse:
        rows = await self._hub.ledger.read(
            lambda conn: run_rows.committed(conn, run_rows.find(conn, request.run_id).id)
        )
        return pb.ListCheckpointsResponse(
            checkpoints=[
                pb.Checkpoint(
                    run_id=request.run_id, step=row.step, generation=row.generation, uri=row.uri, digest=row.digest,
                    committed_at_unix_ms=row.committed_ms, final=bool(row.final),
                )
                for row in rows
            ]
        )  # fmt: skip

    async def VerifyLedger(self, request: pb.VerifyLedgerRequest, context: Any) -> pb.VerifyLedgerResponse:
        found = await self._hub.ledger.read(lambda conn: verify(conn, request.run_id))
        return pb.VerifyLedgerResponse(
            run_id=request.run_id,
            rows=[
                pb.LedgerRow(epoch=row.epoch, ingested=row.ingested, tasks=row.tasks, conserved=row.conserved)
                for row in found.rows
            ],
            conserved=found.conserved,
            trained_twice=found.trained_twice,
            trained_never=found.trained_never,
            violations=found.violations,
            reserved_bytes=found.reserved_bytes,
            outbox_open=found.outbox_open,
        )

    async def ExplainSample(self, request: pb.ExplainSampleRequest, context: Any) -> pb.ExplainSampleResponse:
        task = request.task
        state, attempt, reason, history = await self._hub.ledger.read(
            lambda conn: explain(conn, task.run_id, task.epoch, task.prompt_index)
        )
        return pb.ExplainSampleResponse(task=task, state=state, attempt=attempt, reason=reason, history=history)

    async def ListFleet(self, request: pb.ListFleetRequest, context: Any) -> pb.ListFleetResponse:
        return pb.ListFleetResponse(members=await self._hub.ledger.read(lambda conn: members(self._hub, conn)))

    # -- steer ----------------------------------------------------------------------------------------------------

    async def PauseRun(self, request: pb.PauseRunRequest, context: Any) -> pb.PauseRunResponse:
        await self._steer(request.run_id, "pause", RunState.PAUSED, "paused by user")
        return pb.PauseRunResponse(run=await self._snapshot(request.run_id))

    async def CancelRun(self, request: pb.CancelRunRequest, context: Any) -> pb.CancelRunResponse:
        """Idempotent: cancelling a cancelled run changes nothing."""
        await self._steer(request.run_id, "cancel", RunState.CANCELLED, "cancelled by user")
        return pb.CancelRunResponse(run=await self._snapshot(request.run_id))

    async def ResumeRun(self, request: pb.ResumeRunRequest, context: Any) -> pb.ResumeRunResponse:
        facts = await self._hub.facts_of(request.run_id)
        adopted = ""
        if request.config_yaml:
            given = parse_config(request.config_yaml, "configuration to resume with")
            given = given.model_copy(update={"run_id": request.run_id})
            check_resume(facts.config, given)
            lengths = await self._hub.prompts.lengths(facts.prompt_set_uri)
            check_sizes(given, facts.contract, lengths)
            adopted = dump_config(given)
        await self._hub.ledger.write(lambda conn: self._resume(conn, facts, adopted))
        if adopted:
            self._hub.forget_facts(facts.run)
        self._wake()
        return pb.ResumeRunResponse(run=await self._snapshot(request.run_id))

    def _resume(self, conn: Connection, facts: RunFacts, adopted: str) -> None:
        row = run_rows.get(conn, facts.run)
        if row.state in TERMINAL_RUN_STATES or row.wanted == "cancel":
            raise ConfigError("SF-RUN-OVER", f"run {row.run_id} is {row.state} and cannot be resumed; submit a new run")
        values = {"config_yaml": adopted} if adopted else {}
        run_rows.set_values(
            conn, row.id, wanted="run", fruitless_launches=0, next_launch_ms=0, updated_ms=now_ms(), **values
        )
        if row.state == RunState.PAUSED:
            to = RunState.PREPARING if row.generation == 0 else RunState.PAUSED
            self._hub.set_state(conn, row, to, "resumed; waiting for a trainer")

    async def _steer(self, run_id: str, wanted: str, state: RunState, reason: str) -> None:
        def steer(conn: Connection) -> None:
            row = run_rows.find(conn, run_id)
            if row.state == state and row.wanted == wanted:
                return
            if row.state in TERMINAL_RUN_STATES or (wanted == "pause" and row.state == RunState.DRAINING):
                raise ConfigError(
                    "SF-RUN-OVER", f"run {run_id} is {row.state}; it cannot be {reason.split()[0]} any more"
                )
            if wanted == "pause":
                self._hub.pause(conn, row, reason)
            else:
                run_rows.set_values(conn, row.id, wanted=wanted)
                self._hub.set_state(conn, row, state, reason)

        await self._hub.ledger.write(steer)
        self._wake()

    def _wake(self) -> None:
        for wake in (self._hub.care, self._hub.plan, self._hub.dispatch, self._hub.outbox):
            wake.set()

    async def RecordGateReport(self, request: pb.RecordGateReportRequest, context: Any) -> pb.RecordGateReportResponse:
        if request.verdict not in ("PASS", "FAIL"):
            raise ConfigError("SF-GATE-VERDICT", f"verdict {request.verdict!r} is neither PASS nor FAIL")

        def record(conn: Connection) -> None:
            if request.run_id:
                run_rows.find(conn, request.run_id)
            run_rows.record_gate(conn, request.gate_id, request.run_id, request.verdict, request.report_json, now_ms())

        await self._hub.ledger.write(record)
        with contextlib.suppress(ValueError):
            self._hub.tell(request.run_id, "gate", request.verdict)
        return pb.RecordGateReportResponse()

    async def _snapshot(self, run_id: str) -> pb.RunSnapshot:
        return await self._hub.ledger.read(lambda conn: snapshot(self._hub, conn, run_rows.find(conn, run_id)))
