"""The functions of SGLang that the plugin hooks or leans on, as they are in each tested version. Imports no SGLang.

A function counts as the tested one when its signature and its source text are. `python -m
specfleet.capture.sglang_plugin.versions`, run by the server's interpreter, prints the comparison as JSON (`specctl capture
verify-engine`).
"""

import ast
import hashlib
import importlib.metadata
import importlib.util
import json
import sys
import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path

from specfleet.contracts.errors import HostError, SpecfleetError

DISTRIBUTION = "sglang"
ENTRY_POINT_GROUP = "sglang.srt.plugins"


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


@dataclass(frozen=True)
class Row:
    """One line of the comparison."""

    symbol: str
    expected: str
    found: str

    @property
    def ok(self) -> bool:
        return self.expected == self.found


_BATCHES = "managers/scheduler.py:Scheduler.run_batch"
_LOGITS = "layers/logits_processor.py:LogitsProcessor.forward"
_RECEIVE = "managers/scheduler_components/request_receiver.py:SchedulerRequestReceiver._pull_raw_reqs"
_STREAM = "managers/scheduler_components/output_streamer.py:SchedulerOutputStreamer.stream_output"
_LAYERS = "model_executor/model_runner.py:ModelRunner.init_aux_hidden_state_capture"
HOOKED = (_LAYERS, _RECEIVE, _BATCHES, _LOGITS, _STREAM)

TESTED: dict[str, tuple[Function, ...]] = {
    "0.5.14": (
        Function(_LAYERS, "self", "518dbd60cac9a359"),
        Function(_RECEIVE, "self", "8a9955fe896f087e"),
        Function(
            _BATCHES,
            "self, batch: ScheduleBatch, pp_proxy_tensors: Optional[PPProxyTensors]=None",
            "98e0aa94f5450749",
        ),
        Function(
            _LOGITS,
            "self, input_ids, hidden_states, lm_head: VocabParallelEmbedding, logits_metadata: "
            "Union[LogitsMetadata, ForwardBatch], aux_hidden_states: Optional[torch.Tensor]=None, "
            "hidden_states_before_norm: Optional[torch.Tensor]=None",
            "5e54dd2307b7fd35",
        ),
        Function(
            _STREAM,
            "self, reqs: List[Req], return_logprob: bool, skip_req: Optional[Req]=None",
            "ea8674f3306daab3",
        ),
        # Not hooked, but called or relied on: the teacher's logits, and the slice of customized_info that is sent.
        Function(
            "layers/logits_processor.py:LogitsProcessor._get_logits",
            "self, hidden_states: torch.Tensor, lm_head: VocabParallelEmbedding, logits_metadata: LogitsMetadata, "
            "embedding_bias: Optional[torch.Tensor]=None",
            "15d3bce0b4e922c9",
        ),
        Function(
            "managers/scheduler_components/output_streamer.py:_GenerationStreamAccumulator.accept",
            "self, *, req: Req",
            "4d4a527edbe84e10",
        ),
        Function("plugins/hook_registry.py:HookRegistry.apply_hooks", "cls", "5250fd9a1bf2498b"),
    ),
}


def installed_version() -> str:
    """Raises HostError SF-SGLANG-MISSING."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError as error:
        raise HostError(
            "SF-SGLANG-MISSING",
            f"SGLang is not installed for {sys.executable}: scripts/setup.sh sglang on a CPU, "
            "pip install 'specfleet[capture,sglang]' on a host with a GPU",
        ) from error


def functions_of(version: str) -> tuple[Function, ...]:
    """The tested functions. Raises HostError SF-SGLANG-VERSION for a version that is not in the table."""
    if version not in TESTED:
        raise HostError(
            "SF-SGLANG-VERSION", f"SGLang {version} is not a version this plugin was tested with: {', '.join(TESTED)}"
        )
    return TESTED[version]


def compare(root: Path, functions: tuple[Function, ...]) -> list[Row]:
    """The installed sources under `root` (the package's `srt` directory) against the tested ones."""
    rows = []
    for function in functions:
        found = measure(root, function.place)
        rows.append(Row(function.place, _describe(function), "absent" if found is None else _describe(found)))
    return rows


def measure(root: Path, place: str) -> Function | None:
    """The function as it is installed; None when the file or the function is not there."""
    path, _, name = place.partition(":")
    try:
        text = (root / path).read_text()
    except FileNotFoundError:
        return None
    node: ast.AST = ast.parse(text)
    for part in name.split("."):
        found = [child for child in ast.iter_child_nodes(node) if getattr(child, "name", None) == part]
        if not found:
            return None
        node = found[-1]
    assert isinstance(node, ast.FunctionDef)
    source = textwrap.dedent(ast.get_source_segment(text, node, padded=True) or "")
    return Function(place, ast.unparse(node.args), hashlib.sha256(source.encode()).hexdigest()[:16])


def _describe(function: Function) -> str:
    return f"({function.parameters}) {function.digest}"


def source_root() -> Path:
    """Where the installed SGLang's `srt` lies; finds it without importing it."""
    spec = importlib.util.find_spec(DISTRIBUTION)
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "srt"


def report() -> list[Row]:
    """Version, entry point and functions of this interpreter's SGLang. Raises HostError SF-SGLANG-MISSING."""
    version = installed_version()
    tested = version if version in TESTED else " or ".join(TESTED)
    entry_points = [point.name for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)]
    return [
        Row("sglang", tested, version),
        Row(f"entry point {ENTRY_POINT_GROUP}", "specfleet", "specfleet" if "specfleet" in entry_points else "absent"),
        *compare(source_root(), TESTED.get(version, ())),
    ]


def check_installed() -> str:
    """The version. Raises HostError SF-SGLANG-VERSION or SF-SGLANG-SOURCE unless everything is as tested."""
    version = installed_version()
    wrong = [row for row in compare(source_root(), functions_of(version)) if not row.ok]
    if wrong:
        raise HostError(
            "SF-SGLANG-SOURCE",
            f"SGLang {version} was changed: {'; '.join(f'{row.symbol} is {row.found}' for row in wrong)}. Install the "
            "release as it is; specctl capture verify-engine shows the whole table",
        )
    return version


if __name__ == "__main__":
    try:
        print(json.dumps([{**asdict(row), "ok": row.ok} for row in report()]))
    except SpecfleetError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
