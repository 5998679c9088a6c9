"""A training step beside what one would write instead: the same weights and batches, in one run.

    rows = compare(CONTENDERS, directory, Task(batch=4, length=512, rounds=5), peaks())

**Contenders** are those of `ingot.bench.trainee`, and ingot in float32, with activations that are
computed again and with AdamW's moments in bfloat16. One that is not installed or fails has a row
that says why; so has one whose losses are not the first contender's to a hundredth: it computes
something else.

**Turns.** In each round every contender has a process of its own, one after another, so that all
meet the same neighbours and none takes memory from another. It makes two steps that do not count
and three that do. Their order is another in each round: who came after float32, which leaves AMX
alone, was a quarter faster than it is. Speeds are p20, p50 and p80 of the steps of all rounds;
ratios are taken of a round's medians.

**Memory** is what the process has at most in these steps, libraries included, as the system
counts it. Without what it holds between two steps (weights, the optimizer's state, libraries), it
is what the step itself takes: activations, gradients and temporaries. Activations alone are what
is allocated between forward and backward (glibc tells).

**The limit** is the matmul peak of the machine in the contender's dtype, over 6 N FLOPs a token:
two for each of N parameters forward, four backward. Attention is left out.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from typing import Annotated, Any

import msgspec
import numpy as np

from ingot.bench.peaks import Peaks
from ingot.bench.trainee import NEEDS
from ingot.core import paths
from ingot.core.config import check_bounds
from ingot.core.errors import ConfigError
from ingot.interop import hf

STEPS = 3
_OFF = 0.01
_TIMEOUT = 1800.0

_Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e6)]
_Bytes = Annotated[int, msgspec.Meta(gt=0, le=2**50)]


@dataclass(frozen=True, kw_only=True)
class Contender:
    """Who takes part.

    >>> Contender(system="ingot", recompute="full", moments="bf16").name
    'ingot bf16 recompute full, moments bf16'
    """

    system: str
    precision: str = "bf16"
    recompute: str = "none"
    moments: str = "fp32"
    """The dtype of AdamW's."""

    @property
    def name(self) -> str:
        """What it is called in a list."""
        return f"{self.system} {self.precision} {options(self.recompute, self.moments)}".strip()

    def missing(self) -> str | None:
        """Why it cannot take part, if that can be known before."""
        for package in NEEDS.get(self.system, ()):
            if importlib.util.find_spec(package) is None:
                return f"{package} is not installed: pip install {package}"
        return None


def options(recompute: str, moments: str) -> str:
    """What is not as it comes; nothing if all is.

    >>> options("full", "fp32")
    'recompute full'
    """
    again = [f"recompute {recompute}"] * (recompute != "none")
    return ", ".join(again + [f"moments {moments}"] * (moments != "fp32"))


OURS = Contender(system="ingot")
FP32 = Contender(system="ingot", precision="fp32")
CONTENDERS = (
    OURS,
    Contender(system="eager"),
    Contender(system="compile"),
    Contender(system="trainer"),
    FP32,
    Contender(system="ingot", recompute="selective"),
    Contender(system="ingot", recompute="full"),
    Contender(system="ingot", moments="bf16"),
    Contender(system="ingot", recompute="full", moments="bf16"),
)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a step is, and how often there is a turn.

    >>> Task(rounds=0)
    Traceback (most recent call last):
    ...
    ingot.core.errors.ConfigError: rounds of Task is 0
      hint: give a number from 1 to 1000
    """

    batch: int = 4
    length: int = 512
    rounds: int = 5

    def __post_init__(self) -> None:
        check_bounds(self, batch=(1, 2**16), length=(2, 2**20), rounds=(1, 1000))

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.batch * self.length


class _Step(msgspec.Struct, frozen=True):
    forward: _Seconds
    backward: _Seconds
    update: _Seconds

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.update


class Turn(msgspec.Struct, frozen=True):
    """What a process says of its steps."""

    version: str
    losses: list[float]
    steps: Annotated[list[_Step], msgspec.Meta(min_length=1)]
    resting: _Bytes
    activations: Annotated[int, msgspec.Meta(ge=0, le=2**50)]
    peak: _Bytes


@dataclass(frozen=True, kw_only=True)
class Row:
    """One contender; without figures if it is missing."""

    system: str
    precision: str
    recompute: str
    moments: str
    version: str | None = None
    model: str
    batch: int
    length: int
    rounds: int
    tokens_per_s: float | None = None
    p20: float | None = None
    p80: float | None = None
    ingot_faster: float | None = None
    """How many times as fast ingot is (the first row) in the same round: p50 of the rounds."""
    forward_s: float | None = None
    backward_s: float | None = None
    update_s: float | None = None
    """Clipping and the optimizer."""
    peak_memory_bytes: int | None = None
    step_memory_bytes: int | None = None
    """Of it, what is not held between two steps."""
    activation_memory_bytes: int | None = None
    """What the forward leaves for the backward."""
    limit_tokens_per_s: float | None = None
    share_of_limit: float | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    missing: str | None = None


@dataclass
class Turns:
    """What one contender did, a turn a round, or why not."""

    turns: list[Turn] = field(default_factory=list[Turn])
    missing: str | None = None


class Failure(Exception):
    """Why a process has nothing to say."""


def compare(
    contenders: Sequence[Contender],
    directory: Path,
    task: Task,
    machine: Peaks,
    advance: Callable[[str], object] = lambda _: None,
) -> list[Row]:
    """Let them take turns on the model of a directory; `advance` hears of each turn before it."""
    found = hf.describe(directory)
    if task.length > found.config.max_seq_len:
        raise ConfigError(
            f"{task.length} tokens are beyond the model's {found.config.max_seq_len}",
            hint="choose a smaller --length",
        )
    turns = {contender: Turns(missing=contender.missing()) for contender in contenders}
    logs = paths.ensure_trusted(paths.cache("bench-train"))
    for number in range(task.rounds):
        for contender, of in Random(number).sample(list(turns.items()), len(turns)):
            advance(f"round {number + 1} of {task.rounds}: {contender.name}")
            if of.missing:
                continue
            try:
                of.turns.append(_turn(contender, directory, task, logs))
            except Failure as failure:
                of.missing = str(failure)
    return rows(turns, directory.name, found.parameters, task, machine)


def _turn(contender: Contender, directory: Path, task: Task, logs: Path) -> Turn:
    log = logs / f"{contender.name.replace(' ', '-')}.log"
    with tempfile.TemporaryDirectory() as folder, log.open("w") as stderr:
        asked = {
            "system": contender.system,
            "precision": contender.precision,
            "recompute": contender.recompute,
            "moments": contender.moments,
            "model": str(directory.resolve()),
            "batch": task.batch,
            "length": task.length,
            "steps": STEPS,
            "folder": folder,
        }
        command = [sys.executable, "-m", "ingot.bench.trainee", json.dumps(asked)]
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                env=_variables(contender),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                timeout=_TIMEOUT,
            )
        except subprocess.TimeoutExpired:
            raise Failure(f"no answer within {_TIMEOUT:g} s (see {log})") from None
    if done.returncode:
        raise Failure(_death(done.returncode, log))
    try:
        return msgspec.json.decode(done.stdout, type=Turn)
    except msgspec.DecodeError as error:
        raise Failure(f"what it says cannot be read: {error}") from None


def _variables(contender: Contender) -> dict[str, str]:
    """The child imports the ingot that is running now. What `ingot.cli` sets for our own threads is
    not for others: they are as they come."""
    known = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    if contender.system != OURS.system:
        known.pop("GOMP_SPINCOUNT", None)
    return known


def _death(status: int, log: Path) -> str:
    how = f"exited with {status}" if status > 0 else f"died of {signal.Signals(-status).name}"
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    last = next((line for line in reversed(lines) if line), "it said nothing")
    return f"{how}: {last[:300]} (see {log})"


def rows(
    turns: Mapping[Contender, Turns], model: str, parameters: int, task: Task, machine: Peaks
) -> list[Row]:
    """Sum up, a row a contender, in the order given."""
    first = next((of for of in turns.values() if of.turns and not of.missing), None)
    ours = turns.get(OURS)
    found: list[Row] = []
    for contender, of in turns.items():
        shared: dict[str, Any] = {
            "system": contender.system,
            "precision": contender.precision,
            "recompute": contender.recompute,
            "moments": contender.moments,
            "model": model,
            "batch": task.batch,
            "length": task.length,
            "rounds": task.rounds,
        }
        missing = of.missing or (first and _other_losses(of, first))
        if missing or first is None:
            found.append(Row(**shared, missing=missing or "no turn"))
            continue
        beside = ours if ours and ours.turns and not ours.missing else None
        figures = _figures(of, beside, task)
        peak = machine.matmul["bf16" if contender.precision == "bf16" else "fp32"]
        if peak:
            limit = peak.value * 1e9 / (6 * parameters)
            share = figures["tokens_per_s"] / limit
            figures |= {"limit_tokens_per_s": _short(limit), "share_of_limit": _short(share)}
        found.append(Row(**shared, **figures))
    return found


def _other_losses(of: Turns, first: Turns) -> str | None:
    for mine, theirs in zip(of.turns, first.turns, strict=False):
        pairs = zip(mine.losses, theirs.losses, strict=False)
        for number, (a, b) in enumerate(pairs):
            if not abs(a - b) <= _OFF * abs(b):  # NaN is not
                return f"its loss at step {number + 1} is {a:.4g}, the first system's {b:.4g}"
    return None


def _figures(of: Turns, ours: Turns | None, task: Task) -> dict[str, Any]:
    steps = [step for turn in of.turns for step in turn.steps]
    low, usual, high = np.quantile([task.tokens / s.total for s in steps], (0.2, 0.5, 0.8)).tolist()
    return {
        "version": of.turns[-1].version,
        "tokens_per_s": _short(usual),
        "p20": _short(low),
        "p80": _short(high),
        "ingot_faster": ours and _short(median(_ratios(of, ours))),
        "forward_s": _short(median(step.forward for step in steps)),
        "backward_s": _short(median(step.backward for step in steps)),
        "update_s": _short(median(step.update for step in steps)),
        "peak_memory_bytes": int(median(turn.peak for turn in of.turns)),
        "step_memory_bytes": int(median(turn.peak - turn.resting for turn in of.turns)),
        "activation_memory_bytes": int(median(turn.activations for turn in of.turns)),
        "first_loss": of.turns[0].losses[0],
        "last_loss": of.turns[0].losses[-1],
    }


def _ratios(of: Turns, ours: Turns) -> Iterable[float]:
    """How long theirs took over how long ours took, round by round."""
    for theirs, mine in zip(of.turns, ours.turns, strict=True):
        yield median(s.total for s in theirs.steps) / median(s.total for s in mine.steps)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What the rows say together; None where one of them is missing."""

    best_peer: str | None
    """Of the others, the one with the most tokens a second."""
    faster: float | None
    """How many times as fast ingot is as that one, in the same rounds."""
    memory: float | None
    """ingot's peak over that one's."""
    backward_over_forward: float | None
    bf16_over_fp32: float | None
    options: dict[str, dict[str, float | None]]
    """Of ingot with other options: the share of the activations, of the step's own memory and of
    the peak that each saves, how many times as long a step takes, and how it then compares with
    the best peer."""


def summary(found: Sequence[Row]) -> Summary:
    """Draw the conclusions."""
    there = [row for row in found if not row.missing]
    mine = {
        (row.precision, options(row.recompute, row.moments)): row
        for row in there
        if row.system == OURS.system
    }
    ours, fp32 = mine.get((OURS.precision, "")), mine.get((FP32.precision, ""))
    peers = [row for row in there if row.system != OURS.system]
    best = max(peers, key=lambda row: row.tokens_per_s or 0.0, default=None)
    others = {name: row for (_, name), row in mine.items() if name}
    return Summary(
        best_peer=best and best.system,
        faster=best and best.ingot_faster,
        memory=_ratio(ours, best, "peak_memory_bytes"),
        backward_over_forward=ours and _short((ours.backward_s or 0) / (ours.forward_s or 1)),
        bf16_over_fp32=fp32 and fp32.ingot_faster,
        options={name: _saved(row, ours, best) for name, row in others.items()} if ours else {},
    )


def _saved(row: Row, ours: Row, best: Row | None) -> dict[str, float | None]:
    names = ("activation_memory", "step_memory", "peak_memory")
    saved = {f"{n}_saved": _short(1 - (_ratio(row, ours, f"{n}_bytes") or 1)) for n in names}
    return {
        **saved,
        "time": row.ingot_faster,
        "faster": _ratio(best, row, "ingot_faster"),
        "memory": _ratio(row, best, "peak_memory_bytes"),
    }


def _ratio(row: Row | None, other: Row | None, name: str) -> float | None:
    if row is None or other is None:
        return None
    return _short((getattr(row, name) or 0) / (getattr(other, name) or 1))


def _short(value: float) -> float:
    """Four digits: more are noise."""
    return float(f"{value:.4g}")
