"""How good the predictions are on sources that the constants have not seen.

Every function here that needs predictions takes log errors, log(predicted / measured), from
`leave_one_out`: for each source, the constants are fitted to the runs of all other sources.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations

import numpy as np
import numpy.typing as npt

from ingot.planning.cost import Constants, Work, step_time
from ingot.planning.fit import (
    FittedModel,
    Floats,
    calibrated_speed,
    fit_work,
    source_weights,
    works_of,
)
from ingot.planning.memory import GIB, predict_memory
from ingot.planning.published import ActivationMemory, MeasuredRun

Fixed = Mapping[str, float]
"""Constants that are not fitted, with their values: the structure of a model."""
TIE = 0.05
"""Plans whose predicted times differ by less are equally good; the simplest of them is chosen."""


@dataclass(frozen=True)
class Errors:
    """Median and 90th percentile of |predicted / measured - 1|."""

    median: float
    p90: float
    count: int

    def __str__(self) -> str:
        return f"{100 * self.median:.1f} / {100 * self.p90:.1f}"


def summarize(logs: Floats, weights: Floats | None = None) -> Errors:
    """Return median and 90th percentile of the errors.

    >>> print(summarize(np.log(np.array([1.0, 1.1, 0.8]))))
    10.0 / 20.0
    """
    errors = np.abs(np.exp(logs) - 1)
    if weights is None:
        weights = np.ones(len(errors))
    order = np.argsort(errors, kind="stable")
    reached = np.cumsum(weights[order]) / weights.sum()
    median, p90 = (errors[order][np.searchsorted(reached, q - 1e-12)] for q in (0.5, 0.9))
    return Errors(float(median), float(p90), len(errors))


def resample(
    runs: Sequence[MeasuredRun], logs: Floats, count: int = 400
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the range of median and 90th percentile that chance in the choice of sources gives.

    As many sources as there are are sampled with replacement; the ranges hold 90 % of the samples.
    Runs of a source are not independent, so that runs themselves cannot be sampled.
    """
    sources = np.array([run.source for run in runs])
    groups: list[Floats] = [logs[sources == name] for name in dict.fromkeys(sources.tolist())]
    generator = np.random.default_rng(0)
    found = list[tuple[float, float]]()
    for _ in range(count):
        chosen: list[int] = generator.integers(len(groups), size=len(groups)).tolist()
        errors = summarize(np.concatenate([groups[at] for at in chosen]))
        found.append((errors.median, errors.p90))
    (low, low_p90), (high, high_p90) = np.percentile(np.array(found), [5, 95], axis=0).tolist()
    return (low, high), (low_p90, high_p90)


def select(work: Work, mask: npt.NDArray[np.bool_]) -> Work:
    """Return the stacked work of some of the runs."""
    return Work(**{field.name: getattr(work, field.name)[mask] for field in fields(Work)})


def leave_one_out(
    runs: Sequence[MeasuredRun],
    fixed: Fixed | None = None,
    groups: Sequence[str] | None = None,
    prior_width: float = 1.0,
) -> Floats:
    """Return the log errors of all runs, each predicted without the runs of its source.

    `groups` replaces the sources: runs of one group are left out together. `prior_width` scales the
    standard deviations of the priors.
    """
    work, measured = works_of(runs), np.log(np.array([run.step_s for run in runs]))
    weights = source_weights(runs)
    names = np.array(groups or [run.source for run in runs])
    logs = np.zeros(len(runs))
    for name in dict.fromkeys(names.tolist()):
        own = names == name
        constants = fit_work(
            select(work, ~own),
            measured[~own],
            weights[~own],
            fixed=fixed,
            prior_width=prior_width,
        )
        logs[own] = np.log(step_time(select(work, own), constants).total) - measured[own]
    return logs


def constant_mfu(runs: Sequence[MeasuredRun]) -> Floats:
    """Return the log errors of the simplest prediction: all runs have the same MFU.

    It is the median of the other sources, for each precision that they have.
    """

    def ideal(run: MeasuredRun) -> float:
        gpu = run.cluster.accelerator
        return run.workload.flops_per_step / run.plan.gpus / gpu.bf16_tflops / 1e12

    shares = np.log(np.array([ideal(run) / run.step_s for run in runs]))
    kinds = [run.workload.precision.removeprefix("mx") for run in runs]
    logs = np.zeros(len(runs))
    for at, run in enumerate(runs):
        others = [k for k, other in enumerate(runs) if other.source != run.source]
        same = [k for k in others if kinds[k] == kinds[at]]
        logs[at] = shares[at] - np.median(shares[same or others])
    return logs


def nested_leave_one_out(
    runs: Sequence[MeasuredRun], structures: Mapping[str, Fixed]
) -> tuple[Floats, dict[str, str]]:
    """Return the log errors when the structure, too, is chosen without the source.

    For each source, the structure with the least sum of median and 90th percentile of errors,
    leaving out each of the other sources, is fitted to them. Also return the choices.
    """
    logs, chosen = np.zeros(len(runs)), dict[str, str]()
    sources = np.array([run.source for run in runs])
    for source in dict.fromkeys(sources.tolist()):
        others = [run for run in runs if run.source != source]
        dense = np.array([not run.is_moe for run in others])

        def score(
            name: str, others: list[MeasuredRun] = others, dense: npt.NDArray[np.bool_] = dense
        ) -> float:
            errors = summarize(leave_one_out(others, structures[name])[dense])
            return errors.median + errors.p90

        chosen[source] = min(structures, key=score)
        own = sources == source
        fixed = structures[chosen[source]]
        mine = [run for run in runs if run.source == source]
        measured = np.log(np.array([run.step_s for run in others]))
        constants = fit_work(works_of(others), measured, source_weights(others), fixed=fixed)
        predicted = np.log(step_time(works_of(mine), constants).total)
        logs[own] = predicted - np.log(np.array([run.step_s for run in mine]))
    return logs, chosen


def spreads(runs: Sequence[MeasuredRun], logs: Floats) -> tuple[float, float]:
    """Return the standard deviation of log errors between sources and within a source."""
    groups: dict[str, list[float]] = defaultdict(list)
    for run, value in zip(runs, logs, strict=True):
        groups[run.source].append(float(value))
    means = [float(np.median(values)) for values in groups.values()]
    inner = [v - float(np.median(values)) for values in groups.values() for v in values]
    # 1.4826: the median absolute deviation of a normal distribution with standard deviation 1.
    between = 1.4826 * float(np.median(np.abs(means)))
    return between, 1.4826 * float(np.median(np.abs(inner)))


@dataclass(frozen=True)
class OwnRunErrors:
    """Log errors after calibration with one own run."""

    logs: Floats
    weights: Floats
    """Each predicted run has the weight 1, over all own runs."""
    predicted: npt.NDArray[np.int64]
    """Index of the run that each error belongs to."""

    def of(self, mask: npt.NDArray[np.bool_]) -> tuple[Floats, Floats]:
        """Return the log errors and weights of some of the runs."""
        own = mask[self.predicted]
        return self.logs[own], self.weights[own]


def after_one_own_run(runs: Sequence[MeasuredRun], logs: Floats) -> OwnRunErrors:
    """Return the errors after calibration with one run of the same system.

    A system is a source, GPU, precision and kind of model. Each of its runs in turn is the own
    run, and all others are predicted. The spreads that decide how far one run is trusted come from
    other sources.
    """
    systems: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for at, run in enumerate(runs):
        systems[run.source, run.gpu, run.workload.precision, run.is_moe].append(at)
    found, weights, predicted = list[float](), list[float](), list[int]()
    for (source, _, _, is_moe), members in systems.items():
        others = [
            at for at, run in enumerate(runs) if run.source != source and run.is_moe is is_moe
        ]
        between, within = spreads([runs[at] for at in others], logs[others])
        for own in members if len(members) > 1 else ():
            shift = np.log(calibrated_speed(logs[[own]], between, within))
            rest = [at for at in members if at != own]
            found += (logs[rest] + shift).tolist()
            weights += [1 / len(rest)] * len(rest)
            predicted += rest
    return OwnRunErrors(np.array(found), np.array(weights), np.array(predicted, dtype=np.int64))


def fit_model(runs: Sequence[MeasuredRun], constants: Constants, logs: Floats) -> FittedModel:
    """Return the fitted model with spreads and intervals from the log errors of `leave_one_out`.

    Each source has the same weight in an interval: a user's system is a new source.
    """
    after = after_one_own_run(runs, logs)
    intervals, found = dict[str, tuple[float, float]](), dict[str, tuple[float, float]]()
    for kind, is_moe in (("dense", False), ("moe", True)):
        own = np.array([run.is_moe is is_moe for run in runs])
        weights = _equal_sources([run for run in runs if run.is_moe is is_moe])
        each = np.zeros(len(runs))
        each[own] = weights
        found[kind] = spreads([run for run in runs if run.is_moe is is_moe], logs[own])
        intervals[kind] = _interval(logs[own], weights)
        intervals[f"{kind} calibrated"] = _interval(
            after.logs, after.weights * each[after.predicted]
        )
    return FittedModel(constants=constants, spreads=found, intervals=intervals)


def _equal_sources(runs: Sequence[MeasuredRun]) -> Floats:
    """Return the weight of each run if all sources have the weight 1."""
    counts = Counter(run.source for run in runs)
    return np.array([1 / counts[run.source] for run in runs])


def _interval(logs: Floats, weights: Floats) -> tuple[float, float]:
    """Return the 10th and 90th percentile of measured / predicted."""
    order = np.argsort(-logs, kind="stable")
    reached = np.cumsum(weights[order]) / weights.sum()
    low, high = (-logs[order][np.searchsorted(reached, q)] for q in (0.1, 0.9))
    return float(np.exp(low)), float(np.exp(high))


def coverage(runs: Sequence[MeasuredRun], logs: Floats) -> tuple[float, float]:
    """Return the share of runs inside the interval that the other sources give them.

    The first is the share of all runs, the second the mean of the shares of sources.
    """
    sources, weights = np.array([run.source for run in runs]), _equal_sources(runs)
    ratios = np.exp(-logs)
    inside = np.zeros(len(runs))
    for source in dict.fromkeys(sources.tolist()):
        own = sources == source
        low, high = _interval(logs[~own], weights[~own])
        inside[own] = (low <= ratios[own]) & (ratios[own] <= high)
    return float(inside.mean()), float((inside * weights).sum() / weights.sum())


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """How a group of alternatives was ordered: same software, model and cluster."""

    name: str
    plans: int
    tau: float
    """Kendall's tau of predicted and measured throughput."""
    regret: float
    """Measured throughput lost by the first choice, relative to the best plan."""
    rule_regret: float
    """The same for the common rule: no recomputation, least tp x pp, smallest micro-batch."""


def rankings(runs: Sequence[MeasuredRun], logs: Floats) -> list[Ranking]:
    """Return how each group of at least two different plans was ordered."""
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for at, run in enumerate(runs):
        key = (run.source, run.release, run.gpu, run.plan.gpus, run.model)
        shape = (run.workload.model.layers, run.workload.seq_len, run.workload.precision)
        groups[key + shape].append(at)
    found = list[Ranking]()
    for members in groups.values():
        mine = [runs[at] for at in members]
        if len({run.plan for run in mine}) > 1:
            found.append(_rank(mine, logs[members]))
    return found


def _rank(runs: Sequence[MeasuredRun], logs: Floats) -> Ranking:
    measured = np.array([run.tokens_per_gpu_s for run in runs])
    predicted = measured * np.exp(-logs)
    pairs = [
        np.sign((measured[a] - measured[b]) * (predicted[a] - predicted[b]))
        for a, b in combinations(range(len(runs)), 2)
        if runs[a].plan != runs[b].plan
    ]
    simple = [_simplicity(run) for run in runs]
    near = [at for at in range(len(runs)) if predicted[at] >= predicted.max() * (1 - TIE)]
    first = min(near, key=lambda at: (simple[at][1], -predicted[at]))
    rule = min(simple)
    rule_mean = float(np.mean([m for m, s in zip(measured, simple, strict=True) if s == rule]))
    some = runs[0]
    return Ranking(
        name=f"{some.source}: {some.model}, {some.plan.gpus} x {some.gpu}, "
        f"{some.workload.precision}",
        plans=len({run.plan for run in runs}),
        tau=float(np.mean(pairs)),
        regret=1 - float(measured[first] / measured.max()),
        rule_regret=1 - rule_mean / float(measured.max()),
    )


def _simplicity(run: MeasuredRun) -> tuple[int, int, int]:
    plan = run.plan
    order = ("none", "attention", "selective", "third", "full").index(plan.recompute)
    return order, plan.tp * plan.pp, plan.micro_batch_size


def memory_errors(
    runs: Sequence[MeasuredRun], parts: Sequence[ActivationMemory]
) -> dict[str, Floats]:
    """Return predicted / measured memory: peaks of runs, and states and activations of a paper."""
    peaks = [
        predict_memory(run.workload, run.plan).total / GIB / run.memory_gib
        for run in runs
        if run.memory_gib
    ]
    states, activations = list[float](), list[float]()
    for part in parts:
        recompute: object = part.recompute
        plan = replace(part.run.plan, recompute=recompute)  # pyright: ignore[reportArgumentType]
        use = predict_memory(part.run.workload, plan)
        states.append(use.states / GIB / part.states_gib)
        activations.append(use.activations / GIB / part.activations_gib)
    return {
        "peak": np.array(peaks),
        "states": np.array(states),
        "activations": np.array(activations),
    }
