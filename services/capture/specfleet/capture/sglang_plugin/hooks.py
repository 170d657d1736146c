"""The five hooks, and what they share. One `Hooks` per process of the server; it works in the scheduler's thread.

layers   after the model is loaded     the model hands out the states of the captured layers
receive  before requests are spread    parses capture requests, gives each a cache namespace, holds back what does not fit,
         over the ranks                and sends answers that were withheld
batch    around a batch                notes which rows of it belong to which capture
states   around the logits             takes those rows; the states of layers go no further, so ordinary requests see none
stream   before answers are sent       withholds those of captures until their objects are published

All of it holds for the releases of releases.py. The states pass through LogitsProcessor.forward in every model that hands them
out, as `hidden_states` [N, H] after the final norm and `aux_hidden_states`: one [N, H] per layer, or, of some models since
0.5.17, all of them side by side.
"""

import gc
import logging
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import Any

import torch

from specfleet.capture.sglang_plugin.admission import Admission
from specfleet.capture.sglang_plugin.checks import capture_layers, check_options, check_request
from specfleet.capture.sglang_plugin.copies import copier_for
from specfleet.capture.sglang_plugin.request import KEY, CaptureRequest, FeatureTable, Origin, failure, parse, refused
from specfleet.capture.sglang_plugin.settings import Settings
from specfleet.capture.sglang_plugin.sink import FINITE, Capture, Sink, Span
from specfleet.contracts.capture import feature_table
from specfleet.contracts.errors import HostError, SpecfleetError
from specfleet.store.apart import StoreApart
from specfleet.store.factory import open_store
from specfleet.target.dtypes import DTYPES
from specfleet.wire.records_pb2 import CaptureContract

log = logging.getLogger(__name__)

# Rows of the full-vocabulary head computed at once for the teacher extras.
_TEACHER_ROWS = 512


@dataclass
class _Batch:
    """The captures in the batch that runs now."""

    spans: list[Span] = field(default_factory=list)
    """On the rank that writes."""
    taken: bool = False


class Hooks:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._dtype = DTYPES[settings.dtype]
        self._admission: Admission[Any] = Admission(settings.pending_bytes)
        self._batch: _Batch | None = None
        self._withheld: dict[str, Any] = {}
        # Known once the model is loaded.
        self._writes = False
        """Whether this is the rank that stores and answers: the states are the same on all of them."""
        self._sink: Sink | None = None
        self._table: FeatureTable = {}
        self._vocab_size = 0
        self._state_scale = 1.0

    @property
    def sink(self) -> Sink:
        assert self._sink is not None
        return self._sink

    # layers

    def after_init_attention_backends(self, _result: None, runner: Any) -> None:
        """AFTER ModelRunner.init_attention_backends, which sets up SGLang's own capture; before CUDA graphs are captured."""
        if runner.is_draft_worker:
            return
        try:
            self._load(runner)
        except SpecfleetError as error:
            # SGLang logs the traceback and kills the server and its children.
            print(f"specfleet: {error}", file=sys.stderr, flush=True)
            raise

    def _load(self, runner: Any) -> None:
        from sglang.srt.distributed.parallel_state import get_attn_tensor_model_parallel_rank

        model, config, settings = runner.model, runner.model_config, self._settings
        check_options(runner.server_args, runner.device)
        contract = CaptureContract(
            layers=settings.layers,
            final_state=settings.final_state,
            dtype=settings.dtype,
            hidden_size=config.hidden_size,
            extras=settings.extras,
        )
        self._writes = get_attn_tensor_model_parallel_rank() == 0
        self._vocab_size = config.vocab_size
        # What the head sees is divided by this in MiniCPM's models; features hold the state before that, once normed.
        self._state_scale = float(getattr(model, "scale_width", 1.0))
        capture_layers(model, settings.layers, config.num_hidden_layers)
        self._table = feature_table(contract)
        device = torch.device("cuda", runner.gpu_id) if runner.device == "cuda" else torch.device("cpu")
        # On CUDA the scheduler's thread launches kernels, thousands for a batch: nothing may take turns with it.
        apart = settings.writer == "process" or (settings.writer == "auto" and device.type == "cuda")
        store = StoreApart(settings.store) if apart else open_store(settings.store)
        origin = Origin(store.name, settings.layers, _release("sglang"), _release("specfleet"))
        self._sink = Sink(store, self._table, origin, copier_for(device), settings.store_full_s)
        if self._writes and (apart or device.type == "cuda"):
            self._sink.reserve(settings.pending_bytes)
        # Half a million objects that stay: not to be looked through again each time that so many captures have come and gone.
        gc.collect()
        gc.freeze()
        log.info("specfleet: captures layers %s into %s", list(settings.layers), settings.store)

    # receive

    def around_pull_raw_reqs(self, pull: Callable[..., list[Any] | None], receiver: Any) -> list[Any] | None:
        """AROUND SchedulerRequestReceiver._pull_raw_reqs, which returns None on ranks that do not receive."""
        received = pull(receiver)
        if received is None:
            return None
        self._send_published(receiver)
        passed: list[Any] = []
        for item in received:
            for request in getattr(item, "batch", [item]):
                self._receive(request, passed)
        return passed + self._admission.admit()

    def _receive(self, received: Any, passed: list[Any]) -> None:
        if hasattr(received, "abort_all"):
            self._abort(received, passed)
        request = self._parse(received)
        if request is None or request.answer is not None:
            passed.append(received)
        else:
            self._admission.offer(received.rid, request.num_bytes, received)

    def _abort(self, received: Any, passed: list[Any]) -> None:
        def matches(name: str) -> bool:
            return bool(received.abort_all or name.startswith(received.rid))

        self.sink.abandon(matches)
        # Those that waited here go on just ahead of the abort: SGLang answers for them.
        passed += self._admission.abort(matches)

    def _parse(self, received: Any) -> CaptureRequest | None:
        """Replaces the request's custom parameter by its parsed form; None for everything but captures."""
        params = getattr(received, "sampling_params", None)
        custom = getattr(params, "custom_params", None)
        if not isinstance(custom, dict) or KEY not in custom:
            return None
        raw, tokens = custom[KEY], len(received.input_ids)
        try:
            check_request(received)
            request = parse(raw, received.input_ids, self._vocab_size, self.sink.store.name, self._table)
        except SpecfleetError as error:
            request = refused(raw, tokens, error)
            # Answered without running the prompt.
            received.input_ids, params.max_new_tokens = array("q", [0]), 1
        params.custom_params = {**custom, KEY: request}
        # A prefix that some other request left in the cache would not be computed again, so it would not be captured.
        received.extra_key = f"specfleet:{received.rid}"
        return request

    def _send_published(self, receiver: Any) -> None:
        published = self.sink.published()
        for name in published:
            self._admission.end(name)
        reqs = [req for name in published if (req := self._withheld.pop(name, None)) is not None]
        if reqs:
            receiver.stream_output(reqs, any(req.return_logprob for req in reqs))

    # batch and states

    def around_run_batch(self, run: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """AROUND Scheduler.run_batch."""
        current = self._batch = self._captures(batch) if batch.forward_mode.is_extend() else None
        try:
            return run(scheduler, batch, *args, **kwargs)
        finally:
            self._batch = None
            for span in current.spans if current is not None and not current.taken else ():
                span.capture.failed = HostError("SF-SGLANG-NO-STATES", "the forward pass handed out no states")

    def _captures(self, batch: Any) -> _Batch | None:
        found, first = _Batch(), 0
        captured = False
        for req, position, count in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
            request = capture_of(req)
            # With overlap a request may run once more after its prompt is complete.
            if request is not None and request.answer is None and position < request.num_tokens:
                captured = True
                if self._writes:
                    found.spans.append(Span(self._begun(req, request), first, position, count))
            first += count
        return found if captured else None

    def _begun(self, req: Any, request: CaptureRequest) -> Capture:
        if request.state is None:
            request.state = self.sink.begin(req.rid, request, req.origin_input_ids)
        capture: Capture = request.state
        return capture

    def around_logits(
        self,
        forward: Callable[..., Any],
        processor: Any,
        input_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        lm_head: Any,
        logits_metadata: Any,
        aux_hidden_states: torch.Tensor | Sequence[torch.Tensor] | None = None,
        hidden_states_before_norm: torch.Tensor | None = None,
    ) -> Any:
        """AROUND LogitsProcessor.forward."""
        if self._batch is not None:
            self._take(self._batch, processor, hidden_states, lm_head, aux_hidden_states)
        return forward(processor, input_ids, hidden_states, lm_head, logits_metadata, None, hidden_states_before_norm)

    def _take(
        self,
        batch: _Batch,
        processor: Any,
        final_NH: torch.Tensor,
        lm_head: Any,
        aux: torch.Tensor | Sequence[torch.Tensor] | None,
    ) -> None:
        batch.taken = True
        if aux is None or not len(aux):
            raise HostError("SF-SGLANG-LAYERS", "the model handed out states of no layer")
        aux_NKH = aux if isinstance(aux, torch.Tensor) else torch.cat(list(aux), dim=-1)
        asked, handed_out = len(self._settings.layers), aux_NKH.shape[-1] // final_NH.shape[-1]
        if handed_out != asked:
            raise HostError(
                "SF-SGLANG-LAYERS", f"the model handed out states of {handed_out} layers instead of {asked}"
            )
        states = {"aux_states": aux_NKH.to(self._dtype)}
        states["final_state"] = (final_NH * self._state_scale if self._state_scale != 1.0 else final_NH).to(self._dtype)
        states[FINITE] = finite_rows(list(states.values()))
        if self._settings.extras:
            states |= self._teacher(processor, final_NH, lm_head)  # every rank takes part: the head is split over them
        if self._writes:
            self.sink.take(batch.spans, states)

    def _teacher(self, processor: Any, final_NH: torch.Tensor, lm_head: Any) -> dict[str, torch.Tensor]:
        argmax, lse = [], []
        # No buffer of the forward pass to copy logits into: these are more rows than it holds.
        metadata = SimpleNamespace(next_token_logits_buffer=None)
        for rows in final_NH.split(_TEACHER_ROWS):
            logits = processor._get_logits(rows, lm_head, metadata).float()
            argmax.append(logits.argmax(-1).int())
            lse.append(logits.logsumexp(-1))
        return {"teacher_argmax": torch.cat(argmax), "teacher_lse": torch.cat(lse)}

    # stream

    def around_stream_output(
        self,
        stream: Callable[..., None],
        streamer: Any,
        reqs: Sequence[Any],
        return_logprob: bool,
        skip_req: Any = None,
    ) -> None:
        """AROUND SchedulerOutputStreamer.stream_output."""
        ordinary, answered = [], []
        for req in reqs:
            request = capture_of(req)
            if request is None or req is skip_req or not self._writes or not req.finished() or req.finished_output:
                ordinary.append(req)
            elif self._answer_now(req, request):
                answered.append(req)
        if ordinary or not reqs:
            stream(streamer, ordinary, return_logprob, skip_req)
        # In a message of their own: in one of requests with and without it, SGLang 0.5.14 mixes up their customized_info.
        if answered:
            stream(streamer, answered, return_logprob)

    def _answer_now(self, req: Any, request: CaptureRequest) -> bool:
        """False for a request whose answer is withheld."""
        if req.rid in self._withheld:
            return False
        answer = self._answer(request)
        if answer is None:
            self._withheld[req.rid] = req
            return False
        self._admission.end(req.rid)
        self.sink.forget(req.rid)
        req.customized_info = {KEY: [answer]}
        # Nothing may live on in a cycle until a garbage collection, which takes long in a process of this size: SGLang lets
        # custom logit processors find the request in its own parameters.
        req.sampling_params.custom_params.pop("__req__", None)
        request.answer, request.state = answer, None
        return True

    @staticmethod
    def _answer(request: CaptureRequest) -> dict[str, Any] | None:
        """None while the objects are being published."""
        if request.answer is not None:
            return request.answer
        capture: Capture | None = request.state
        if capture is not None and capture.submitted_at is not None:
            return capture.answer
        rows = 0 if capture is None else capture.rows
        error = (capture and capture.failed) or HostError(
            "SF-SGLANG-ABORTED", f"the request ended after {rows} of {request.num_tokens} tokens were captured"
        )
        return failure(request.sample, error)


def finite_rows(states: Sequence[torch.Tensor]) -> torch.Tensor:
    """[N] bool: the rows of all `states` [N, elements] that hold neither NaN nor infinity."""
    # A row's largest magnitude is NaN or infinite where any element is: one pass each, and no temporary of that size.
    largest = [torch.linalg.vector_norm(state, torch.inf, dim=-1) for state in states]
    return torch.stack(largest).isfinite().all(dim=0)


def _release(distribution: str) -> str:
    try:
        return f"{distribution} {version(distribution)}"
    except PackageNotFoundError:  # only on the path, as beside a patched SGLang
        return f"{distribution} unversioned"


def capture_of(req: Any) -> CaptureRequest | None:
    custom = req.sampling_params.custom_params
    return custom.get(KEY) if isinstance(custom, dict) else None
