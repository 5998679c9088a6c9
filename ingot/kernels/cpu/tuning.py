"""Thresholds and distances of the CPU kernels that depend on the machine, and their values here.

    values()                       # what the kernels use now
    with use({"pack_rows": 16}):   # others, for all libraries and threads at once
        ...

None of them changes a bit of a result. `ingot tune --device cpu` searches these spaces and stores
what is faster; the next process finds it by the CPU, its caches and its cores. `tunables.h` has the
same names in the same order.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec

from ingot.core.device import detect
from ingot.kernels import tuned

NEVER = 1 << 30


@dataclass(frozen=True)
class Tunable:
    """A parameter and the values that are worth trying, in order."""

    name: str
    group: str
    default: int
    choices: tuple[int, ...]
    meaning: str
    tiers: tuple[str, ...] = ()
    """Tiers that have it; all if empty."""


TUNABLES = (
    Tunable(
        "pack_rows", "matmul", 12, (4, 8, 12, 16, 24, 33), "rows of a block that pay for packing x"
    ),
    Tunable(
        "pack_channels", "matmul", 3072, (1024, 2048, 3072, 6144), "most channels of a packed x"
    ),
    Tunable("pack_depth", "matmul", 576, (192, 288, 576, 1152), "channels of a panel in L1"),
    Tunable(
        "lane_rows",
        "matmul",
        512,
        (128, 256, 512, 1024, NEVER),
        "rows from which columns are in the lanes",
    ),
    Tunable("lane_terms", "matmul", 128, (32, 64, 128, 256), "most terms of a lane"),
    Tunable(
        "amx_rows",
        "matmul",
        512,
        (64, 128, 256, 512, 1024),
        "rows from which weights are packed",
        ("amx",),
    ),
    Tunable("amx_depth", "matmul", 768, (384, 768, 1536, 3072), "channels of a block", ("amx",)),
    Tunable(
        "int_prefetch", "quantized", 4096, (512, 1024, 2048, 4096, 8192), "bytes of codes ahead"
    ),
    Tunable("int_scale_prefetch", "quantized", 24, (4, 8, 16, 24, 48), "groups of scales ahead"),
    Tunable(
        "task_elements", "tasks", 16384, (4096, 8192, 16384, 32768, 65536), "least work of a task"
    ),
    Tunable("tasks_per_thread", "tasks", 4, (1, 2, 4, 8), "tasks of a call, per thread"),
)
GROUPS = tuple(dict.fromkeys(each.group for each in TUNABLES))
_MEMORY = (ctypes.c_int64 * len(TUNABLES))(*(each.default for each in TUNABLES))
_VERSION = "1"  # of what the values mean


def defaults() -> dict[str, int]:
    """Return the values that ship."""
    return {each.name: each.default for each in TUNABLES}


def values() -> dict[str, int]:
    """Return the values that the kernels use."""
    return {each.name: value for each, value in zip(TUNABLES, memory(), strict=True)}


def space(group: str) -> list[Tunable]:
    """Return the parameters of a group that this CPU's kernels have."""
    tier = detect().cpu.isa[0]
    return [each for each in TUNABLES if each.group == group and tier in (each.tiers or (tier,))]


def memory() -> Any:
    """Return the memory that the kernels read; what was stored for this machine is loaded first."""
    _load_stored()
    return _MEMORY


@contextmanager
def use(chosen: Mapping[str, int]) -> Generator[None]:
    """Let the kernels use other values for a while."""
    before = values()
    put(chosen)
    try:
        yield
    finally:
        put(before)


def put(chosen: Mapping[str, int]) -> None:
    """Let the kernels use these values from now on; others stay."""
    current = memory()
    for index, each in enumerate(TUNABLES):
        current[index] = chosen.get(each.name, current[index])


def save(group: str, chosen: Mapping[str, int], speedup: float) -> None:
    """Store the values of a group for CPUs like this one."""
    tuned.save(_key(group), json.dumps(dict(chosen)), speedup)


def stored(group: str) -> dict[str, int]:
    """Return the stored values of a group, without any that are not in its space."""
    return _checked(group, tuned.load(_key(group)) or "{}")


def stored_elsewhere(group: str) -> list[dict[str, int]]:
    """Return those that were imported from other CPUs of this tier."""
    return [_checked(group, config) for config in tuned.load_elsewhere(_key(group))]


def _checked(group: str, config: str) -> dict[str, int]:
    try:
        found = msgspec.json.decode(config, type=dict[str, int])
    except ValueError:
        return {}
    return {t.name: found[t.name] for t in space(group) if found.get(t.name) in t.choices}


@cache
def _load_stored() -> None:
    chosen = {name: value for group in GROUPS for name, value in stored(group).items()}
    for index, each in enumerate(TUNABLES):
        _MEMORY[index] = chosen.get(each.name, each.default)


def _key(group: str) -> tuned.Key:
    cpu = detect().cpu
    device = json.dumps([cpu.name, cpu.cores, cpu.l1d, cpu.l2, cpu.l3])
    return tuned.Key(f"cpu.{group}", _VERSION, "", cpu.isa[0], device)
