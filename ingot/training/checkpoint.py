"""Checkpoints: everything that determines the future of a run, complete or absent.

    checkpoints/step-00000100/
        model.safetensors     all tensors, as `part/name`; several shards if they are large
        checkpoint.json       metadata, and the SHA-256 of every other file

A checkpoint is written to a temporary directory and renamed when it is complete
(`paths.atomic_directory`), so a killed process leaves the previous one intact. A disk may still
lose data that it has acknowledged: the reader compares the hashes first and skips corrupt
checkpoints.

With several ranks, each writes the rows that it stores, in a file of its own, and the main rank
renames the directory when all have written theirs:

        rank-00002-of-00004.safetensors    tensors as `part/name`, or rows: `part/name[8:16]`

A reader gets whole tensors, so a run continues on any number of ranks. Replicas that train on their
own (`parallel.local_steps`) have parts of their own: `weights` is that of the first, and
`replica-1/weights` that of the second; `outer` has the weights of the last synchronization.

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
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ingot.core.errors import IngotError
from ingot.core.log import logger
from ingot.core.paths import atomic_directory, write_atomic
from ingot.nn.weights import INDEX, SafetensorsDir, WeightsError, read_json, write, write_file
from ingot.parallel.ranks import Ranks

NAME = "checkpoint.json"
FORMAT = 1
_NAME_PATTERN = re.compile(r"step-(\d{8,12})")
_ROWS_PATTERN = re.compile(r"(.+)\[(\d{1,12}):(\d{1,12})\]")
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
        """Read the tensors of a part into host memory; rows of several ranks are joined."""
        weights = SafetensorsDir(self.path)
        own = {n: entry for n, entry in weights.entries.items() if n.startswith(f"{part}/")}
        whole: dict[str, Tensor] = {}
        into: dict[str, Tensor] = {}
        for base, slices in _group_rows(own).items():
            first = own[slices[0][0]]
            length = sum(own[name].shape[0] for name, rows in slices if rows != _ALL)
            covered = sorted((rows.start, rows.stop) for _, rows in slices if rows != _ALL)
            whole_too = covered and len(covered) < len(slices)
            if whole_too or [0, *(stop for _, stop in covered)] != [
                *(start for start, _ in covered),
                length,
            ]:
                raise CheckpointError(
                    f"{self.path}: rows of '{base}' are missing", hint="use an older checkpoint"
                )
            shape = (length, *first.shape[1:]) if covered else first.shape
            whole[base.removeprefix(f"{part}/")] = tensor = torch.empty(shape, dtype=first.dtype)
            into |= {n: tensor if rows == _ALL else tensor[rows] for n, rows in slices}
        weights.read(into)
        return whole

    @torch.no_grad()
    def load_into(self, model: nn.Module) -> None:
        """Copy the weights into a model, on its device: the EMA, if there is one, or those that
        replicas were given at their last synchronization."""
        weights = self.tensors("ema") or self.tensors("outer") or self.tensors("weights")
        for name, parameter in model.named_parameters():
            if name in weights:
                parameter.copy_(weights[name])
        for name, buffer in self.tensors("buffers").items():
            model.get_buffer(name).copy_(buffer)


_ALL = slice(0, 0)


def name_rows(name: str, rows: slice) -> str:
    """Return the name of some rows of a tensor.

    >>> name_rows("weight|exp_avg", slice(8, 16))
    'weight|exp_avg[8:16]'
    """
    return f"{name}[{rows.start}:{rows.stop}]"


def _group_rows(names: Iterable[str]) -> dict[str, list[tuple[str, slice]]]:
    """Return the names of each tensor's slices and their rows, `_ALL` if it is whole."""
    found: dict[str, list[tuple[str, slice]]] = {}
    for name in names:
        match = _ROWS_PATTERN.fullmatch(name)
        base, rows = (match[1], slice(int(match[2]), int(match[3]))) if match else (name, _ALL)
        found.setdefault(base, []).append((name, rows))
    return found


class Checkpoints:
    """The checkpoints of one run, on one of its ranks.

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

    def __init__(self, directory: Path, keep: int, ranks: Ranks | None = None) -> None:
        self.directory, self._keep = directory, keep
        self._ranks = Ranks() if ranks is None else ranks
        # The same on all ranks, and unlike that of a run which was killed here before.
        self._token = int(self._ranks.gather([secrets.randbits(48)])[0][0])
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
        if self._ranks.size > 1:
            self._write_rank(path, staged, text)
            return
        size = sum(tensor.nbytes for tensor in staged.values())
        with atomic_directory(path, size) as temporary:
            write(temporary, staged)
            files = {file.name: _sha256(file) for file in sorted(temporary.iterdir())}
            content = json.dumps({**json.loads(text), "files": files}, indent=1)
            (temporary / NAME).write_text(content + "\n")
        self._prune()

    def _write_rank(self, path: Path, staged: dict[str, Tensor], text: str) -> None:
        """Write the tensors of this rank; the main rank completes the checkpoint."""
        rank, size = self._ranks.rank, self._ranks.size
        temporary = path.parent / f".{path.name}.{self._token:012x}.tmp"
        temporary.mkdir(parents=True, exist_ok=True)
        file = temporary / f"rank-{rank:05}-of-{size:05}.safetensors"
        if staged:
            write_file(file, staged)
        digest = _sha256(file) if staged else None
        written = {"file": file.name, "sha256": digest, "tensors": list(staged)}
        write_atomic(temporary / f"rank-{rank:05}.json", json.dumps(written))
        if not self._ranks.is_main:
            return
        parts = [_await_json(temporary / f"rank-{other:05}.json") for other in range(size)]
        index = {tensor: part["file"] for part in parts for tensor in part["tensors"]}
        table = json.dumps({"metadata": {}, "weight_map": index}, indent=1)
        write_atomic(temporary / INDEX, table + "\n")
        files = {part["file"]: part["sha256"] for part in parts if part["tensors"]}
        files[INDEX] = _sha256(temporary / INDEX)
        for other in range(size):
            (temporary / f"rank-{other:05}.json").unlink()
        content = json.dumps({**json.loads(text), "files": files}, indent=1)
        write_atomic(temporary / NAME, content + "\n")
        temporary.replace(path)
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


def _await_json(path: Path) -> dict[str, Any]:
    """Read a file that another rank writes; if that fails, this rank is stopped as well."""
    while not path.exists():
        time.sleep(0.01)
    return read_json(path)


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
