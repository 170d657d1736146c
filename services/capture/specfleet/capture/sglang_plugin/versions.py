"""Is the installed SGLang one that the plugin was tested with (releases.py)? Imports no SGLang.

A function counts as the tested one when its signature and its source text are. `python -m
specfleet.capture.sglang_plugin.versions`, run by the server's interpreter, prints the comparison as JSON (`specctl capture
verify-engine`).
"""

import ast
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import sys
import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path

from specfleet.capture.sglang_plugin.releases import TESTED, Function
from specfleet.contracts.errors import HostError, SpecfleetError
from specfleet.sglang import patch

DISTRIBUTION = "sglang"
ENTRY_POINT_GROUP = "sglang.srt.plugins"


@dataclass(frozen=True)
class Row:
    """One line of the comparison."""

    symbol: str
    expected: str
    found: str

    @property
    def ok(self) -> bool:
        return self.expected == self.found


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
    return [
        Row("sglang", tested, version),
        Row(f"entry point {ENTRY_POINT_GROUP} or patch", "specfleet", "specfleet" if _called() else "absent"),
        *compare(source_root(), TESTED.get(version, ())),
    ]


def _called() -> bool:
    """Whether SGLang calls the plugin when it starts."""
    if "specfleet" in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP).names:
        return True
    with contextlib.suppress(HostError):  # a file that is neither stock nor patched
        return patch.is_patched(source_root().parent)
    return False


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
