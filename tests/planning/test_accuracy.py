from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ingot.planning.accuracy import (
    after_one_own_run,
    constant_mfu,
    coverage,
    fit_model,
    leave_one_out,
    memory_errors,
    nested_leave_one_out,
    rankings,
    resample,
    select,
    spreads,
    summarize,
)
from ingot.planning.cost import Constants
from ingot.planning.fit import works_of
from ingot.planning.published import MeasuredRun, read_activation_memory
from tests.planning.conftest import DATA
from tests.planning.test_fit import synthetic


def test_weights_count_in_the_percentiles() -> None:
    logs = np.log(np.array([1.0, 1.1, 1.5]))
    assert summarize(logs).median == pytest.approx(0.1)
    assert summarize(logs, np.array([1.0, 1.0, 9.0])).median == pytest.approx(0.5)


def test_a_source_does_not_see_itself(runs: list[MeasuredRun]) -> None:
    """If the step times of a source change, its predictions do not, and those of others do."""
    some = runs[::6]
    changed = [replace(r, step_s=2 * r.step_s) if r.source == "E" else r for r in some]
    before, after = leave_one_out(some), leave_one_out(changed)
    own = np.array([run.source == "E" for run in some])
    assert after[own] == pytest.approx(before[own] - np.log(2))
    assert np.abs(after[~own] - before[~own]).max() > 1e-3


def test_groups_replace_sources(runs: list[MeasuredRun]) -> None:
    some = runs[::20]
    everyone = leave_one_out(some, groups=["a"] * (len(some) // 2) + ["b"] * (-(-len(some) // 2)))
    assert not np.allclose(everyone, leave_one_out(some))


def test_perfect_data_has_no_error(runs: list[MeasuredRun]) -> None:
    data = synthetic(runs[::4], Constants())
    assert summarize(leave_one_out(data)).p90 < 0.01


def test_the_structure_is_chosen_without_the_source(runs: list[MeasuredRun]) -> None:
    data = [run for run in synthetic(runs[::10], Constants()) if run.source in "ACEFH"]
    structures = {"right": {}, "wrong": {"matmul": 0.3, "attention": 2.0}}
    logs, chosen = nested_leave_one_out(data, structures)
    assert set(chosen.values()) == {"right"}
    assert np.abs(logs).max() < 0.1


def test_selecting_runs_selects_their_work(runs: list[MeasuredRun]) -> None:
    work = works_of(runs[:5])
    mask = np.array([True, False, True, False, False])
    assert select(work, mask).gpus.tolist() == [runs[0].plan.gpus, runs[2].plan.gpus]  # pyright: ignore


def test_one_own_run_removes_the_error_of_a_system(runs: list[MeasuredRun]) -> None:
    """Each source has its own speed: after one run, little of it is left."""
    sources = {source: 0.3 * np.sin(at) for at, source in enumerate({r.source for r in runs})}
    logs = np.array([sources[run.source] for run in runs])
    after = after_one_own_run(runs, logs)
    assert summarize(after.logs, after.weights).p90 < 0.02 < summarize(logs).p90
    assert after.weights.sum() == pytest.approx(len(runs), rel=0.05)
    systems = Counter((r.source, r.gpu, r.workload.precision, r.is_moe) for r in runs)
    assert len(after.logs) == sum(n * (n - 1) for n in systems.values())
    dense = np.array([not run.is_moe for run in runs])
    assert after.of(dense)[1].sum() == pytest.approx(dense.sum(), rel=0.05)


def test_sources_are_resampled_as_a_whole(runs: list[MeasuredRun]) -> None:
    """If all runs of a source have the same error, the range is that of single sources."""
    names = list(dict.fromkeys(run.source for run in runs))
    logs = np.log1p(np.array([0.01 * names.index(run.source) for run in runs]))
    (low, high), (low_p90, high_p90) = resample(runs, logs, count=100)
    assert low < summarize(logs).median < high
    assert low_p90 <= summarize(logs).p90 <= high_p90
    assert high - low > 0.02


def test_spreads_between_and_within_sources(runs: list[MeasuredRun]) -> None:
    generator = np.random.default_rng(0)
    logs = generator.normal(0, 0.05, len(runs))
    between, within = spreads(runs, logs)
    assert within == pytest.approx(0.05, rel=0.2)
    assert between < within


def test_intervals_hold_four_fifths_of_other_sources(runs: list[MeasuredRun]) -> None:
    logs = np.random.default_rng(0).normal(0, 0.1, len(runs))
    assert coverage(runs, logs)[0] == pytest.approx(0.8, abs=0.08)
    model = fit_model(runs, Constants(), logs)
    low, high = model.interval(is_moe=False, is_calibrated=False)
    assert (np.log(low), np.log(high)) == pytest.approx((-0.128, 0.128), abs=0.06)


def test_sources_have_equal_weights_in_an_interval(runs: list[MeasuredRun]) -> None:
    """One source with most of the runs does not decide how wide it is."""
    logs = np.array([0.01 if run.source in ("E", "F", "H") else 0.3 for run in runs])
    _, high = fit_model(runs, Constants(), -logs).interval(is_moe=False, is_calibrated=False)
    assert high == pytest.approx(np.exp(0.3))


def test_groups_of_alternatives_share_software_model_and_cluster(runs: list[MeasuredRun]) -> None:
    perfect = rankings(runs, np.zeros(len(runs)))
    assert all(group.tau >= 0.99 or group.plans > 2 for group in perfect)
    assert {group.name.partition(":")[0] for group in perfect} >= {"C", "I", "K"}
    assert all(group.regret <= group.rule_regret + 0.05 for group in perfect)


def test_a_reversed_prediction_has_the_opposite_tau(runs: list[MeasuredRun]) -> None:
    throughput = np.array([run.tokens_per_gpu_s for run in runs])
    reversed_ = rankings(runs, 2 * np.log(throughput))
    assert {group.tau for group in reversed_ if group.plans == 2} <= {-1.0, 0.0}


def test_memory_is_compared_with_what_was_published(runs: list[MeasuredRun]) -> None:
    parts = read_activation_memory(Path(DATA) / "published_memory.csv", runs)
    ratios = memory_errors(runs, parts)
    assert {name: len(values) for name, values in ratios.items()} == {
        "peak": sum(run.memory_gib is not None for run in runs),
        "states": 8,
        "activations": 8,
    }
    assert np.median(np.abs(ratios["states"] - 1)) < 0.05


def test_the_model_is_better_than_a_constant_mfu(runs: list[MeasuredRun]) -> None:
    dense = [run for run in runs if not run.is_moe]
    assert summarize(constant_mfu(dense)).median > 2 * summarize(leave_one_out(dense)).median
