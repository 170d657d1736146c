"""The header of a safetensors file: names, dtypes, shapes and byte ranges of its tensors, without torch."""

import json
import struct
from pathlib import Path
from typing import Any

_LENGTH_BYTES = 8


def read_header(path: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """(tensor name → {dtype, shape, data_offsets}, position in the file that data_offsets count from).

    Raises OSError, or ValueError when the file does not begin with such a header.
    """
    with path.open("rb") as file:
        prefix = file.read(_LENGTH_BYTES)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == _LENGTH_BYTES else 0
        if not 0 < length <= path.stat().st_size - _LENGTH_BYTES:
            raise ValueError(f"a header of {length} bytes does not fit the file's {path.stat().st_size}")
        header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    return {name: entry for name, entry in header.items() if name != "__metadata__"}, _LENGTH_BYTES + length
