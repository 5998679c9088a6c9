"""The versions of one deployment, from the file that names them to the last request of an old one.

    next ──> stable ──> draining ──> gone
               ^            ^
    canary ────┴────────────┘

- **stable** gets all requests that no canary gets. There is always one.
- **next** is loaded when the file names another model or other settings. When it is ready it is
  stable at once. If it cannot be loaded, the stable version stays.
- **canary** is loaded next to the stable version and gets a share of the users until
  `ingot.serving.fleet.release` decides.
- **draining** versions finish the requests that began with them, and are then unloaded.

A version that was rolled back or cannot be loaded is not tried again until its table in the file
changes; `ingot.serving.fleet.rollbacks` remembers those that were rolled back. The admission limits
are those of all versions together.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from ingot.core.log import logger
from ingot.serving.fleet.canary import Canary
from ingot.serving.fleet.deployment import Deployment, DeploymentSpec, DeploymentState
from ingot.serving.fleet.pool import DeploymentPool
from ingot.serving.fleet.release import CanaryConfig, Verdict, gets_canary
from ingot.serving.fleet.rollbacks import Rejection
from ingot.serving.server.admission import Admission, AdmissionLimits
from ingot.serving.server.errors import RequestError
from ingot.serving.server.metrics import ModelMetrics
from ingot.serving.server.response import AnyResponse

LOAD_TIMEOUT_S = 3600.0
_log = logger(__name__)


@dataclass(frozen=True, kw_only=True)
class DeploymentTarget:
    """What a file says of a deployment."""

    spec: DeploymentSpec
    canary: DeploymentSpec | None = None
    config: CanaryConfig = field(default_factory=CanaryConfig)
    """Of the canary."""

    @property
    def name(self) -> str:
        """The name that requests give."""
        return self.spec.name


class Rollout:
    """A deployment and its versions."""

    def __init__(
        self,
        target: DeploymentTarget,
        pool: DeploymentPool,
        rejected: Mapping[str, Rejection] = MappingProxyType({}),
    ) -> None:
        """`rejected` versions are not tried if the file says the same of them as before."""
        self.target, self.name = target, target.name
        self.admission = Admission(AdmissionLimits(requests=target.spec.config.max_requests))
        self.stable = self._new(target.spec)
        pool.add(self.stable)
        self.next: Deployment | None = None
        self.canary: Canary | None = None
        self.draining: list[Deployment] = []
        self.rejected = _still_named(rejected, target)
        self.outcomes: dict[str, int] = dict.fromkeys(("promoted", "rolled_back", "failed"), 0)
        """How many versions were promoted as a canary, rolled back, and could not be loaded."""
        self._pool = pool
        self._promoted = ""
        self._loading: dict[Deployment, asyncio.Task[None]] = {}

    @property
    def versions(self) -> Iterator[tuple[str, Deployment]]:
        """The role of each version, and the version."""
        yield "stable", self.stable
        if self.next is not None:
            yield "next", self.next
        if self.canary is not None:
            yield "canary", self.canary.deployment
        yield from (("draining", one) for one in self.draining)

    def choose(self, model: str, user: str = "") -> Deployment:
        """Return the version that a request gets.

        It is the same for all requests of a user; those that name none are divided at random.
        """
        if self.canary is None or not self.canary.accepts_requests:
            return self.stable
        one, key = self.canary.deployment, user or secrets.token_hex(8)
        knows_model = model in ("", self.name, *one.adapters)
        is_chosen = gets_canary(key, self.canary.config.share, one.version)
        return one if knows_model and is_chosen else self.stable

    def describe(self) -> dict[str, Any]:
        """Return its state as the admin API shows it."""
        versions = [
            {
                "version": one.version,
                "role": role,
                "status": one.status,
                "requests_in_flight": one.use.num_requests,
                "directory": str(one.spec.directory),
            }
            for role, one in self.versions
        ]
        rejected = {version: one.reason for version, one in self.rejected.items()}
        shown: dict[str, Any] = {"name": self.name, "versions": versions, "rejected": rejected}
        if self.canary is not None and self.canary.seen is not None:
            seen = self.canary.seen
            shown["canary"] = {
                "share": self.canary.config.share,
                "requests": seen.num_requests,
                "errors": seen.num_errors,
                "drift": self.canary.drift,
                "texts": len(seen.drifts),
                "waits_for": self.canary.decision.reason,
            }
        return shown

    def read_metrics(self) -> list[ModelMetrics]:
        """Return the metrics of the versions; two of the same name are one to the reader."""
        newest = {one.version: (role, one) for role, one in reversed([*self.versions])}
        found = [one.read_metrics(role) for role, one in newest.values()]
        gauges = found[-1].gauges
        gauges |= {f"releases_{name}": count for name, count in self.outcomes.items()}
        if self.canary is not None and self.canary.drift is not None:
            gauges["canary_drift"] = self.canary.drift
        return found

    # The file

    def start(self) -> None:
        """Load a pinned deployment while the server runs."""
        if self.stable.spec.pinned and self.stable.state is DeploymentState.UNLOADED:
            self._acquire(self.stable)

    def apply(self, target: DeploymentTarget) -> None:
        """Begin to become what the file says now."""
        self.target = target
        self.rejected = _still_named(self.rejected, target)
        self._apply_to_canary()
        if self.next is not None and self.next.version != target.spec.version:
            self._drain(self.next)
            self.next = None
        self._update_limits()
        self.update(time.monotonic())
        self.start()

    def _apply_to_canary(self) -> None:
        """Continue with the canary if the file still names it."""
        canary, self.canary = self.canary, None
        if canary is None:
            return
        if canary.deployment.version == self.target.spec.version:
            if self.next is not None:
                self._drain(self.next)
            self.next = canary.deployment  # promoted by the file, if need be once it is loaded
        elif self._wants(canary.deployment):
            self.canary = canary
            canary.config = self.target.config
        else:
            self._drain(canary.deployment)

    def remove(self) -> None:
        """Drain all versions: the file does not name the deployment any more."""
        for role, one in list(self.versions):
            if role != "draining":
                self._drain(one)
        self.next = self.canary = None

    @property
    def is_gone(self) -> bool:
        """Whether no version is left after `remove`."""
        return not self.draining

    def _wants(self, one: Deployment) -> bool:
        return self.target.canary is not None and one.version == self.target.canary.version

    def _update_limits(self) -> None:
        """Use what changes without another engine."""
        spec = self.target.spec
        limits = {"max_requests": spec.config.max_requests, "timeout": spec.config.timeout}
        self.admission.limits = replace(self.admission.limits, requests=spec.config.max_requests)
        for _, one in self.versions:
            config = replace(one.spec.config, **limits)
            one.spec = replace(one.spec, config=config, memory_bytes=spec.memory_bytes)
            if one.service is not None:
                one.service.max_request_s = spec.config.timeout
        self.stable.spec = replace(self.stable.spec, pinned=spec.pinned)

    # Progress

    def update(self, now: float) -> None:
        """Take the steps that are possible now."""
        self.finish_draining()
        if self.next is not None:
            self._update_next(self.next)
        elif self._may_try(self.target.spec) and not self._is_promoted():
            self._replace()
        elif self.canary is not None:
            self._update_canary(self.canary, now)
        elif self.stable.state is DeploymentState.READY and self._may_try(self.target.canary):
            assert self.target.canary is not None
            loading = self._load(self.target.canary)
            self.canary = Canary(loading, self.stable, self.target.config)

    def _is_promoted(self) -> bool:
        """Whether the stable version is a canary that was promoted, and which the file names."""
        return self._wants(self.stable) and self.stable.version == self._promoted

    def _may_try(self, spec: DeploymentSpec | None) -> bool:
        versions = (self.stable.version, *self.rejected)
        return spec is not None and spec.version not in versions

    def _replace(self) -> None:
        """Begin to replace the stable version by that of the file."""
        spec = self.target.spec
        for one in self.draining:
            if one.version == spec.version and one.state is DeploymentState.READY:
                self.draining.remove(one)
                self._set_stable(one)
                return
        if self.stable.state in (DeploymentState.READY, DeploymentState.LOADING):
            self.next = self._load(spec)
            return
        one = self._new(spec)  # which is loaded when a request asks for it
        self._pool.add(one)
        self._set_stable(one)

    def _update_next(self, one: Deployment) -> None:
        if one.state is DeploymentState.READY:
            self.next = None
            self._set_stable(one)
        elif self._has_failed(one):
            self._reject(one, Rejection(None, _load_error(one), "failed"))

    def _update_canary(self, canary: Canary, now: float) -> None:
        one = canary.deployment
        if self._has_failed(one):
            self._reject(one, Rejection(canary.config, _load_error(one), "failed"))
            return
        if canary.seen is None:
            if one.state is DeploymentState.READY:
                canary.begin(now)
                share = 100 * canary.config.share
                _log.info("%s: canary %s gets %g %% of the users", self.name, one.version, share)
            return
        verdict, reason = canary.decide(now)
        if verdict is Verdict.ROLL_BACK:
            self._reject(one, Rejection(canary.config, reason, "rolled_back"))
        elif verdict is Verdict.PROMOTE:
            self.canary, self._promoted = None, one.version
            self.outcomes["promoted"] += 1
            self._set_stable(one)

    def _set_stable(self, one: Deployment) -> None:
        old, self.stable = self.stable, one
        self._loading.pop(one, None)
        one.spec = replace(one.spec, pinned=self.target.spec.pinned)
        self._drain(old)
        if self.canary is not None:  # it is compared with the new one
            self.canary = Canary(self.canary.deployment, one, self.canary.config)
        _log.info("%s: %s replaces %s", self.name, one.version, old.version)

    def _reject(self, one: Deployment, rejection: Rejection) -> None:
        self.rejected[one.version] = rejection
        self.outcomes[rejection.outcome] += 1
        self.next = self.canary = None  # one of them is not None, and it is this one
        verb = "rolled back" if rejection.config is not None else "not used"
        _log.error("%s: %s is %s: %s", self.name, one.version, verb, rejection.reason)
        self._drain(one)

    # Loading and unloading

    def _new(self, spec: DeploymentSpec) -> Deployment:
        """Return a version that is not loaded."""
        one = Deployment(spec, self.admission)
        one.on_end = partial(self._on_end, one)
        return one

    def _load(self, spec: DeploymentSpec) -> Deployment:
        """Begin to load a version."""
        one = self._new(replace(spec, pinned=True))
        self._pool.add(one)
        self._acquire(one)
        _log.info("%s: loading %s", self.name, one.version)
        return one

    def _acquire(self, one: Deployment) -> None:
        async def load() -> None:
            with contextlib.suppress(RequestError):  # see `_has_failed`
                await self._pool.acquire(one, LOAD_TIMEOUT_S)

        self._loading[one] = asyncio.create_task(load())

    def _has_failed(self, one: Deployment) -> bool:
        loading = self._loading.get(one)
        running = (DeploymentState.READY, DeploymentState.LOADING)
        return loading is not None and loading.done() and one.state not in running

    def _drain(self, one: Deployment) -> None:
        """Let a version finish its requests, and unload it then."""
        loading = self._loading.pop(one, None)
        if loading is not None:
            loading.cancel()
        self.draining.append(one)

    def finish_draining(self) -> None:
        """Unload the versions that have no requests any more."""
        for one in list(self.draining):
            if one.use.num_requests or one.num_waiting:
                continue
            one.stop("its version was replaced")
            if one.state in (DeploymentState.UNLOADED, DeploymentState.FAILED):
                self.draining.remove(one)
                self._pool.remove(one)

    def _on_end(self, one: Deployment, response: AnyResponse, aborted: bool) -> None:
        if self.canary is not None and not aborted:
            self.canary.on_end(one, response)


def _still_named(
    rejected: Mapping[str, Rejection], target: DeploymentTarget
) -> dict[str, Rejection]:
    """Return the rejections of which the file says the same as before."""
    configs: dict[str, CanaryConfig | None] = {target.spec.version: None}
    if target.canary is not None:
        configs[target.canary.version] = target.config
    return {
        version: one
        for version, one in rejected.items()
        if version in configs and configs[version] == one.config
    }


def _load_error(one: Deployment) -> str:
    error = "the memory does not suffice" if one.error is None else one.error.message
    return f"it cannot be loaded: {error}"
