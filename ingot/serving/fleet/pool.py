"""Loads deployments when requests ask for them, and unloads others under a memory budget.

Each version of a deployment is one here, with a key of its own.

`ingot.serving.fleet.memory` decides; this module starts and stops the processes. Requests wait here
for their model, at most `max_requests` of it. A model that cannot be loaded fails the requests that
wait for it; the next attempt is made for a request after `RETRY_S` seconds.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from ingot.core.log import logger
from ingot.serving.fleet.deployment import Deployment, DeploymentState
from ingot.serving.fleet.memory import check_budget, plan_memory, total_bytes
from ingot.serving.server.admission import Overloaded
from ingot.serving.server.errors import ApiError, RequestError

_log = logger(__name__)
SHUTTING_DOWN = ApiError(503, "the server is shutting down", "use another server", 5)
RETRY_S = 30.0
RETRY_AFTER_S = 5
"""Seconds after which a client may ask again for a model that was not loaded in time."""


class DeploymentPool:
    """The deployments of a server by name, as many of them loaded as the budget allows."""

    def __init__(self, deployments: Sequence[Deployment], budget: int) -> None:
        self.deployments: dict[str, Deployment] = {}
        self.budget = budget
        self.on_change: Callable[[Deployment], None] = lambda _: None
        """Called when the state of a deployment has changed."""
        self._queue: dict[str, None] = {}
        """Deployments that requests wait for, in order."""
        self._held: frozenset[str] = frozenset()
        self._failed_at: dict[str, float] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._required: set[str] = set()
        """Pinned deployments at the start."""
        self._error: Exception | None = None
        """Of a pinned deployment that could not be loaded at the start."""
        self._weights: dict[str, int] = {}
        """Shared memory of weights that several deployments have: its file descriptor."""
        self._changed = asyncio.Event()
        self._is_scheduled = False
        """Whether `_update` will run in the next iteration of the event loop."""
        self._stopping = False
        self._stopped = asyncio.Event()
        self._num_added = 0
        check_budget(budget, [one.use for one in deployments])
        for one in deployments:
            self.add(one)

    @property
    def _log_level(self) -> int:
        return logging.INFO if len(self.deployments) > 1 else logging.DEBUG

    @property
    def is_stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._stopping

    @property
    def used_bytes(self) -> int:
        """Memory of the deployments that have a process."""
        uses = [one.use for one in self.deployments.values()]
        return total_bytes(use.footprint for use in uses if use.is_loaded)

    def add(self, deployment: Deployment) -> None:
        """Add a deployment, or another version of one; it is not loaded yet."""
        if deployment.key in self.deployments:
            deployment.key = f"{deployment.name} {deployment.version}"
        if deployment.key in self.deployments:  # the version is still being drained
            self._num_added += 1
            deployment.key += f" {self._num_added}"
        key = deployment.weights
        others = [one for one in self.deployments.values() if one.weights == key]
        is_private = any(one.use.is_loaded for one in others) and key not in self._weights
        deployment.shares_no_weights = is_private
        deployment.on_change = self._on_change
        self.deployments[deployment.key] = deployment

    def remove(self, deployment: Deployment) -> None:
        """Forget a deployment that is not loaded."""
        assert not deployment.use.is_loaded
        for entries in (self.deployments, self._failed_at, self._tasks):
            entries.pop(deployment.key, None)
        self.update()

    async def run(self) -> None:
        """Load the pinned deployments and run until `stop`; raise the error of a pinned one that
        cannot be loaded."""
        for one in list(self.deployments.values()):
            if one.spec.pinned:
                self._required.add(one.key)
                self._start(one)
        await self._stopped.wait()
        if self._error is not None:
            raise self._error

    async def stop(self) -> None:
        """Stop all processes."""
        self._stopping = True
        for one in self.deployments.values():
            one.stop("the server is stopping")
        self._wake()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._stopped.set()

    async def acquire(self, deployment: Deployment, timeout: float) -> None:
        """Wait until a deployment is loaded; raise an error after `timeout` seconds.

        It may be unloaded again as soon as the caller awaits something else without a request in
        flight.
        """
        if not self._can_serve(deployment):
            await self._wait(deployment, time.monotonic() + timeout)
        deployment.last_use = time.monotonic()

    @contextmanager
    def use(self, deployment: Deployment) -> Generator[None]:
        """Keep a deployment loaded during a request of the admin API."""
        deployment.num_admin_requests += 1
        try:
            yield
        finally:
            deployment.num_admin_requests -= 1
            self.update()

    def update(self) -> None:
        """Load, unload and hold deployments: something has changed, such as a request's end."""
        if self._queue and not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._update)

    def _update(self) -> None:
        self._is_scheduled = False
        if self._stopping:
            return
        uses = [one.use for one in self.deployments.values()]
        plan = plan_memory(self.budget, uses, list(self._queue))
        released, self._held = self._held - {*plan.hold}, frozenset(plan.hold)
        for name in plan.unload:
            _log.log(self._log_level, "unloading %s: another model needs its memory", name)
            self.deployments[name].stop("the model is being unloaded")
        for name in plan.load:
            self._start(self.deployments[name])
        if released:
            self._wake()

    def _can_serve(self, deployment: Deployment) -> bool:
        return deployment.state is DeploymentState.READY and deployment.key not in self._held

    async def _wait(self, deployment: Deployment, deadline: float) -> None:
        limit = deployment.spec.config.max_requests
        if deployment.num_waiting >= limit:
            raise Overloaded(f"{limit:,} requests wait for '{deployment.name}' to be loaded", 2.0)
        self._check_failure(deployment)
        deployment.num_waiting += 1
        self._queue.setdefault(deployment.key)
        try:
            self.update()
            while not self._can_serve(deployment):
                self._check_failure(deployment)
                changed = self._changed
                try:
                    async with asyncio.timeout(deadline - time.monotonic()):
                        await changed.wait()
                except TimeoutError:
                    raise RequestError(self._timeout_error(deployment)) from None
        finally:
            deployment.num_waiting -= 1
            if not deployment.num_waiting:
                self.update()
                del self._queue[deployment.key]

    def _check_failure(self, deployment: Deployment) -> None:
        """Raise the error of a deployment that has failed a short time ago, or while stopping."""
        if self._stopping:
            raise RequestError(SHUTTING_DOWN)
        error, now = deployment.error, time.monotonic()
        left = self._failed_at.get(deployment.key, -RETRY_S) + RETRY_S - now
        if error is not None and left > 0:
            message = f"'{deployment.name}' could not be loaded: {error.message}"
            raise RequestError(ApiError(503, message, error.hint, int(left) + 1))

    def _timeout_error(self, deployment: Deployment) -> ApiError:
        name = deployment.name
        if deployment.state is DeploymentState.LOADING:
            message, hint = f"'{name}' is still loading", "retry soon"
        else:
            others = [one.use for one in self.deployments.values() if one is not deployment]
            busy = ", ".join(
                f"'{use.name}' is {'pinned' if use.pinned else 'busy'}"
                for use in others
                if use.is_loaded and (use.pinned or use.num_requests)
            )
            message = f"no memory to load '{name}'" + (f": {busy}" if busy else "")
            hint = "retry soon"
        return ApiError(503, message, hint, RETRY_AFTER_S)

    def _start(self, deployment: Deployment) -> None:
        _log.log(self._log_level, "loading %s", deployment.key)
        self._failed_at.pop(deployment.key, None)
        serving = deployment.start(self._weights_fd(deployment))
        self._tasks[deployment.key] = asyncio.create_task(self._watch(deployment, serving))

    async def _watch(self, deployment: Deployment, serving: asyncio.Task[None]) -> None:
        name, started = deployment.key, time.monotonic()
        try:
            await serving
            _log.log(self._log_level, "unloaded %s after %.0f s", name, time.monotonic() - started)
        except Exception as error:
            assert deployment.error is not None
            if deployment.key in self._required and not deployment.num_loads:
                self._error = error
                self._stopped.set()
            else:
                _log.error("%s could not be loaded: %s", name, deployment.error.message)
        finally:
            self._close_weights(deployment)

    def _weights_fd(self, deployment: Deployment) -> int | None:
        """Return the file of weights that the processes of the deployment, or of several, share;
        None if it has a single process of its own."""
        key = deployment.weights
        sharing = [one for one in self.deployments.values() if one.weights == key]
        if (
            sum(one.spec.config.max_replicas for one in sharing) < 2
            or not deployment.shares_weights
        ):
            return None
        if key not in self._weights and hasattr(os, "memfd_create"):
            flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
            self._weights[key] = os.memfd_create("ingot-weights", flags)
        return self._weights.get(key)

    def _close_weights(self, deployment: Deployment) -> None:
        key = deployment.weights
        users = [one.use.is_loaded for one in self.deployments.values() if one.weights == key]
        if key in self._weights and not any(users):
            os.close(self._weights.pop(key))

    def _on_change(self, deployment: Deployment) -> None:
        if deployment.state is DeploymentState.FAILED:
            self._failed_at[deployment.key] = time.monotonic()
        self.on_change(deployment)
        self._wake()
        self.update()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
