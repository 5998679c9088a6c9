from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.core.errors import DataError
from ingot.forecast.curve import BINS
from ingot.forecast.runs import RunLibrary, describe, find_nearest
from tests.forecast import libraries

LIBRARY = libraries.library()


def test_the_nearest_to_a_run_of_the_library_is_itself() -> None:
    for row in range(0, len(LIBRARY), 7):
        whole = LIBRARY.curve(row, "validation_loss", libraries.STEPS)
        nearest = find_nearest(LIBRARY, whole.prefix(20))
        assert nearest.rows[0] == row
        np.testing.assert_allclose(nearest.paths[0], whole.log_loss[20:])


@given(st.integers(4, BINS - 1), st.floats(-5, 5), st.integers(0, 20))
def test_a_factor_of_the_loss_moves_what_the_nearest_did(now: int, shift: float, seed: int) -> None:
    curve = libraries.curve(noise=0.02, seed=seed).prefix(now)
    moved = replace(curve, log_loss=curve.log_loss + shift)
    one, other = find_nearest(LIBRARY, curve), find_nearest(LIBRARY, moved)
    np.testing.assert_allclose(other.quantile(0.5), one.quantile(0.5) + shift, atol=1e-6)


@given(st.integers(4, BINS - 1), st.floats(0.001, 1000.0))
def test_a_factor_of_all_learning_rates_changes_nothing(now: int, factor: float) -> None:
    curve = libraries.curve().prefix(now)
    one, _ = describe(curve.log_loss[None], curve.lr[None], now)
    other, _ = describe(curve.log_loss[None], factor * curve.lr[None], now)
    np.testing.assert_allclose(one, other, atol=1e-9)


@given(st.integers(4, BINS - 1))
def test_weights_sum_to_one_and_quantiles_are_ordered(now: int) -> None:
    nearest = find_nearest(LIBRARY, libraries.curve(noise=0.05).prefix(now))
    assert nearest.weights.sum() == pytest.approx(1.0)
    assert (nearest.quantile(0.1) <= nearest.quantile(0.5)).all()
    assert (nearest.quantile(0.5) <= nearest.quantile(0.9)).all()


def test_runs_of_the_same_task_are_preferred() -> None:
    curve = libraries.curve(noise=0.02).prefix(20)
    for task in ("text/decoder 1e9", "digits/cnn"):
        rows = find_nearest(LIBRARY, replace(curve, task=task)).rows
        kinds = [LIBRARY.tasks[row].partition(" ")[0] for row in rows]
        assert kinds.count(task.partition(" ")[0]) > 10


def test_a_library_is_written_and_read(tmp_path: Path) -> None:
    LIBRARY.save(tmp_path / "runs.npz")
    read = RunLibrary.load(tmp_path / "runs.npz")
    assert read.tasks == LIBRARY.tasks
    np.testing.assert_allclose(read.log_loss["loss"], LIBRARY.log_loss["loss"], rtol=1e-6)


def test_runs_that_diverged_are_not_finished() -> None:
    values = LIBRARY.log_loss["loss"].copy()
    values[3, 30:] = np.nan
    broken = replace(LIBRARY, log_loss={"loss": values, "validation_loss": values})
    assert len(broken.finished("loss")) == len(LIBRARY) - 1
    assert broken.curve(3, "loss", 100).now == 30
    assert len(broken.add(LIBRARY)) == 2 * len(LIBRARY)


def test_other_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "runs.npz"
    path.write_bytes(b"PK\x03\x04 and nothing else")
    with pytest.raises(DataError, match=r"runs\.npz: the library of runs cannot be read"):
        RunLibrary.load(path)
    np.savez(path, task_names=["a"], tasks=[0, 0], lr=[[1.0]], loss=[[1.0]], validation=[[1.0]])
    with pytest.raises(DataError, match="shapes"):
        RunLibrary.load(path)
    np.savez(path, task_names=np.array([{}], dtype=object), tasks=[0], lr=[[1.0]])
    with pytest.raises(DataError, match="pickle"):
        RunLibrary.load(path)


def test_the_shipped_library_is_small_and_finite() -> None:
    library = RunLibrary.load()
    assert len(library.finished("validation_loss")) > 100
    assert {task.partition("/")[0] for task in library.tasks} == {"xor", "digits", "text"}
    assert np.isfinite(library.lr).all()
