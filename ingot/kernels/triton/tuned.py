"""Which configuration a launch gets: tuned on this GPU, or the target's default, or the first.

Tuned ones are in SQLite, written by whoever has timed them: a row is the fastest for a kernel's
source, its constants and shape bucket, a dtype and a device. Another source is another key, so what
was tuned for a kernel that has changed since is not found. Defaults are in `defaults.json`, chosen
from the compiled code by `ingot kernels --defaults`.

The number of rows is in no key: a row's bits depend on the configuration.
"""

# pyright: basic
from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

import torch

from ingot.core import paths
from ingot.kernels.triton import interpreting
from ingot.kernels.triton.kernel import Config, Launch
from ingot.kernels.triton.target import TARGETS, Target, nearest

DEFAULTS = Path(__file__).parent / "defaults.json"
_SCHEMA = """create table if not exists tuned (
    kernel text, source text, bucket text, dtype text, device text,
    config text not null, microseconds real not null,
    primary key (kernel, source, bucket, dtype, device)
)"""
chosen: dict[Any, Config] = {}
"""By `key`: what launches of this process have got."""


def choose(launch: Launch) -> Config:
    """The configuration for a launch on the device of its tensors."""
    name = key(launch)
    found = chosen.get(name)
    if found is None:
        target, device = here()
        found = tuned(launch, device, target) or default(launch, target.name)
        chosen[name] = found
    return found


def key(launch: Launch) -> tuple[str, tuple[Any, ...], str]:
    """What dispatch knows of a launch: those with the same key get the same configuration."""
    return launch.kernel.name, launch.bucket, _dtype(launch)


@cache
def here() -> tuple[Target, str]:
    """The target of this process and its device's name; while interpreting, one that stands in."""
    if interpreting():
        return TARGETS["sm_90"], "interpreter"
    return nearest(capability()), torch.cuda.get_device_properties(torch.cuda.current_device()).name


@cache
def capability() -> str:
    """The architecture of this process's device: "sm_90", "gfx942"."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    if torch.version.hip:
        return properties.gcnArchName.partition(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def default(launch: Launch, target: str) -> Config:
    """The best of the target's defaults that is in the launch's own space, else the first there."""
    configs = {str(config): config for config in launch.configs(TARGETS[target])}
    wanted = defaults().get(launch.kernel.name, {}).get(target, [])
    return next((configs[name] for name in wanted if name in configs), next(iter(configs.values())))


@cache
def defaults() -> dict[str, dict[str, list[str]]]:
    """By kernel and target: configurations, best first."""
    return json.loads(DEFAULTS.read_text()) if DEFAULTS.exists() else {}


def store() -> Path:
    """Where tuned configurations are kept."""
    return paths.cache("tuned.db")


def keep(launch: Launch, device: str, config: Config, microseconds: float) -> None:
    """Remember the fastest configuration of a launch on a device."""
    store().parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(store(), timeout=60)) as database, database:
        database.execute(_SCHEMA)
        database.execute(
            "insert or replace into tuned values (?, ?, ?, ?, ?, ?, ?)",
            (*_key(launch, device), str(config), microseconds),
        )
    chosen.pop(key(launch), None)


def tuned(launch: Launch, device: str, target: Target) -> Config | None:
    """The remembered configuration, if there is one that fits still."""
    if not store().exists():
        return None
    try:
        with closing(sqlite3.connect(f"file:{store()}?mode=ro", uri=True, timeout=60)) as database:
            row = database.execute(
                "select config from tuned where "
                "kernel = ? and source = ? and bucket = ? and dtype = ? and device = ?",
                _key(launch, device),
            ).fetchone()
    except sqlite3.Error:  # damaged, or of another kind: what is slow is still right
        return None
    return next((c for c in launch.configs(target) if row and str(c) == row[0]), None)


def _key(launch: Launch, device: str) -> tuple[str, str, str, str, str]:
    source = getattr(launch.kernel.function, "cache_key", "")
    return launch.kernel.name, source, repr(launch.bucket), _dtype(launch), device


def _dtype(launch: Launch) -> str:
    tensors = (arg for arg in launch.args if isinstance(arg, torch.Tensor))
    return str(next(tensors).dtype).removeprefix("torch.")


def ranked(facts: Iterable[Any]) -> dict[str, dict[str, list[str]]]:
    """For each kernel and target its configurations, best first, from compiled facts; those with a
    fault in any launch are left out.

    Products: the tile with the most arithmetic for what it loads, but 128 columns at most, then the
    most warps resident. A row alone has a program for each tile of columns, and takes the same tile
    as thousands: with 256, the 4096 columns of a usual weight are 16 programs on a hundred units.
    All else: the most bits of loads in flight on a unit.
    """
    from ingot.kernels.triton.gate import faults

    scores: dict[tuple[str, str], dict[str, float]] = {}
    for fact in facts:
        known = scores.setdefault((fact.kernel, fact.target), {})
        score = -inf if faults(fact) else _score(fact)
        known[fact.config] = min(score, known.get(fact.config, inf))
    result: dict[str, dict[str, list[str]]] = {}
    for (kernel, target), known in sorted(scores.items()):
        right = [config for config in known if known[config] > -inf]
        result.setdefault(kernel, {})[target] = sorted(right, key=known.__getitem__, reverse=True)
    return result


def _score(fact: Any) -> float:
    tile = dict(pair.split("=") for pair in fact.config.split())
    if fact.bound == "tensor cores":
        rows, columns = int(tile["ROWS"]), int(tile.get("COLUMNS") or tile["KEYS"])
        return min(rows * columns / (rows + columns), 64) + fact.occupancy
    in_flight = sum(bits * count for bits, count in fact.code.loads.items())
    resident = fact.occupancy * TARGETS[fact.target].warps * TARGETS[fact.target].lanes
    return min(in_flight, 512) * resident
