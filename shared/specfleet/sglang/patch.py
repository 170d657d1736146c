"""The capture plugin as a literal patch, for images in which SGLang finds no entry points: specfleet on a mounted path, say.

One file of SGLang gets a few lines that call the plugin's entry, and do nothing unless SPECFLEET_CAPTURE is set. That file is
the same, byte for byte, in every tested release, so there is one patch; a file with any other content is left alone.
"""

import difflib
import hashlib
import os
import shutil
from pathlib import Path

from specfleet.contracts.errors import HostError

VERSION = 1
RELEASES = ("0.5.14", "0.5.17", "0.5.23")
FILE = "srt/plugins/__init__.py"
"""Of the package `sglang`."""
STOCK = "3a975a73f1a7887e68c81ea7a2530250597ac8ae978efc0b0f70f038a99a3164"
PATCHED = "d1875519256bae55443db1f9ad595c014c99cab02870ed9c1285ab052a4d9033"
"""sha256 of the file before and after."""

_AFTER = "    _plugins_loaded = True\n"
_CALL = """\
    import os

    if os.environ.get("SPECFLEET_CAPTURE"):
        from specfleet.capture.sglang_plugin import activate

        activate()
"""


def is_patched(package: Path) -> bool:
    """Whether the SGLang in `package` (the directory `sglang`) is patched. Raises HostError SF-SGLANG-PATCH for other content."""
    return _state(package / FILE) == PATCHED


def apply(package: Path) -> bool:
    """False when it was patched already. Raises HostError SF-SGLANG-PATCH."""
    return _turn(package / FILE, PATCHED)


def revert(package: Path) -> bool:
    """False when there was nothing to revert. Raises HostError SF-SGLANG-PATCH."""
    return _turn(package / FILE, STOCK)


def unified_diff(package: Path) -> str:
    """For `patch -p1` or `git apply` where `sglang` lies (site-packages), whichever state it is in. Raises as is_patched."""
    path = package / FILE
    _state(path)
    text = path.read_text()
    name = f"sglang/{FILE}"
    head = (
        f"specfleet capture patch {VERSION} for SGLang {', '.join(RELEASES)}\n"
        f"{name}: sha256 before {STOCK}\n{name}: sha256 after  {PATCHED}\n\n"
    )
    before, after = (_content(text, state).splitlines(keepends=True) for state in (STOCK, PATCHED))
    return head + "".join(difflib.unified_diff(before, after, f"a/{name}", f"b/{name}"))


def _turn(path: Path, wanted: str) -> bool:
    if _state(path) == wanted:
        return False
    beside = path.with_name(f"{path.name}.specfleet")
    try:
        beside.write_text(_content(path.read_text(), wanted))
        shutil.copymode(path, beside)
        os.replace(beside, path)
    except OSError as error:
        raise HostError("SF-SGLANG-PATCH", f"{path} cannot be written: {error}") from error
    return True


def _content(text: str, state: str) -> str:
    """The file in the wanted state, from its text in either."""
    stock = text.replace(_AFTER + _CALL, _AFTER)
    return stock if state == STOCK else stock.replace(_AFTER, _AFTER + _CALL)


def _state(path: Path) -> str:
    try:
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise HostError(
            "SF-SGLANG-PATCH", f"{path} cannot be read: {error}. Name the directory of the package sglang"
        ) from error
    if found not in (STOCK, PATCHED):
        raise HostError(
            "SF-SGLANG-PATCH",
            f"{path} has sha256 {found}, neither {STOCK} (SGLang {', '.join(RELEASES)}) nor {PATCHED} (patched): it is another "
            "release or was changed, and is left as it is",
        )
    return found
