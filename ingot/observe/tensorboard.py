"""A run on TensorBoard: `tensorboard --logdir RUN/tensorboard`.

TensorBoard is an extra (`pip install 'ingot[train]'`). Without it, or when its files cannot be
written, a message is logged once and the run continues: `metrics.jsonl` has all of it.
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
    "clip_factor": "train/clipped to",
    "validation_loss": "validation/loss",
    "accuracy": "validation/accuracy",
}


class TensorBoardLogger:
    """Takes the lines of a run's metrics; a context, at whose end all is written.

    `step` is the one that the run resumes from; earlier events of later steps are hidden.
    """

    def __init__(self, directory: Path, step: int = 0) -> None:
        self._writer: Any = None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            log.logger(__name__).info(
                "without TensorBoard, which is not installed: pip install 'ingot[train]'"
            )
            return
        with self._kept():
            self._writer = SummaryWriter(
                str(directory / NAME), purge_step=step + 1 if step else None
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            with self._kept():
                self._writer.close()

    def add(self, figures: Mapping[str, Any]) -> None:
        """Show a line of metrics."""
        if self._writer is None:
            return
        with self._kept():
            for name, value in scalars(figures):
                self._writer.add_scalar(name, value, figures["step"])

    @contextmanager
    def _kept(self) -> Generator[None]:
        """A block whose failure to write ends the board, not the run."""
        try:
            yield
        except OSError as error:
            self._writer = None
            log.logger(__name__).warning("TensorBoard gets no more of this run: %s", error)


def scalars(figures: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """What of a line is shown, by the name it has there.

    >>> dict(scalars({"step": 3, "loss": 0.5, "num_rows": 64, "seconds": 2.0, "data_seconds": 0.1}))
    {'train/loss': 0.5, 'speed/rows per second': 32.0, 'speed/share waited for data': 0.05}
    """
    for key, name in _NAMES.items():
        if key in figures:
            yield name, figures[key]
    if seconds := figures.get("seconds"):
        yield "speed/rows per second", figures["num_rows"] / seconds
        yield "speed/share waited for data", figures["data_seconds"] / seconds
