"""The latest collectives of this process, from torch's flight recorder.

After a rank was lost, the files of the others say which collective each of them was in.
"""

# pyright: basic, reportPrivateImportUsage=false
from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

_SIZE = "TORCH_FR_BUFFER_SIZE"
_NUM_RECORDED = 1000


def record_collectives() -> None:
    """Record the collectives of this process; to be called before it joins a process group."""
    os.environ.setdefault(_SIZE, str(_NUM_RECORDED))


def write_collectives(path: Path) -> str:
    """Write the latest collectives as JSON; return the last one in words, "" if there is none."""
    from torch._C._distributed_c10d import _dump_fr_trace_json  # pyright: ignore

    content = _dump_fr_trace_json(True, False)
    entries = msgspec.json.decode(content).get("entries", [])
    if not entries:
        return ""
    with suppress(OSError):  # the error that led here matters more
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return describe(entries[-1])


def describe(entry: dict[str, Any]) -> str:
    """Return a recorded collective in words.

    >>> describe({"profiling_name": "gloo:all_gather", "collective_seq_id": 9,
    ...           "input_sizes": [[4, 2]], "input_dtypes": ["Float"]})
    'all_gather 9 of [4, 2] Float'
    """
    name = str(entry["profiling_name"]).rpartition(":")[2]
    sizes, dtypes = entry.get("input_sizes") or [[]], entry.get("input_dtypes") or [""]
    return f"{name} {entry['collective_seq_id']} of {sizes[0]} {dtypes[0]}".rstrip()
