"""Search of the CPU kernels' parameters (`ingot.kernels.cpu.tuning`) on this machine.

    result = search("matmul", workloads("matmul"), trials=40)

A trial times some values of a group against those that ship, interleaved, on one workload after
another; the objective is the geometric mean of the ratios. Optuna proposes the values (grid,
random, TPE or evolution), and its median pruner ends a trial that is slower than most after some
of the workloads. The first trials are what is stored for this machine and for others of its tier.

The best trial of a noisy objective was also a lucky one. So it is timed again, for longer, and kept
only if it still gains 1 %, and if all results have the bits of the defaults.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from statistics import geometric_mean
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from ingot.bench.timing import time_interleaved
from ingot.bench.workloads import Workload, arena_size, argument_sets, new_arena, select_workloads
from ingot.core.device import detect
from ingot.core.errors import IngotError
from ingot.kernels.cpu import tuning
from ingot.ops.arguments import as_tuple
from ingot.ops.record import registry

Search: TypeAlias = Literal["tpe", "random", "evolution", "grid"]
Values: TypeAlias = "Mapping[str, int]"

MIN_GAIN = 1.01
PATIENCE = 15  # trials without a better one, after which the search ends

# The ops whose time a group changes, and the numbers of rows at which it may.
_OPS = {
    "matmul": (("linear",), (8, 64, 512, 2048)),
    "quantized": (
        ("linear_int4", "linear_int4_dynamic", "linear_int8", "linear_int8_dynamic"),
        (1, 8, 512),
    ),
    "tasks": (("silu", "swiglu", "rms_norm", "add_layer_norm", "rope", "softmax"), (32, 256, 2048)),
}
_MAX_SIZE = 8192  # of a dimension: calls with more take a second


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Some values against the defaults."""

    values: dict[str, int]
    by_workload: dict[str, float]
    """The default's time over this one's."""

    @property
    def speedup(self) -> float:
        """Return the geometric mean over the workloads."""
        return geometric_mean(self.by_workload.values())


@dataclass(frozen=True, kw_only=True)
class CpuTuneResult:
    """The outcome for a group."""

    group: str
    chosen: dict[str, int] | None
    """The best values; None if the defaults are within 1 % of them."""
    best: Measurement
    """The best values, timed again."""
    trials: tuple[Measurement, ...]
    """The complete trials, in order."""
    pruned: int


def workloads(group: str) -> list[Workload]:
    """Return the workloads of `ingot bench ops` whose time a group changes."""
    ops, rows = _OPS[group]

    def is_wanted(workload: Workload) -> bool:
        sizes, *epilogue = workload.shape.split()
        first, *others = map(int, sizes.split("x"))
        is_plain = group != "matmul" or (not epilogue and max(others) <= _MAX_SIZE)
        return workload.op in ops and first in rows and is_plain

    return [each for each in select_workloads(ops) if is_wanted(each)]


class Bench:
    """Times values of a group against the defaults on its workloads."""

    def __init__(self, chosen: Sequence[Workload], seconds: float = 0.1) -> None:
        self.workloads = list(chosen)
        self._seconds = seconds
        self._arena = new_arena(arena_size(detect(), "cpu"), "cpu")

    def ratio(self, workload: Workload, values: Values, seconds: float | None = None) -> float:
        """Return the default's time over that of the values."""
        op = registry()[workload.op]
        walk = cycle(argument_sets(workload, self._arena))
        in_use: list[Values] = [{}]

        def call(these: Values) -> Callable[[], object]:
            def run() -> object:
                if in_use[0] is not these:  # in the first call of a slice, which is discarded
                    tuning.put(these)
                    in_use[0] = these
                return op(*next(walk))

            return run

        with tuning.use({}), torch.inference_mode():
            runs = {"default": call(tuning.defaults()), "values": call(dict(values))}
            times = time_interleaved(runs, seconds or self._seconds, minimum=5)
        return times["default"].p50 / times["values"].p50

    def measure(self, values: Values, seconds: float | None = None) -> Measurement:
        """Return the ratios on all workloads."""
        ratios = {name_of(each): self.ratio(each, values, seconds) for each in self.workloads}
        return Measurement(values=dict(values), by_workload=ratios)

    def same_bits(self, values: Values) -> bool:
        """Return whether all results are bitwise those of the defaults."""
        return all(
            torch.equal(one.view(torch.uint8), other.view(torch.uint8))
            for workload in self.workloads
            for one, other in zip(
                self._results(workload, tuning.defaults()),
                self._results(workload, values),
                strict=True,
            )
        )

    def _results(self, workload: Workload, values: Values) -> list[Tensor]:
        args = argument_sets(workload, self._arena)[0]
        with tuning.use(values), torch.inference_mode():
            results = as_tuple(registry()[workload.op](*args))
            return [each.clone() for each in results]


def search(
    group: str,
    bench: Bench,
    *,
    trials: int = 40,
    method: Search = "tpe",
    done: Callable[[], None] = lambda: None,
) -> CpuTuneResult:
    """Find the fastest values of a group; `done` is called after each trial."""
    optuna = _import_optuna()
    parameters = tuning.space(group)
    grid = {each.name: list(each.choices) for each in parameters}
    samplers: dict[str, Callable[[], Any]] = {
        "tpe": lambda: optuna.samplers.TPESampler(seed=0, n_startup_trials=8),
        "random": lambda: optuna.samplers.RandomSampler(seed=0),
        "evolution": lambda: optuna.samplers.NSGAIISampler(seed=0, population_size=10),
        "grid": lambda: optuna.samplers.GridSampler(grid, seed=0),
    }
    pruner = optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=3)
    study = optuna.create_study(direction="maximize", sampler=samplers[method](), pruner=pruner)
    for values in (tuning.stored(group), *tuning.stored_elsewhere(group)):
        if values:
            study.enqueue_trial(values, skip_if_exists=True)
    complete: list[Measurement] = []

    def objective(trial: Any) -> float:
        values = {
            each.name: trial.suggest_categorical(each.name, each.choices) for each in parameters
        }
        seen = next((each for each in complete if each.values == values), None)
        if seen:
            return seen.speedup
        ratios: dict[str, float] = {}
        for step, workload in enumerate(bench.workloads):
            ratios[name_of(workload)] = bench.ratio(workload, values)
            trial.report(geometric_mean(ratios.values()), step)
            if trial.should_prune():
                raise optuna.TrialPruned
        complete.append(Measurement(values=values, by_workload=ratios))
        return complete[-1].speedup

    def after(study: Any, trial: Any) -> None:
        done()
        finished = [each for each in study.trials if each.value is not None]
        if finished and trial.number - study.best_trial.number >= PATIENCE:
            study.stop()

    study.optimize(objective, n_trials=trials, callbacks=[after])
    return _confirm(group, bench, complete, len(study.trials) - len(complete))


def _confirm(group: str, bench: Bench, complete: list[Measurement], pruned: int) -> CpuTuneResult:
    best = max(complete, key=lambda each: each.speedup)
    again = bench.measure(best.values, seconds=0.5)
    kept = again.speedup >= MIN_GAIN and bench.same_bits(best.values)
    return CpuTuneResult(
        group=group,
        chosen=best.values if kept else None,
        best=again,
        trials=tuple(complete),
        pruned=pruned,
    )


def name_of(workload: Workload) -> str:
    """Return the name of a workload in tables."""
    return f"{workload.op} {workload.shape} {workload.dtype}"


def _import_optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise IngotError(
            "tuning the CPU kernels needs Optuna", hint="pip install 'ingot[tune]'"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
