from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.core.errors import DataError
from ingot.forecast.curve import BINS, CurveReader, Target, bin_lr, choose_target, read_curve
from ingot.training.schedule import LRSchedule

FLAT = np.ones(BINS)
LOSSES = st.lists(st.floats(0.01, 1e6), min_size=1, max_size=200)


def lines(losses: list[float]) -> list[dict[str, Any]]:
    return [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)]


@given(LOSSES, st.floats(0.1, 100.0), st.integers(50, 333))
def test_a_factor_of_the_loss_moves_all_bins(
    losses: list[float], factor: float, steps: int
) -> None:
    one = read_curve(lines(losses), FLAT, steps, "loss").log_loss
    other = read_curve(lines([factor * loss for loss in losses]), FLAT, steps, "loss").log_loss
    np.testing.assert_allclose(other, one + np.log(factor), atol=1e-9)


@given(LOSSES, st.integers(50, 333), st.integers(0, 200))
def test_later_lines_change_no_complete_bin(losses: list[float], steps: int, cut: int) -> None:
    whole = read_curve(lines(losses), FLAT, steps, "loss").log_loss
    early = read_curve(lines(losses[:cut]), FLAT, steps, "loss").log_loss
    np.testing.assert_array_equal(whole[: len(early)], early)


def test_a_bin_of_the_training_loss_is_a_trimmed_mean() -> None:
    losses = [2.0] * 19 + [2e6]
    curve = read_curve(lines(losses), FLAT, 1000, "loss")
    assert curve.log_loss.tolist() == [pytest.approx(np.log(2.0))]


def test_a_bin_of_the_validation_loss_is_its_last_evaluation() -> None:
    seen = [{"step": step, "validation_loss": float(step)} for step in (10, 20, 60)]
    curve = read_curve(seen, FLAT, 1000, "validation_loss")
    assert np.exp(curve.log_loss).tolist() == pytest.approx([20.0, np.sqrt(1200.0), 60.0])


def test_an_evaluation_belongs_to_the_step_before_it() -> None:
    reader = CurveReader(FLAT, 1000, "validation_loss")
    for step in range(1, 21):
        reader.add({"step": step, "loss": 1.0})
    assert reader.bins == 0
    reader.add({"step": 20, "validation_loss": 3.0})
    assert np.exp(reader.curve().log_loss).tolist() == pytest.approx([3.0])


def test_a_run_that_was_rolled_back_has_its_later_losses() -> None:
    first = lines([float(step) for step in range(1, 61)])
    again = [{"step": step, "loss": 5.0} for step in range(41, 61)]
    curve = read_curve([*first, *again], FLAT, 1000, "loss")
    assert curve.now == 3
    assert np.exp(curve.log_loss[2]) == pytest.approx(5.0)


def test_the_curve_ends_where_the_loss_is_not_finite() -> None:
    losses = [2.0] * 60
    losses[45] = float("nan")
    assert read_curve(lines(losses), FLAT, 1000, "loss").now == 2


@pytest.mark.parametrize("line", [{}, {"step": "1", "loss": 1.0}, {"step": 10**9, "loss": 1.0}])
def test_lines_of_no_step_are_ignored(line: dict[str, Any]) -> None:
    assert read_curve([line], FLAT, 100, "loss").now == 0


def test_short_runs_have_no_curve() -> None:
    with pytest.raises(DataError, match="at least 50 steps, got 49"):
        read_curve([], FLAT, 49, "loss")


def test_the_learning_rate_is_that_of_the_schedule() -> None:
    lr = bin_lr(LRSchedule(kind="linear", warmup_steps=100, min_lr_ratio=0.0).lr_factor, 1000)
    assert lr[0] == pytest.approx(0.105, abs=0.005)
    assert lr.max() == pytest.approx(0.99, abs=0.01)
    assert lr[-1] < 0.02


@pytest.mark.parametrize(
    ("every", "target"),
    [(0, "loss"), (41, "loss"), (40, "validation_loss")],
)
def test_the_validation_loss_counts_if_it_is_evaluated_often(every: int, target: Target) -> None:
    assert choose_target(every, 1000) == target
