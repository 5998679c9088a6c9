"""Compares a training step with other systems: the same weights and batches, in one run.

    rows = compare(SYSTEMS, directory, TrainTask(batch_size=4, seq_len=512, rounds=5), peaks())

**Systems** are those of `ingot.bench.train_worker`, and ingot in float32, with activation
recomputation and with AdamW's state in bfloat16. PEFT is compared with ingot's LoRA of the same
precision, all others with its full fine-tuning. A system that is not installed or fails has a row
with the error; so has one whose losses differ by more than 2 % from those of the first system that
trains the same parameters, because it computes something else.

**Interleaving.** In each round every system runs in a new process, one after the other, so that all
see the same load and none takes memory from another. A process runs two warm-up steps and three
that count. The order changes in each round: the system that ran after float32, which does not use
AMX, was 25 % faster than otherwise. Speeds are p20, p50 and p80 of the steps of all rounds;
speedups are ratios of a round's medians.

**Memory** is the peak resident set size of the process in these steps, libraries included. Without
the memory held between two steps (weights, optimizer state, libraries), it is the memory of the
step itself: activations, gradients and temporaries. Activations alone are what is allocated between
forward and backward (as glibc counts it).

**Roofline**: the machine's matmul peak in the system's dtype, for bf16 at least that in float32,
over 6 N FLOPs per token: two for each of N parameters in the forward pass, four in the backward
pass. Attention is not counted.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from statistics import median
from typing import Annotated, Any

import msgspec
import numpy as np

from ingot.bench.peaks import Peaks
from ingot.bench.subprocess_system import SystemFailure, describe_exit
from ingot.bench.timing import round_measurement
from ingot.bench.train_worker import REQUIRED_PACKAGES
from ingot.core import paths
from ingot.core.config import check_bounds
from ingot.core.errors import ConfigError
from ingot.interop import hf

STEPS = 3
_LOSS_TOLERANCE = 0.02  # PEFT in bf16 differs by 1 % after three steps: it rounds the update
_TIMEOUT = 1800.0

_Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e6)]
_Bytes = Annotated[int, msgspec.Meta(gt=0, le=2**50)]


@dataclass(frozen=True, kw_only=True)
class TrainingSystem:
    """A system that takes part, with its options.

    >>> TrainingSystem(system="ingot", recompute="full", state_dtype="bf16").name
    'ingot bf16 recompute full, state bf16'
    """

    system: str
    precision: str = "bf16"
    recompute: str = "none"
    state_dtype: str = "fp32"
    """The dtype of AdamW's state."""

    @property
    def name(self) -> str:
        """Name and options, as shown in a list."""
        options = describe_options(self.recompute, self.state_dtype)
        return f"{self.system} {self.precision} {options}".strip()

    def unavailable_reason(self) -> str | None:
        """Return why it cannot take part, if that is known in advance."""
        for package in REQUIRED_PACKAGES.get(self.system, ()):
            if importlib.util.find_spec(package) is None:
                return f"{package} is not installed: pip install {package}"
        return None


def describe_options(recompute: str, state_dtype: str) -> str:
    """List the options that differ from the defaults.

    >>> describe_options("full", "fp32")
    'recompute full'
    """
    options = [f"recompute {recompute}"] * (recompute != "none")
    return ", ".join(options + [f"state {state_dtype}"] * (state_dtype != "fp32"))


OURS = TrainingSystem(system="ingot")
FP32 = TrainingSystem(system="ingot", precision="fp32")
LORA = TrainingSystem(system="lora")
PEFT = TrainingSystem(system="peft")
SYSTEMS = (
    OURS,
    TrainingSystem(system="eager"),
    TrainingSystem(system="compile"),
    TrainingSystem(system="trainer"),
    FP32,
    TrainingSystem(system="ingot", recompute="selective"),
    TrainingSystem(system="ingot", recompute="full"),
    TrainingSystem(system="ingot", state_dtype="bf16"),
    TrainingSystem(system="ingot", recompute="full", state_dtype="bf16"),
    LORA,
    PEFT,
    TrainingSystem(system="lora", precision="fp32"),
    TrainingSystem(system="peft", precision="fp32"),
)


@dataclass(frozen=True, kw_only=True)
class TrainTask:
    """The size of a step, and the number of rounds.

    >>> TrainTask(rounds=0)
    Traceback (most recent call last):
    ...
    ingot.core.errors.ConfigError: TrainTask.rounds: expected a number from 1 to 1000, got 0
      hint: give a number from 1 to 1000
    """

    batch_size: int = 4
    seq_len: int = 512
    rounds: int = 5

    def __post_init__(self) -> None:
        check_bounds(self, batch_size=(1, 2**16), seq_len=(2, 2**20), rounds=(1, 1000))

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.batch_size * self.seq_len


class StepSeconds(msgspec.Struct, frozen=True):
    """Seconds of the parts of a step."""

    forward: _Seconds
    backward: _Seconds
    optimizer: _Seconds

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return self.forward + self.backward + self.optimizer


class WorkerReport(msgspec.Struct, frozen=True):
    """The measurements that a worker process prints."""

    version: str
    losses: list[float]
    steps: Annotated[list[StepSeconds], msgspec.Meta(min_length=1)]
    idle_bytes: _Bytes
    activation_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**50)]
    peak_bytes: _Bytes


@dataclass(frozen=True, kw_only=True)
class TrainRow:
    """One system; without measurements if it has an error."""

    system: str
    precision: str
    recompute: str
    state_dtype: str
    version: str | None = None
    model: str
    batch_size: int
    seq_len: int
    rounds: int
    tokens_per_s: float | None = None
    p20: float | None = None
    p80: float | None = None
    speedup: float | None = None
    """Speed of ingot over this system's in the same round: p50 of the rounds."""
    forward_s: float | None = None
    backward_s: float | None = None
    optimizer_s: float | None = None
    """Gradient clipping and the optimizer."""
    peak_memory_bytes: int | None = None
    step_memory_bytes: int | None = None
    """The part of the peak that is not held between two steps."""
    activation_memory_bytes: int | None = None
    """Memory that the forward pass allocates for the backward pass."""
    roofline_tokens_per_s: float | None = None
    roofline_fraction: float | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    error: str | None = None


@dataclass
class TrainingRuns:
    """The reports of one system, one per round, or the error that stopped it."""

    reports: list[WorkerReport] = field(default_factory=list[WorkerReport])
    error: str | None = None


def compare(
    systems: Sequence[TrainingSystem],
    directory: Path,
    task: TrainTask,
    machine: Peaks,
    advance: Callable[[str], object] = lambda _: None,
) -> list[TrainRow]:
    """Run the systems on the model of a directory, interleaved by round; `advance` is called with a
    description before each run."""
    described = hf.describe(directory)
    if task.seq_len > described.config.max_seq_len:
        raise ConfigError(
            f"seq_len: must be at most {described.config.max_seq_len} (max_seq_len), got "
            f"{task.seq_len}",
            hint="choose a smaller --seq-len",
        )
    runs = {system: TrainingRuns(error=system.unavailable_reason()) for system in systems}
    logs = paths.ensure_trusted(paths.cache("bench-train"))
    for index in range(task.rounds):
        for system, of in Random(index).sample(list(runs.items()), len(runs)):
            advance(f"round {index + 1} of {task.rounds}: {system.name}")
            if of.error:
                continue
            try:
                of.reports.append(_run_worker(system, directory, task, logs))
            except SystemFailure as failure:
                of.error = str(failure)
    return rows(runs, directory.name, described.parameters, task, machine)


def _run_worker(
    system: TrainingSystem, directory: Path, task: TrainTask, logs: Path
) -> WorkerReport:
    log = logs / f"{system.name.replace(' ', '-')}.log"
    with tempfile.TemporaryDirectory() as folder, log.open("w") as stderr:
        request = {
            "system": system.system,
            "precision": system.precision,
            "recompute": system.recompute,
            "state_dtype": system.state_dtype,
            "model": str(directory.resolve()),
            "batch_size": task.batch_size,
            "seq_len": task.seq_len,
            "steps": STEPS,
            "folder": folder,
        }
        command = [sys.executable, "-m", "ingot.bench.train_worker", json.dumps(request)]
        try:
            process = subprocess.run(
                command,
                cwd=folder,
                env=_environment(system),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                timeout=_TIMEOUT,
            )
        except subprocess.TimeoutExpired:
            raise SystemFailure(f"no report within {_TIMEOUT:g} s (see {log})") from None
    if process.returncode:
        raise SystemFailure(describe_exit(process.returncode, log))
    try:
        return msgspec.json.decode(process.stdout, type=WorkerReport)
    except msgspec.DecodeError as error:
        raise SystemFailure(f"invalid report: {error}") from None


def _environment(system: TrainingSystem) -> dict[str, str]:
    """Return the environment of a worker: it imports the running ingot. The thread setting of
    `ingot.cli` is not passed to other systems, which keep their defaults."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    if system.system != OURS.system:
        environment.pop("GOMP_SPINCOUNT", None)
    return environment


def rows(
    runs: Mapping[TrainingSystem, TrainingRuns],
    model: str,
    parameters: int,
    task: TrainTask,
    machine: Peaks,
) -> list[TrainRow]:
    """Summarize: one row per system, in the given order."""
    result: list[TrainRow] = []
    for system, of in runs.items():
        shared: dict[str, Any] = {
            "system": system.system,
            "precision": system.precision,
            "recompute": system.recompute,
            "state_dtype": system.state_dtype,
            "model": model,
            "batch_size": task.batch_size,
            "seq_len": task.seq_len,
            "rounds": task.rounds,
        }
        first = _first(runs, system)
        error = of.error or (first and _loss_difference(of, first))
        if error or first is None:
            result.append(TrainRow(**shared, error=error or "no result"))
            continue
        is_peft = system.system == PEFT.system
        ours = runs.get(replace(LORA, precision=system.precision) if is_peft else OURS)
        measured = _measurements(of, None if ours is None or ours.error else ours, task)
        # Without instructions for bf16, PyTorch's matmul is slower in bf16 than in float32.
        dtypes = ("bf16", "fp32") if system.precision == "bf16" else ("fp32",)
        peak = max((found.value for name in dtypes if (found := machine.matmul[name])), default=0.0)
        if peak:
            ideal = peak * 1e9 / (6 * parameters)
            measured["roofline_tokens_per_s"] = round_measurement(ideal)
            measured["roofline_fraction"] = round_measurement(measured["tokens_per_s"] / ideal)
        result.append(TrainRow(**shared, **measured))
    return result


def _first(
    runs: Mapping[TrainingSystem, TrainingRuns], system: TrainingSystem
) -> TrainingRuns | None:
    """Return the first runs that succeeded and train the same parameters: all, or an adapter."""
    adapters = (LORA.system, PEFT.system)
    return next(
        (
            of
            for other, of in runs.items()
            if of.reports
            and not of.error
            and (other.system in adapters) == (system.system in adapters)
        ),
        None,
    )


def _loss_difference(of: TrainingRuns, first: TrainingRuns) -> str | None:
    for mine, theirs in zip(of.reports, first.reports, strict=False):
        for number, (a, b) in enumerate(zip(mine.losses, theirs.losses, strict=False), 1):
            if not abs(a - b) <= _LOSS_TOLERANCE * abs(b):  # false for NaN
                return f"loss of step {number} is {a:.4g}, but {b:.4g} in the first system"
    return None


def _measurements(of: TrainingRuns, ours: TrainingRuns | None, task: TrainTask) -> dict[str, Any]:
    steps = [step for report in of.reports for step in report.steps]
    low, usual, high = np.quantile([task.tokens / s.total for s in steps], (0.2, 0.5, 0.8)).tolist()
    return {
        "version": of.reports[-1].version,
        "tokens_per_s": round_measurement(usual),
        "p20": round_measurement(low),
        "p80": round_measurement(high),
        "speedup": ours and round_measurement(median(_speedups(of, ours))),
        "forward_s": round_measurement(median(step.forward for step in steps)),
        "backward_s": round_measurement(median(step.backward for step in steps)),
        "optimizer_s": round_measurement(median(step.optimizer for step in steps)),
        "peak_memory_bytes": int(median(report.peak_bytes for report in of.reports)),
        "step_memory_bytes": int(median(r.peak_bytes - r.idle_bytes for r in of.reports)),
        "activation_memory_bytes": int(median(report.activation_bytes for report in of.reports)),
        "first_loss": of.reports[0].losses[0],
        "last_loss": of.reports[0].losses[-1],
    }


def _speedups(of: TrainingRuns, ours: TrainingRuns) -> Iterable[float]:
    """Yield the ratio of the step times, theirs over ours, of each round."""
    for theirs, mine in zip(of.reports, ours.reports, strict=True):
        yield median(s.total for s in theirs.steps) / median(s.total for s in mine.steps)


@dataclass(frozen=True, kw_only=True)
class TrainSummary:
    """Conclusions from the rows; None where one of them has no measurements."""

    best_peer: str | None
    """The fastest of the other systems in full fine-tuning."""
    speedup: float | None
    """Speed of ingot over the best peer's, in the same rounds."""
    memory_ratio: float | None
    """Peak memory of ingot over the best peer's."""
    backward_over_forward: float | None
    bf16_over_fp32: float | None
    lora_over_full: float | None
    """Speed of training a LoRA adapter over that of full fine-tuning, both by ingot."""
    lora_idle_memory_ratio: float | None
    """The same for the memory that is held between steps, libraries included."""
    lora_over_peft: dict[str, float]
    """Speed of ingot's LoRA over PEFT's, by precision."""
    options: dict[str, dict[str, float | None]]
    """For each option of ingot: the fraction of the activations, of the step's memory and of the
    peak that it saves, its step time over the default's, its speedup over the best peer and its
    memory over the best peer's."""


def summarize(all_rows: Sequence[TrainRow]) -> TrainSummary:
    """Draw the conclusions."""
    measured = [row for row in all_rows if not row.error]
    mine = {
        (row.precision, describe_options(row.recompute, row.state_dtype)): row
        for row in measured
        if row.system == OURS.system
    }
    ours, fp32 = mine.get((OURS.precision, "")), mine.get((FP32.precision, ""))
    is_lora = (LORA.system, LORA.precision)
    lora = next((row for row in measured if (row.system, row.precision) == is_lora), None)
    others = [row for row in measured if row.system not in (OURS.system, LORA.system)]
    peers = [row for row in others if row.system != PEFT.system]
    peft = {row.precision: row.speedup for row in others if row.system == PEFT.system}
    best = max(peers, key=lambda row: row.tokens_per_s or 0.0, default=None)
    variants = {name: row for (_, name), row in mine.items() if name}
    ratio = ours and round_measurement((ours.backward_s or 0) / (ours.forward_s or 1))
    return TrainSummary(
        best_peer=best and best.system,
        speedup=best and best.speedup,
        memory_ratio=_ratio(ours, best, "peak_memory_bytes"),
        backward_over_forward=ratio,
        bf16_over_fp32=fp32 and fp32.speedup,
        lora_over_full=lora and lora.speedup and round_measurement(1 / lora.speedup),
        lora_idle_memory_ratio=lora and ours and round_measurement(_idle(lora) / _idle(ours)),
        lora_over_peft={name: speedup for name, speedup in peft.items() if speedup},
        options={name: _savings(row, ours, best) for name, row in variants.items()} if ours else {},
    )


def _savings(row: TrainRow, ours: TrainRow, best: TrainRow | None) -> dict[str, float | None]:
    names = ("activation_memory", "step_memory", "peak_memory")
    saved: dict[str, float | None] = {
        f"{name}_saved": round_measurement(1 - (_ratio(row, ours, f"{name}_bytes") or 1))
        for name in names
    }
    return {
        **saved,
        "time_ratio": row.speedup,
        "speedup": _ratio(best, row, "speedup"),
        "memory_ratio": _ratio(row, best, "peak_memory_bytes"),
    }


def _idle(row: TrainRow) -> int:
    return (row.peak_memory_bytes or 0) - (row.step_memory_bytes or 0)


def _ratio(row: TrainRow | None, other: TrainRow | None, name: str) -> float | None:
    if row is None or other is None:
        return None
    return round_measurement((getattr(row, name) or 0) / (getattr(other, name) or 1))
