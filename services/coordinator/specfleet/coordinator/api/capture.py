"""CaptureControl: what capture workers ask."""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import structlog
from sqlalchemy import Connection

from specfleet.contracts.capture import contract_mismatches
from specfleet.contracts.errors import DataError
from specfleet.coordinator import metrics
from specfleet.coordinator.facts import RunFacts
from specfleet.coordinator.hub import HEARTBEAT_S, Hub, now_ms
from specfleet.coordinator.ledger import fleet, leases, outbox
from specfleet.coordinator.ledger import runs as run_rows
from specfleet.coordinator.loops.dispatcher import needs_capture, serves, wants_prompts
from specfleet.policies.retries import Failure
from specfleet.wire import capture_pb2 as pb
from specfleet.wire.capture_pb2_grpc import CaptureControlServicer
from specfleet.wire.records_pb2 import TaskAttempt

log = structlog.get_logger()

_CLASSES = {
    pb.FAILURE_CLASS_INFRA: Failure.INFRA,
    pb.FAILURE_CLASS_SAMPLE: Failure.SAMPLE,
    pb.FAILURE_CLASS_RETURNED: Failure.RETURNED,
}

Key = tuple[int, int, int]
"""(epoch, prompt_index, attempt)"""


def _key(attempt: TaskAttempt) -> Key:
    return attempt.task.epoch, attempt.task.prompt_index, attempt.attempt


class CaptureApi(CaptureControlServicer):
    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    async def RegisterWorker(self, request: pb.RegisterWorkerRequest, context: Any) -> pb.RegisterWorkerResponse:
        """A new process under a known name has lost its predecessor's work: those leases end at once."""

        def register(conn: Connection) -> int:
            known = fleet.worker(conn, request.worker_id)
            now = now_ms()
            fresh = known is None or known.pid != request.pid or known.host != request.host
            values: dict[str, Any] = {
                "worker_id": request.worker_id, "host": request.host, "pid": request.pid, "engine": request.engine,
                "engine_version": request.engine_version, "bound_target": request.bound_target, "seen_ms": now, "lost": 0,
                "store": request.pool.store, "capacity_bytes": request.pool.capacity_bytes,
                "used_bytes": request.pool.used_bytes,
            }  # fmt: skip
            if fresh:
                values |= {
                    "state": "STARTING", "contract_hash": "", "assigned_hash": "", "quarantined": "", "breaker": "",
                    "registered_ms": now,
                }  # fmt: skip
            fleet.put_worker(conn, **values)
            if not fresh or known is None:
                return 0
            active = [self._hub.facts(row) for row in run_rows.active(conn)]
            return sum(leases.expire(conn, facts, now, workers=[request.worker_id]) for facts in active)

        ended = await self._hub.ledger.write(register)
        log.info("capture worker registered", worker=request.worker_id, pid=request.pid, leases_ended=ended)
        self._hub.care.set()
        if ended:
            self._hub.dispatch.set()
            self._hub.outbox.set()
        return pb.RegisterWorkerResponse(heartbeat_s=HEARTBEAT_S)

    async def HeartbeatWorker(self, request: pb.HeartbeatWorkerRequest, context: Any) -> pb.HeartbeatWorkerResponse:
        def beat(conn: Connection) -> tuple[pb.HeartbeatWorkerResponse, bool]:
            worker = fleet.worker(conn, request.worker_id)
            if worker is None:
                return pb.HeartbeatWorkerResponse(unknown=True), False
            now = now_ms()
            breaker = fleet.breaker(worker)
            before = breaker.to_dict()
            may_pull = breaker.may_pull(now)
            if breaker.to_dict() != before:
                fleet.put_breaker(conn, request.worker_id, breaker)
            response = pb.HeartbeatWorkerResponse(
                quarantined=worker.quarantined,
                revoked=self._renew(conn, request, now),
                may_pull=may_pull and not worker.quarantined and bool(worker.contract_hash),
            )
            facts = self._assignment(conn, worker)
            if facts is not None:
                response.contract.CopyFrom(facts.contract)
                response.contract_hash = facts.contract_hash
                response.max_batch_tokens = facts.config.capture.max_batch_tokens
            fleet.put_worker(
                conn, worker_id=request.worker_id, state=request.state, seen_ms=now, lost=0,
                store=request.pool.store or worker.store,
                capacity_bytes=request.pool.capacity_bytes or worker.capacity_bytes, used_bytes=request.pool.used_bytes,
                numbers=json.dumps(dict(request.numbers)), assigned_hash=facts.contract_hash if facts else "",
            )  # fmt: skip
            changed = (
                worker.lost or worker.state != request.state or worker.capacity_bytes != request.pool.capacity_bytes
            )
            return response, bool(changed)

        response, changed = await self._hub.ledger.write(beat)
        if changed:
            self._hub.care.set()
        return response

    def _renew(self, conn: Connection, request: pb.HeartbeatWorkerRequest, now: int) -> list[TaskAttempt]:
        revoked: list[TaskAttempt] = []
        for facts, attempts in self._by_run(conn, request.claims).items():
            keys = [_key(attempt) for attempt in attempts]
            gone = set(keys if facts is None else leases.renew(conn, facts, request.worker_id, keys, now))
            revoked += [attempt for attempt in attempts if _key(attempt) in gone]
        return revoked

    def _assignment(self, conn: Connection, worker: fleet.WorkerRow) -> RunFacts | None:
        """The oldest active run this worker can capture for; what it serves already, as long as that is wanted."""
        wanted = [
            facts
            for row in run_rows.active(conn)
            if wants_prompts(row) and serves(worker, facts := self._hub.facts(row)) and needs_capture(conn, facts, row)
        ]
        serving = [facts for facts in wanted if facts.contract_hash == worker.assigned_hash]
        return next(iter(serving or wanted), None)

    async def AttestWorker(self, request: pb.AttestWorkerRequest, context: Any) -> pb.AttestWorkerResponse:
        def attest(conn: Connection) -> list[str]:
            if fleet.worker(conn, request.worker_id) is None:
                raise DataError(
                    "SF-FLEET-UNKNOWN-WORKER", f"worker {request.worker_id!r} is not registered; register again"
                )
            row = next((row for row in run_rows.every(conn) if row.contract_hash == request.contract_hash), None)
            if row is None:
                found = [f"contract_hash: no run has the contract {request.contract_hash}"]
            else:
                found = contract_mismatches(self._hub.facts(row).contract, request.facts)
            versions = " + ".join(filter(None, (request.engine_version, request.plugin_version)))
            fleet.put_worker(
                conn, worker_id=request.worker_id, engine_version=versions,
                contract_hash="" if found else request.contract_hash, quarantined="; ".join(found),
            )  # fmt: skip
            return found

        mismatches = await self._hub.ledger.write(attest)
        if mismatches:
            log.error("capture worker quarantined", worker=request.worker_id, mismatches=mismatches)
        self._hub.care.set()
        return pb.AttestWorkerResponse(accepted=not mismatches, mismatches=mismatches)

    async def ClaimTasks(self, request: pb.ClaimTasksRequest, context: Any) -> pb.ClaimTasksResponse:
        def claim(conn: Connection) -> list[pb.ClaimResult]:
            worker = fleet.worker(conn, request.worker_id)
            if worker is None:
                raise DataError(
                    "SF-FLEET-UNKNOWN-WORKER", f"worker {request.worker_id!r} is not registered; register again"
                )
            answers: dict[tuple[str, Key], leases.Claim] = {}
            for facts, attempts in self._by_run(conn, request.attempts).items():
                keys = [_key(attempt) for attempt in attempts]
                for attempt, answer in zip(attempts, self._claim_run(conn, worker, facts, keys), strict=True):
                    answers[attempt.task.run_id, _key(attempt)] = answer
            results = []
            for attempt in request.attempts:
                answer = answers[attempt.task.run_id, _key(attempt)]
                results.append(
                    pb.ClaimResult(
                        attempt=attempt,
                        accepted=answer.accepted,
                        deadline_unix_ms=answer.deadline_ms,
                        reason=answer.reason,
                    )
                )
            fleet.put_worker(conn, worker_id=request.worker_id, seen_ms=now_ms(), lost=0)
            return results

        with metrics.CLAIM_SECONDS.time():
            results = await self._hub.ledger.write(claim)
        accepted = sum(result.accepted for result in results)
        metrics.CLAIMS.labels("accepted").inc(accepted)
        metrics.CLAIMS.labels("refused").inc(len(results) - accepted)
        return pb.ClaimTasksResponse(results=results)

    def _claim_run(
        self, conn: Connection, worker: fleet.WorkerRow, facts: RunFacts | None, keys: Sequence[Key]
    ) -> list[leases.Claim]:
        refusal = ""
        if facts is None:
            refusal = "the run is unknown or over"
        elif worker.quarantined or worker.contract_hash != facts.contract_hash:
            refusal = f"worker {worker.worker_id} has not attested contract {facts.contract_hash[:12]}"
        elif run_rows.get(conn, facts.run).wanted == "cancel":
            refusal = "the run is cancelled"
        if facts is None or refusal:
            return [leases.Claim(False, reason=refusal)] * len(keys)
        self._hub.claimed_ms[facts.contract_hash] = now_ms()
        return leases.claim(conn, facts, worker.worker_id, keys, now_ms())

    async def FailTasks(self, request: pb.FailTasksRequest, context: Any) -> pb.FailTasksResponse:
        def fail(conn: Connection) -> bool:
            reasons = {(f.attempt.task.run_id, _key(f.attempt)): f for f in request.failures}
            blamed = False
            for facts, attempts in self._by_run(conn, [f.attempt for f in request.failures]).items():
                if facts is None:
                    continue
                given = [
                    (*_key(a), _CLASSES.get(f.failure_class, Failure.INFRA), f.reason)
                    for a in attempts
                    if (f := reasons[a.task.run_id, _key(a)])
                ]
                blamed = leases.fail(conn, facts, request.worker_id, given, now_ms()) or blamed
            worker = fleet.worker(conn, request.worker_id)
            if blamed and worker is not None:
                breaker = fleet.breaker(worker)
                breaker.failed(now_ms())
                fleet.put_breaker(conn, request.worker_id, breaker)
            return blamed

        blamed = await self._hub.ledger.write(fail)
        for failure in request.failures:
            log.warning(
                "attempt failed", worker=request.worker_id, run=failure.attempt.task.run_id, task=_key(failure.attempt),
                failure=pb.FailureClass.Name(failure.failure_class), reason=failure.reason,
            )  # fmt: skip
        self._hub.dispatch.set()
        self._hub.plan.set()
        if blamed:
            self._hub.care.set()
        return pb.FailTasksResponse()

    async def ConfirmReleases(self, request: pb.ConfirmReleasesRequest, context: Any) -> pb.ConfirmReleasesResponse:
        ids = list(request.outbox_ids)
        touched = await self._hub.ledger.write(lambda conn: outbox.confirm(conn, ids))
        if touched:
            self._hub.dispatch.set()
            self._hub.care.set()
        return pb.ConfirmReleasesResponse()

    def _by_run(self, conn: Connection, attempts: Iterable[TaskAttempt]) -> dict[RunFacts | None, list[TaskAttempt]]:
        """Grouped by active run; None: unknown or over."""
        active = {row.run_id: self._hub.facts(row) for row in run_rows.active(conn)}
        grouped: dict[RunFacts | None, list[TaskAttempt]] = defaultdict(list)
        for attempt in attempts:
            grouped[active.get(attempt.task.run_id)].append(attempt)
        return grouped
