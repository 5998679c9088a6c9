from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from ingot.core.errors import DataError
from ingot.planning.cost import Constants, predict
from ingot.planning.fit import (
    FITTED,
    SPREAD,
    calibrate,
    calibrated_speed,
    fit,
    fit_work,
    load_fitted,
    log_errors,
    source_weights,
    works_of,
)
from ingot.planning.published import MeasuredRun


def synthetic(runs: Sequence[MeasuredRun], constants: Constants) -> list[MeasuredRun]:
    """The same runs with the step times that the model would give."""
    return [
        replace(run, step_s=float(predict(run.workload, run.plan, run.cluster, constants).total))
        for run in runs
    ]


def test_every_constant_has_a_prior() -> None:
    assert set(SPREAD) == set(FITTED)


def test_a_fit_finds_the_constants_that_made_the_data(runs: list[MeasuredRun]) -> None:
    truth = replace(Constants(), matmul=0.82, elementwise=2.0, eager=2.8, nvlink=0.6, scale=0.014)
    data = synthetic(runs, truth)
    measured = np.log(np.array([run.step_s for run in data]))
    found = fit_work(works_of(data), measured, source_weights(data), prior_width=30.0)
    assert np.abs(log_errors(data, found)).max() < 0.01
    for name in ("matmul", "elementwise", "eager", "nvlink", "scale"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=0.02), name


def test_outliers_move_a_fit_little(runs: list[MeasuredRun]) -> None:
    data = synthetic(runs, Constants())
    spoiled = [
        replace(run, step_s=3 * run.step_s) if at % 20 == 0 else run for at, run in enumerate(data)
    ]
    assert fit(spoiled).matmul == pytest.approx(fit(data).matmul, rel=0.05)


def test_fixed_constants_stay(runs: list[MeasuredRun]) -> None:
    found = fit(runs[::7], fixed={"all_to_all": 0.0, "fp8": 1.0})
    assert (found.all_to_all, found.fp8) == (0.0, 1.0)


def test_a_fit_without_evidence_keeps_the_prior(runs: list[MeasuredRun]) -> None:
    dense = [run for run in runs if not run.is_moe and run.workload.precision == "bf16"]
    found = fit(dense[:40])
    assert found.fp4 == pytest.approx(Constants().fp4)
    assert found.moe_launch == pytest.approx(Constants().moe_launch)


def test_a_source_with_more_runs_has_more_weight_but_less_for_each(
    runs: list[MeasuredRun],
) -> None:
    weights = source_weights(runs)
    by_source = {run.source: weight for run, weight in zip(runs, weights, strict=True)}
    assert by_source["H"] < by_source["E"] < by_source["A"]


def test_calibration_moves_towards_the_own_runs(runs: list[MeasuredRun]) -> None:
    fitted = load_fitted()
    slow = [replace(run, step_s=1.5 * run.step_s) for run in synthetic(runs[:3], fitted.constants)]
    one, three = calibrate(fitted, slow[:1]), calibrate(fitted, slow)
    assert 1 < one.constants.speed < three.constants.speed < 1.5
    assert np.abs(log_errors(slow, three.constants)).max() < np.log(1.5)


def test_a_large_difference_is_believed() -> None:
    factor = calibrated_speed(np.log(np.array([0.1])), between=0.1, within=0.1)
    assert factor == pytest.approx(10, rel=0.01)


def test_no_run_cannot_calibrate() -> None:
    with pytest.raises(DataError, match="no run"):
        calibrate(load_fitted(), [])
