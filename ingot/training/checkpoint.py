"""Checkpoints: everything that determines the future of a run, complete or absent.

    checkpoints/step-00000100/
        model.safetensors     all tensors, as `part/name`; several shards if they are large
        checkpoint.json       metadata, and the SHA-256 of every other file

A checkpoint is written to a temporary directory and renamed when it is complete
(`paths.atomic_directory`), so a killed process leaves the previous one intact. A disk may still
lose data that it has acknowledged: the reader compares the hashes first and skips corrupt
checkpoints.

Writing is asynchronous: `save` copies the tensors to host memory and returns, and a thread writes
the copies while training continues. The next call raises a failure. When a new checkpoint is
complete, all but the latest few and the best are deleted.

Nothing is pickled.
"""

# pyright: basic
from __future__ import annotations

import hashlib
import json
import re
import secrets
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ingot.core.errors import IngotError
from ingot.core.log import logger
from ingot.core.paths import atomic_directory
from ingot.nn.weights import SafetensorsDir, WeightsError, read_json, write

NAME = "checkpoint.json"
FORMAT = 1
_NAME_PATTERN = re.compile(r"step-(\d{8,12})")
_CHUNK = 2**22


class CheckpointError(IngotError):
    """A checkpoint that cannot be used."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk whose hashes were verified."""

    path: Path
    step: int
    metadata: dict[str, Any]
    """JSON values saved with the tensors."""

    def tensors(self, part: str) -> dict[str, Tensor]:
        """Read the tensors of a part into host memory."""
        weights = SafetensorsDir(self.path)
        found = {
            name: torch.empty(entry.shape, dtype=entry.dtype)
            for name, entry in weights.entries.items()
            if name.startswith(f"{part}/")
        }
        weights.read(found)
        return {name.removeprefix(f"{part}/"): tensor for name, tensor in found.items()}

    @torch.no_grad()
    def load_into(self, model: nn.Module) -> None:
        """Copy the weights into a model, on its device: the EMA, if there is one."""
        weights = self.tensors("ema") or self.tensors("weights")
        for name, parameter in model.named_parameters():
            if name in weights:
                parameter.copy_(weights[name])
        for name, buffer in self.tensors("buffers").items():
            model.get_buffer(name).copy_(buffer)


class Checkpoints:
    """The checkpoints of one run.

    >>> import tempfile
    >>> kept = Checkpoints(Path(tempfile.mkdtemp()), keep=2)
    >>> for step in (1, 2, 3):
    ...     kept.save(step, {"weights": {"w": torch.tensor([1.0 * step])}}, {"sample": 8 * step})
    >>> kept.wait()
    >>> kept.latest().step, kept.latest().tensors("weights"), kept.latest().metadata["sample"]
    (3, {'w': tensor([3.])}, 24)
    >>> sorted(path.name for path in kept.directory.iterdir())
    ['step-00000002', 'step-00000003']
    """

    def __init__(self, directory: Path, keep: int) -> None:
        self.directory, self._keep = directory, keep
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ingot-checkpoint")
        self._writing: Future[None] | None = None

    def save(
        self,
        step: int,
        parts: Mapping[str, Mapping[str, Tensor]],
        metadata: Mapping[str, Any],
        loss: float | None = None,
    ) -> None:
        """Copy the tensors and write them in the background; `loss` decides which is the best."""
        self.wait()
        staged = {
            f"{part}/{name}": tensor.detach().to("cpu", copy=True)
            for part, tensors in parts.items()
            for name, tensor in tensors.items()
        }
        content = {"format": FORMAT, "step": step, "loss": loss, "metadata": dict(metadata)}
        text = json.dumps(content)  # now, since the caller may change it
        self._writing = self._thread.submit(self._write, step, staged, text)

    def raise_pending_error(self) -> None:
        """Raise the error of the last write, if it has failed by now."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the last checkpoint is written; raise its error."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def latest(self) -> Checkpoint | None:
        """Return the latest intact checkpoint; corrupt ones are skipped with a warning."""
        self.wait()
        for step in sorted(self._steps(), reverse=True):
            path = self.directory / f"step-{step:08}"
            try:
                return _read(path, step)
            except (CheckpointError, WeightsError, OSError) as error:
                logger(__name__).warning(
                    "skipped corrupt checkpoint %s: %s", path, str(error).partition("\n")[0]
                )
        return None

    def quarantine_after(self, step: int) -> None:
        """Rename checkpoints after this step to `corrupt-...`, and delete incomplete writes."""
        for place in (place for place in self._steps() if place > step):
            aside = f"corrupt-{place:08}-{secrets.token_hex(4)}"
            (self.directory / f"step-{place:08}").rename(self.directory / aside)
        for left in self.directory.glob(".step-*.tmp"):
            shutil.rmtree(left, ignore_errors=True)

    def _write(self, step: int, staged: dict[str, Tensor], text: str) -> None:
        path = self.directory / f"step-{step:08}"
        size = sum(tensor.nbytes for tensor in staged.values())
        with atomic_directory(path, size) as temporary:
            write(temporary, staged)
            files = {file.name: _sha256(file) for file in sorted(temporary.iterdir())}
            content = json.dumps({**json.loads(text), "files": files}, indent=1)
            (temporary / NAME).write_text(content + "\n")
        self._prune()

    def _prune(self) -> None:
        steps = sorted(self._steps())
        losses = {step: _loss(self.directory / f"step-{step:08}") for step in steps}
        known = {step: loss for step, loss in losses.items() if loss is not None}
        best = min(known, key=lambda step: known[step], default=None)
        for step in steps[: -self._keep]:
            if step != best:
                shutil.rmtree(self.directory / f"step-{step:08}", ignore_errors=True)

    def _steps(self) -> list[int]:
        if not self.directory.is_dir():
            return []
        found = (_NAME_PATTERN.fullmatch(path.name) for path in self.directory.iterdir())
        return [int(match[1]) for match in found if match]


def _read(path: Path, step: int) -> Checkpoint:
    content = read_json(path / NAME)
    files, metadata = content.get("files"), content.get("metadata")
    if content.get("format") != FORMAT or content.get("step") != step:
        raise CheckpointError(
            f"{path / NAME}: must have format {FORMAT} and step {step}, "
            f"got {content.get('format')} and {content.get('step')}",
            hint="use the version of ingot that wrote it",
        )
    if not (isinstance(files, dict) and isinstance(metadata, dict) and files):
        raise CheckpointError(f"{path / NAME}: incomplete", hint="use an older checkpoint")
    there = {file.name for file in path.iterdir()} - {NAME}
    if there != files.keys():
        raise CheckpointError(
            f"{path}: files are missing or unknown", hint="use an older checkpoint"
        )
    for name, digest in files.items():
        if _sha256(path / name) != digest:
            raise CheckpointError(f"{path / name}: hash mismatch", hint="use another checkpoint")
    return Checkpoint(path, step, metadata)


def _loss(path: Path) -> float | None:
    try:
        found = read_json(path / NAME).get("loss")
    except WeightsError:
        return None
    return found if isinstance(found, float) else None


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
