"""TensorBoard events; without TensorBoard, or on a full disk, the run continues."""

from __future__ import annotations

import builtins
import logging
from pathlib import Path
from typing import Any

import pytest

from ingot.observe.tensorboard import NAME, TensorBoardLogger


def read_scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(directory / NAME)).Reload()
    names: list[str] = found.Tags()["scalars"]  # pyright: ignore
    return {name: [(e.step, e.value) for e in found.Scalars(name)] for name in names}


def line(step: int, loss: float) -> dict[str, Any]:
    return {"step": step, "loss": loss, "num_rows": 8, "seconds": 0.5, "data_seconds": 0.125}


def test_metrics_are_written_as_scalars(tmp_path: Path) -> None:
    with TensorBoardLogger(tmp_path) as board:
        board.add(line(1, 2.0))
        board.add({"step": 1, "validation_loss": 3.0, "accuracy": 0.5})
        board.add(line(2, 1.0))
    assert read_scalars(tmp_path) == {
        "train/loss": [(1, 2.0), (2, 1.0)],
        "speed/rows per second": [(1, 16.0), (2, 16.0)],
        "speed/fraction waiting for data": [(1, 0.25), (2, 0.25)],
        "validation/loss": [(1, 3.0)],
        "validation/accuracy": [(1, 0.5)],
    }


def test_a_resumed_run_hides_events_after_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TensorBoardLogger(tmp_path) as board:
        for step in (1, 2, 3):
            board.add(line(step, 9.0))
    # Files are read in the order of their names, which begin with the time of their creation.
    monkeypatch.setattr("tensorboard.summary.writer.event_file_writer.time.time", lambda: 4e9)
    with TensorBoardLogger(tmp_path, step=1) as board:
        board.add(line(2, 5.0))
    assert read_scalars(tmp_path)["train/loss"] == [(1, 9.0), (2, 5.0)]


def test_a_missing_tensorboard_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name.startswith("torch.utils.tensorboard"):
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    caplog.set_level(logging.INFO, "ingot")
    with TensorBoardLogger(tmp_path) as board:
        board.add(line(1, 2.0))
        board.add(line(2, 2.0))
    assert caplog.text.count("pip install 'ingot[train]'") == 1
    assert not (tmp_path / NAME).exists()


def test_a_full_disk_stops_the_events_but_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with TensorBoardLogger(tmp_path) as board:

        def full(*args: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(board._writer, "add_scalar", full)
        board.add(line(1, 2.0))
        board.add(line(2, 2.0))
    assert caplog.text.count("No space left on device") == 1


def test_a_directory_that_cannot_be_created_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / NAME).write_text("a file")
    with TensorBoardLogger(tmp_path) as board:
        board.add(line(1, 2.0))
    assert "no further TensorBoard events" in caplog.text
