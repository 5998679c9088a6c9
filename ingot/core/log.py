"""Logging, progress bars and consoles.

Modules log to `logger(__name__)`. A program that embeds ingot configures logging itself; only the
command line calls `setup`. Messages and progress go to stderr, so that stdout has results alone and
can be piped. Log lines and progress bars share one console, so a message appears above a running
bar and not inside it.
"""

from __future__ import annotations

import json as json_format
import logging
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console

_ROOT = "ingot"


def logger(name: str = _ROOT) -> logging.Logger:
    """Return the logger of this name below the "ingot" logger.

    >>> logger("ingot.serving").name, logger("serving").name
    ('ingot.serving', 'ingot.serving')
    """
    inside = name == _ROOT or name.startswith(f"{_ROOT}.")
    return logging.getLogger(name if inside else f"{_ROOT}.{name}")


def setup(verbose: bool = False, json: bool = False) -> None:
    """Log to stderr: INFO and above, or everything if `verbose`.

    With `json`, each line is an object that includes the `fields` of the message. A second call
    replaces the setting of the first. Python's root logger is not changed.
    """
    root = logger()
    for handler in [h for h in root.handlers if h.get_name() == _ROOT]:
        root.removeHandler(handler)
        handler.close()
    root.addHandler(_handler(json))
    root.setLevel(logging.DEBUG if verbose else logging.INFO)
    root.propagate = False


@cache
def stdout() -> Console:
    """Return the console for results; 200 columns wide if it is not a terminal."""
    from rich.console import Console

    wide = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=200 if wide else None)


@cache
def stderr() -> Console:
    """Return the console for messages and progress."""
    from rich.console import Console

    return Console(stderr=True)


class Progress(Protocol):
    """Receives the progress of a task."""

    def advance(self, n: float = 1) -> None:
        """Report `n` more finished units."""
        ...

    def describe(self, text: str) -> None:
        """Show what is being done now."""
        ...


@contextmanager
def progress(
    description: str, total: float | None, *, in_bytes: bool = False
) -> Generator[Progress]:
    """Show a progress bar with elapsed and remaining time if stderr is a terminal.

    `total` is None if it is unknown. `in_bytes` formats the units as bytes.
    """
    if not sys.stderr.isatty():
        yield _NoProgress()
        return
    from rich import progress as rich_progress

    columns = (
        rich_progress.TextColumn("{task.description}", markup=False),
        rich_progress.BarColumn(),
        rich_progress.DownloadColumn() if in_bytes else rich_progress.MofNCompleteColumn(),
        rich_progress.TimeElapsedColumn(),
        rich_progress.TimeRemainingColumn(),
    )
    # By default, rich would redirect output for a piped stdout to this stderr console.
    redirect = sys.stdout.isatty()
    with rich_progress.Progress(*columns, console=stderr(), redirect_stdout=redirect) as bar:
        yield _ProgressBar(bar, bar.add_task(description, total=total))


class _JsonFormatter(logging.Formatter):
    """Formats each message as a line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json_format.dumps(line, default=str)


def _handler(json: bool) -> logging.Handler:
    if json:
        handler: logging.Handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_JsonFormatter())
    elif sys.stderr.isatty():
        from rich.logging import RichHandler

        handler = RichHandler(console=stderr(), show_path=False)
    else:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handler.set_name(_ROOT)
    return handler


class _NoProgress:
    def advance(self, n: float = 1) -> None:
        pass

    def describe(self, text: str) -> None:
        pass


if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID


class _ProgressBar:
    def __init__(self, bar: RichProgress, task: TaskID) -> None:
        self._bar, self._task = bar, task

    def advance(self, n: float = 1) -> None:
        self._bar.advance(self._task, n)

    def describe(self, text: str) -> None:
        self._bar.update(self._task, description=text)
