"""The releases of SGLang that the plugin was tested with: the functions it hooks or leans on, as they are there. Imports no SGLang.

A release gets its entry once `make test-sglang SGLANG_PYTHON=…` passes with it; `versions.measure` gives the digests.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Function:
    """One function as `path/of/module.py:Class.method`, its parameters and the sha256 of its source (16 hex digits)."""

    place: str
    parameters: str
    digest: str

    @property
    def target(self) -> str:
        """The dotted path that SGLang's hook registry resolves."""
        path, _, name = self.place.partition(":")
        return f"sglang.srt.{path.removesuffix('.py').replace('/', '.')}.{name}"


_LAYERS = "model_executor/model_runner.py:ModelRunner.init_attention_backends"
_RECEIVE = "managers/scheduler_components/request_receiver.py:SchedulerRequestReceiver._pull_raw_reqs"
_BATCHES = "managers/scheduler.py:Scheduler.run_batch"
_STATES = "layers/logits_processor.py:LogitsProcessor.forward"
_STREAM = "managers/scheduler_components/output_streamer.py:SchedulerOutputStreamer.stream_output"
HOOKED = (_LAYERS, _RECEIVE, _BATCHES, _STATES, _STREAM)

# Called or counted on: the teacher's logits, and the slice of customized_info that is sent.
_LOGITS = "layers/logits_processor.py:LogitsProcessor._get_logits"
_ACCEPT = "managers/scheduler_components/output_streamer.py:_GenerationStreamAccumulator.accept"

_BATCH_PARAMETERS = "self, batch: ScheduleBatch, pp_proxy_tensors: Optional[PPProxyTensors]=None"
_STATES_PARAMETERS = (
    "self, input_ids, hidden_states, lm_head: VocabParallelEmbedding, logits_metadata: Union[LogitsMetadata, ForwardBatch], "
    "aux_hidden_states: Optional[AuxHiddenStates]=None, hidden_states_before_norm: Optional[torch.Tensor]=None"
)
_LOGITS_PARAMETERS = (
    "self, hidden_states: torch.Tensor, lm_head: VocabParallelEmbedding, logits_metadata: LogitsMetadata, embedding_bias: "
    "Optional[torch.Tensor]=None, use_logits_buffer: bool=True"
)
# The same in all of them.
_UNCHANGED = (
    Function(_STREAM, "self, reqs: List[Req], return_logprob: bool, skip_req: Optional[Req]=None", "ea8674f3306daab3"),
    Function("plugins/hook_registry.py:HookRegistry.apply_hooks", "cls", "5250fd9a1bf2498b"),
    Function("distributed/parallel_state.py:get_attn_tensor_model_parallel_rank", "", "30b31ceae6620475"),
)

TESTED: dict[str, tuple[Function, ...]] = {
    "0.5.14": (
        Function(_LAYERS, "self", "dbb3bfcc0a023323"),
        Function(_RECEIVE, "self", "8a9955fe896f087e"),
        Function(_BATCHES, _BATCH_PARAMETERS, "98e0aa94f5450749"),
        Function(_STATES, _STATES_PARAMETERS.replace("AuxHiddenStates", "torch.Tensor"), "5e54dd2307b7fd35"),
        Function(_LOGITS, _LOGITS_PARAMETERS.removesuffix(", use_logits_buffer: bool=True"), "15d3bce0b4e922c9"),
        Function(_ACCEPT, "self, *, req: Req", "4d4a527edbe84e10"),
        *_UNCHANGED,
    ),
    "0.5.17": (
        Function(_LAYERS, "self", "cda64875393ec0ae"),
        Function(_RECEIVE, "self", "cb5548440c9cfae7"),
        Function(_BATCHES, _BATCH_PARAMETERS, "5f17b42a9fa92e5d"),
        Function(_STATES, _STATES_PARAMETERS, "ef4025fea0dbd84f"),
        Function(_LOGITS, _LOGITS_PARAMETERS, "49e9119f2f05e7f2"),
        Function(_ACCEPT, "self, *, req: Req", "c3021ce1e1c8f3fb"),
        *_UNCHANGED,
    ),
    "0.5.23": (
        Function(_LAYERS, "self", "fe8ad5f68833981c"),
        Function(_RECEIVE, "self", "1126500041288d88"),
        Function(_BATCHES, _BATCH_PARAMETERS, "cda781c95f30944b"),
        Function(_STATES, _STATES_PARAMETERS, "60fd27b11a2daa55"),
        Function(_LOGITS, _LOGITS_PARAMETERS, "d58705e76e37164b"),
        Function(_ACCEPT, "self, *, req: Req", "6fc63b18c1b3f3af"),
        *_UNCHANGED,
    ),
}
