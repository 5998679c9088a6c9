"""Keeps the outcomes of proofs, so that another process need not prove the same graph again.

An outcome is kept under a hash of all that it depends on but the values of the inputs: the graph,
the rewrites, shapes and dtypes, the sources of ingot, the versions of torch and of the machine. The
files are in Inductor's cache directory, where the code that it compiled from the graph is, and are
ignored where its caches are disabled.
"""

# pyright: basic
from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, fx

import ingot.fuse
from ingot.core.device import detect
from ingot.core.errors import IngotError
from ingot.core.paths import write_atomic
from ingot.fuse.graph import value_of
from ingot.fuse.rewrite import Applied
from ingot.fuse.work import hint

MAX_FILES, MAX_DAYS = 500, 30
"""Older files, and those beyond this number, are deleted."""
_SOURCES = "fuse/*.py", "ops/*.py", "kernels/cpu/*.*"


class Outcome(msgspec.Struct, frozen=True):
    """What a proof found out about a rewrite."""

    error: float | None
    dropped: str | None


def key_of(graph: fx.Graph, applied: Iterable[Applied], training: bool) -> str:
    """Return the hash of what a proof depends on."""
    described: list[Any] = [_versions(), torch.get_num_threads(), training, str(graph)]
    for rewrite in applied:
        described += [rewrite.rewrite.name, rewrite.before.code, rewrite.after.code]
        described += [_describe(node) for node in rewrite.inputs]
    return hashlib.sha256(repr(described).encode()).hexdigest()


def load(key: str, count: int) -> Sequence[Outcome] | None:
    """Return the outcomes of the rewrites of a graph, None if they are not known."""
    path = _path(key)
    if path is None:
        return None
    try:
        found = msgspec.json.decode(path.read_bytes(), type=list[Outcome])
    except (OSError, msgspec.MsgspecError):
        return None
    return found if len(found) == count else None


def save(key: str, outcomes: Sequence[Outcome]) -> None:
    """Keep the outcomes of the rewrites of a graph."""
    path = _path(key)
    if path is not None:
        with suppress(IngotError):  # otherwise the next process proves again
            write_atomic(path, msgspec.json.encode(outcomes))
            _delete_old(path.parent)


def _path(key: str) -> Path | None:
    from torch._inductor import config
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    if config.force_disable_caches:
        return None
    return Path(cache_dir()) / "ingot" / f"{key}.json"


def _delete_old(directory: Path) -> None:
    def age(path: Path) -> float:
        with suppress(OSError):  # another process deleted it
            return time.time() - path.stat().st_mtime
        return float("inf")

    ages = sorted((age(path), path) for path in directory.glob("*.json"))
    for i, (seconds, path) in enumerate(ages):
        if i >= MAX_FILES or seconds > MAX_DAYS * 24 * 3600:
            path.unlink(missing_ok=True)


def _describe(node: fx.Node) -> Any:
    value = value_of(node)
    if not isinstance(value, Tensor):
        return str(value)
    sizes = [[hint(size) for size in sizes] for sizes in (value.shape, value.stride())]
    return sizes, str(value.dtype), value.requires_grad


@cache
def _versions() -> str:
    """Return the versions of torch, of the machine and of the sources."""
    package = Path(ingot.fuse.__file__).parent.parent
    files = sorted(path for pattern in _SOURCES for path in package.glob(pattern))
    code = hashlib.sha256()
    for path in files:
        code.update(f"{path.name}\n".encode() + path.read_bytes())
    return f"{torch.__version__} {detect().fingerprint} {code.hexdigest()}"
