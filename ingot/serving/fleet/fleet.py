"""The deployments of a server, and the file that they come from.

The file is read again every second. A new content is used when it has been the same twice, so that
one that is being written is not, and if all of it is right: names, keys, directories and memory.
Otherwise nothing changes, and the reason is logged and shown by the admin API.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ingot.core.errors import IngotError
from ingot.core.log import logger
from ingot.serving.fleet.deployment import Deployment
from ingot.serving.fleet.memory import DeploymentUse, check_budget
from ingot.serving.fleet.pool import DeploymentPool
from ingot.serving.fleet.rollbacks import Rejections, RollbackFile
from ingot.serving.fleet.rollout import DeploymentTarget, Rollout
from ingot.serving.server.metrics import ModelMetrics

UPDATE_S = 0.1
READ_S = 1.0
_log = logger(__name__)


@dataclass(frozen=True, kw_only=True)
class FleetTarget:
    """What a file says."""

    deployments: Sequence[DeploymentTarget]
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class FleetSource:
    """A file of deployments."""

    path: Path
    load: Callable[[], FleetTarget]
    """Reads the file; raises the error of one that is wrong."""


class Fleet:
    """The deployments of a server by name."""

    def __init__(self, target: FleetTarget, source: FleetSource | None = None) -> None:
        self.pool = DeploymentPool([], target.memory_bytes)
        self._rollbacks = None if source is None else RollbackFile(source.path)
        rejected: Rejections = {} if self._rollbacks is None else self._rollbacks.load()
        self.rollouts = {
            one.name: Rollout(one, self.pool, rejected.get(one.name, {}))
            for one in target.deployments
        }
        self._check(target)
        self.file_error: str | None = None
        """Why the present content of the file is not used."""
        self._target, self._source = target, source
        self._content = b"" if source is None else source.path.read_bytes()
        self._removed: list[Rollout] = []

    @property
    def is_single(self) -> bool:
        """Whether there is one deployment, which requests need not name."""
        return len(self.rollouts) == 1

    async def run(self) -> None:
        """Load the pinned deployments and run until the pool is stopped."""
        tasks = [asyncio.create_task(self._update())]
        if self._source is not None:
            tasks.append(asyncio.create_task(self._follow(self._source)))
        try:
            await self.pool.run()
        finally:
            for task in tasks:
                task.cancel()

    def apply(self, target: FleetTarget) -> None:
        """Change to what a file says; raise an error, and change nothing, if it does not fit into
        the memory."""
        self._check(target)
        self.pool.budget = target.memory_bytes
        before = {one.name: one for one in self._target.deployments}
        self._target = target
        rollouts: dict[str, Rollout] = {}
        for one in target.deployments:
            rollout = self.rollouts.pop(one.name, None)
            if rollout is None:
                rollout = Rollout(one, self.pool)
                rollout.start()
            elif _identity(one) != _identity(before[one.name]):
                rollout.apply(one)
            rollouts[one.name] = rollout
        for rollout in self.rollouts.values():
            rollout.remove()
            self._removed.append(rollout)
        self.rollouts = rollouts
        self._save_rollbacks()

    def describe(self) -> dict[str, Any]:
        """Return the versions of all deployments as the admin API shows them."""
        return {
            "file": None if self._source is None else str(self._source.path),
            "file_error": self.file_error,
            "deployments": [rollout.describe() for rollout in self.rollouts.values()],
        }

    def read_metrics(self) -> list[ModelMetrics]:
        """Return the metrics of all versions as they are now."""
        return [one for rollout in self.rollouts.values() for one in rollout.read_metrics()]

    def _check(self, target: FleetTarget) -> None:
        """Raise an error if what is loaded at a time would not fit into the memory: the pinned
        deployments, the versions that replace them, and the canaries."""
        uses: list[DeploymentUse] = []
        for one in target.deployments:
            rollout = self.rollouts.get(one.name)
            running = [] if rollout is None else [rollout.stable]
            specs = [one.spec, *([] if one.canary is None else [replace(one.canary, pinned=True)])]
            versions = {deployment.version for deployment in running}
            uses += [replace(deployment.use, pinned=one.spec.pinned) for deployment in running]
            for new in [Deployment(spec) for spec in specs if spec.version not in versions]:
                new.key = one.name if not versions else f"{one.name} ({new.version})"
                versions.add(new.version)
                uses.append(new.use)
        check_budget(target.memory_bytes, uses)

    async def _update(self) -> None:
        while not self.pool.is_stopping:
            now = time.monotonic()
            for rollout in list(self.rollouts.values()):
                try:
                    rollout.update(now)
                except Exception:  # of one deployment; the others continue
                    _log.exception("the versions of %s could not be updated", rollout.name)
            for rollout in list(self._removed):
                rollout.finish_draining()
                if rollout.is_gone:
                    self._removed.remove(rollout)
            self._save_rollbacks()
            await asyncio.sleep(UPDATE_S)

    def _save_rollbacks(self) -> None:
        if self._rollbacks is not None:
            self._rollbacks.save({name: one.rejected for name, one in self.rollouts.items()})

    async def _follow(self, source: FleetSource) -> None:
        """Use the file again whenever its content has changed."""
        before = self._content
        while True:
            await asyncio.sleep(READ_S)
            content = await asyncio.to_thread(_read, source.path)
            is_new = content != self._content or self.file_error is not None
            if is_new and content == before:
                self._content = content
                await self._reload(source)
            before = content

    async def _reload(self, source: FleetSource) -> None:
        error = None
        try:
            self.apply(await asyncio.to_thread(source.load))
        except IngotError as reason:
            error = f"{reason.message}; {reason.hint}"
        except OSError as reason:  # a directory that is being replaced
            error = str(reason)
        if error is not None and error != self.file_error:
            _log.error("%s is not used, nothing has changed: %s", source.path, error)
        elif error is None:
            _log.info("using the new %s", source.path)
        self.file_error = error


def _identity(target: DeploymentTarget) -> object:
    """Return what has changed if a deployment has."""
    canary = target.canary
    return target, target.spec.version, canary and canary.version


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it is being replaced
        return b""
