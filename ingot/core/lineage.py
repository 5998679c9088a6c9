"""The history of a model directory: `ingot.json`, with one entry for each step.

    {"format": 1, "steps": [
        {"step": "import", "date": "2026-11-15T10:00:00+00:00", "ingot": "0.1.0",
         "source": "model.gguf", "sha256": "...", "size": 98362432}]}

A step has a name, a date, the version of ingot and any further fields. Fields that this version
does not know are preserved. Import, training and compression append a step, so a served model can
be traced back to the file it came from.
"""

from __future__ import annotations

from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from ingot.core.errors import IngotError
from ingot.core.paths import write_atomic

NAME = "ingot.json"
FORMAT = 1
MAX_BYTES = 1 << 20
MAX_STEPS = 1000


class Lineage(msgspec.Struct, frozen=True, kw_only=True):
    """The steps, oldest first.

    >>> Lineage(steps=({"step": "import", "source": "model.gguf"},)).steps[0]["source"]
    'model.gguf'
    """

    format: int = FORMAT
    steps: tuple[dict[str, Any], ...] = ()


def read(directory: Path) -> Lineage:
    """Return the lineage of a model directory; without steps if it has no file."""
    path = directory / NAME
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return Lineage()
    except OSError as error:
        raise _read_error(path, error.strerror or str(error)) from error
    if len(content) > MAX_BYTES:
        raise _read_error(path, f"expected at most {MAX_BYTES:,} bytes")
    try:
        lineage = msgspec.json.decode(content, type=Lineage)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _read_error(path, str(error)) from error
    if lineage.format != FORMAT:
        raise IngotError(
            f"{path}: expected format {FORMAT}, got {lineage.format}",
            hint="use the version of ingot that wrote it, or a newer one",
        )
    if len(lineage.steps) > MAX_STEPS or not all(_has_name(step) for step in lineage.steps):
        raise _read_error(path, f"expected at most {MAX_STEPS} steps, each with a name")
    return lineage


def append(directory: Path, step: str, **facts: Any) -> Lineage:
    """Add a step, with the date and ingot's version, to the lineage of a directory."""
    entry = {
        "step": step,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "ingot": metadata.version("ingot"),
        **facts,
    }
    after = Lineage(steps=(*read(directory).steps, entry))
    content = msgspec.json.format(msgspec.json.encode(after), indent=2) + b"\n"
    if len(content) > MAX_BYTES or len(after.steps) > MAX_STEPS:
        raise IngotError(
            f"{directory / NAME}: expected at most {MAX_STEPS} steps and {MAX_BYTES:,} bytes, "
            f"got {len(after.steps)} and {len(content):,}",
            hint="import the model into a new directory, which starts a new lineage",
        )
    write_atomic(directory / NAME, content)
    return after


def _has_name(step: dict[str, Any]) -> bool:
    return isinstance(step.get("step"), str)


def _read_error(path: Path, why: str) -> IngotError:
    return IngotError(
        f"cannot read {path}: {why}",
        hint="restore the file, or delete it to continue without the lineage",
    )
