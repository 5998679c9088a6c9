"""Metrics of a run for TensorBoard: `tensorboard --logdir RUN/tensorboard`.

TensorBoard is an extra (`pip install 'ingot[train]'`). Without it, or when its files cannot be
written, a message is logged once and the run continues: `metrics.jsonl` has all metrics.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from ingot.core import log

NAME = "tensorboard"
_NAMES = {
    "loss": "train/loss",
    "lr": "train/learning rate",
    "grad_norm": "train/gradient norm",
    "clip_factor": "train/clip factor",
    "validation_loss": "validation/loss",
    "accuracy": "validation/accuracy",
    "forecast": "forecast/final loss",
    "forecast_low": "forecast/lower edge of the band",
    "forecast_high": "forecast/upper edge of the band",
}


class TensorBoardLogger:
    """Writes the metrics of a run as events; a context manager that flushes them at its end.

    `step` is the step from which the run resumes; existing events of later steps are hidden.
    """

    def __init__(self, directory: Path, step: int = 0) -> None:
        self._writer: Any = None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            log.logger(__name__).info(
                "no TensorBoard events: it is not installed (pip install 'ingot[train]')"
            )
            return
        with self._disable_on_error():
            self._writer = SummaryWriter(
                str(directory / NAME), purge_step=step + 1 if step else None
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            with self._disable_on_error():
                self._writer.close()

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Write a line of metrics."""
        if self._writer is None:
            return
        with self._disable_on_error():
            for name, value in scalars(metrics):
                self._writer.add_scalar(name, value, metrics["step"])

    @contextmanager
    def _disable_on_error(self) -> Generator[None]:
        """Stop writing events after an error of the file system, without ending the run."""
        try:
            yield
        except OSError as error:
            self._writer = None
            log.logger(__name__).warning("no further TensorBoard events of this run: %s", error)


def scalars(metrics: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the values of a line that are shown, with their tags.

    >>> dict(scalars({"step": 3, "loss": 0.5, "num_rows": 64, "seconds": 2.0, "data_seconds": 0.1}))
    {'train/loss': 0.5, 'speed/rows per second': 32.0, 'speed/fraction waiting for data': 0.05}
    """
    for key, name in _NAMES.items():
        if key in metrics:
            yield name, metrics[key]
    if seconds := metrics.get("seconds"):
        yield "speed/rows per second", metrics["num_rows"] / seconds
        yield "speed/fraction waiting for data", metrics["data_seconds"] / seconds
