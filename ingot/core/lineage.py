"""Where a model directory comes from: `ingot.json`, one step for everything done to it.

    {"format": 1, "steps": [
        {"step": "import", "date": "2026-11-15T10:00:00+00:00", "ingot": "0.1.0",
         "source": "model.gguf", "sha256": "...", "size": 98362432}]}

A step says its name, when, by which version, and whatever facts it wants to keep; facts of
steps that this version does not know survive being read and written. Imports, training,
compression all append here, so a served model can be followed back to the file it came from.
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
    """Return the lineage of a model directory; one without steps where there is no file."""
    path = directory / NAME
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return Lineage()
    except OSError as error:
        raise _read_error(path, error.strerror or str(error)) from error
    if len(content) > MAX_BYTES:
        raise _read_error(path, f"it is larger than {MAX_BYTES:,} bytes")
    try:
        found = msgspec.json.decode(content, type=Lineage)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _read_error(path, str(error)) from error
    if found.format != FORMAT:
        raise IngotError(
            f"{path} has format {found.format}, this version of ingot knows {FORMAT}",
            hint="use the version of ingot that wrote it, or a newer one",
        )
    if len(found.steps) > MAX_STEPS or not all(_has_name(step) for step in found.steps):
        raise _read_error(path, f"expected at most {MAX_STEPS} steps, each with its name")
    return found


def append(directory: Path, step: str, **facts: Any) -> Lineage:
    """Add a step to the directory's lineage, with the date and ingot's version; write it back."""
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
            f"the lineage in {directory / NAME} would grow past its bounds of {MAX_STEPS} steps "
            f"and {MAX_BYTES:,} bytes",
            hint="import the model anew into a directory of its own, which starts a lineage",
        )
    write_atomic(directory / NAME, content)
    return after


def _has_name(step: dict[str, Any]) -> bool:
    return isinstance(step.get("step"), str)


def _read_error(path: Path, why: str) -> IngotError:
    return IngotError(
        f"cannot read the lineage in {path}: {why}",
        hint="restore the file, or delete it to go on without knowing where the model is from",
    )
