"""Versions of a model: the name that an answer gives to the weights and settings that made it.

    smollm2@3f9c2a71       directory@digest

The digest is that of the files of the directory and of the settings that change what is computed.
It does not depend on the machine or on the path. Of a large file its size and 4 MiB spread over it
are read: a model that was trained further differs everywhere.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DIGITS = 8
_SUFFIXES = (".safetensors", ".json", ".jinja", ".model", ".txt", ".pt2")
_BLOCK = 1 << 12
_NUM_BLOCKS = 1 << 10
_digests: dict[tuple[str, int, int], bytes] = {}
"""Of files, by path, size and time of modification."""


def version_of(directory: Path, settings: Mapping[str, Any]) -> str:
    """Return the version of a model directory that is served with these settings.

    >>> import tempfile
    >>> directory = Path(tempfile.mkdtemp()) / "tiny"
    >>> directory.mkdir()
    >>> version_of(directory, {}), version_of(directory, {"kv_cache_dtype": "int8"})
    ('tiny@44136fa3', 'tiny@128bc6e3')
    """
    digest = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        if path.suffix in _SUFFIXES and path.is_file():
            digest.update(path.name.encode() + b"\0" + _file_digest(path))
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    name = re.sub(r"[^\w.-]", "_", directory.resolve().name, flags=re.ASCII)  # it becomes a header
    return f"{name}@{digest.hexdigest()[:DIGITS]}"


def _file_digest(path: Path) -> bytes:
    status = path.stat()
    key = (str(path), status.st_size, status.st_mtime_ns)
    if key not in _digests:
        digest = hashlib.sha256(status.st_size.to_bytes(8))
        stride = max(_BLOCK, status.st_size // _NUM_BLOCKS)
        with path.open("rb") as file:
            for start in range(0, status.st_size, stride):
                file.seek(start)
                digest.update(file.read(_BLOCK))
        _digests[key] = digest.digest()
    return _digests[key]
