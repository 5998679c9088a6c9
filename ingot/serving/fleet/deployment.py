"""A version of a deployment: one model with its engines, adapters, admission and metrics.

    unloaded -> loading -> ready -> unloading -> unloaded
                   |
                   +-> failed

Only a loaded one has a process, a tokenizer and a chat template. Its metrics, its adapters and what
is known of the model stay.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path

from ingot.core.errors import ConfigError, IngotError
from ingot.core.log import logger
from ingot.interop.signature import is_classifier
from ingot.interop.tokenizer import Tokenizer
from ingot.serving.engine.adapters import check_name
from ingot.serving.fleet.memory import DeploymentUse, Footprint
from ingot.serving.fleet.version import version_of
from ingot.serving.server.admission import Admission, AdmissionLimits, VersionAdmission
from ingot.serving.server.config import ServerConfig
from ingot.serving.server.metrics import Metrics, ModelMetrics
from ingot.serving.server.service import AnyResponse, Service
from ingot.serving.workers.cluster import RayCluster
from ingot.serving.workers.replicas import ReplicaSet
from ingot.serving.workers.scaling import Autoscaler
from ingot.serving.workers.worker import WorkerSettings

_log = logger(__name__)
QUEUE_DEPTH_FACTOR = 8
"""Maximum tokens in flight, as a multiple of the KV cache's capacity."""
PROCESS_BYTES = 400 << 20
"""Memory of an engine process without weights and KV cache: 0.24 GiB after loading SmolLM2, and
activations."""

ENGINE_SETTINGS = (
    *("device", "tp", "ray", "kv_cache_bytes", "kv_cache_dtype", "speculate", "max_loras"),
    *("max_lora_rank", "max_batch_size", "max_queue_delay", "stall_timeout", "replicas"),
    "autoscale",
)
"""Settings of a deployment that need other engine processes when they change."""


class DeploymentState(StrEnum):
    """State of a deployment."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    READY = "ready"
    UNLOADING = "unloading"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class DeploymentSpec:
    """What to serve under a name, and how."""

    name: str
    directory: Path
    config: ServerConfig
    """`device`, `max_requests`, `timeout`, `kv_cache_bytes`, `adapters`... of this model."""
    pinned: bool = True
    """Whether it is loaded at the start and stays."""
    memory_bytes: int | None = None
    """Memory that it takes; None for an estimate."""
    default_kv_cache_bytes: int | None = None
    """Size of a KV cache whose size is not configured."""

    def __post_init__(self) -> None:
        for name in self.config.adapters:
            check_name(name)
            if name == self.name:
                raise ConfigError(
                    f"adapter '{name}' has the name of its base model", hint="give it another name"
                )

    @cached_property
    def version(self) -> str:
        """The name of its weights and settings: see `ingot.serving.fleet.version`."""
        config = self.config
        settings = {name: getattr(config, name) for name in ENGINE_SETTINGS}
        return version_of(self.directory, {**settings, "adapters": _digests_of(config.adapters)})


class Deployment:
    """Serves a model while it is loaded."""

    def __init__(self, spec: DeploymentSpec, admission: Admission | None = None) -> None:
        """`admission` is that of all versions."""
        self.spec, self.name, self.version = spec, spec.name, spec.version
        self.key = spec.name
        """Its name among those that have a process: another one while there are more versions."""
        self.created = int(time.time())
        self.state = DeploymentState.UNLOADED
        self.error: IngotError | None = None
        """Why it could not be loaded."""
        config = spec.config
        self.engine = ReplicaSet(
            num_replicas=config.min_replicas,
            max_replicas=config.max_replicas,
            stall_timeout=config.stall_timeout,
            cluster=RayCluster(config.max_replicas) if config.ray else None,
        )
        limits = AdmissionLimits(requests=config.max_requests)
        self.admission = VersionAdmission(admission or Admission(limits))
        self.metrics = Metrics()
        self.service: Service | None = None
        """Handles requests; None if it is unloaded."""
        self.last_use = 0.0
        self.num_waiting = 0
        """Requests that wait until it is loaded."""
        self.num_admin_requests = 0
        """Running requests of the admin API."""
        self.num_loads = 0
        self.started_at = 0.0
        """When it began to load."""
        self.on_change: Callable[[Deployment], None] = lambda _: None
        """Called when the state has changed, or an engine has become ready again."""
        self.on_end: Callable[[AnyResponse, bool], None] = lambda response, aborted: None
        """Called when a request has finished, or its client has disconnected."""
        self.shares_no_weights = False
        """Whether those that have the same weights cannot share theirs any more."""
        self._directory = str(spec.directory.resolve())
        self._weights_bytes = _weights_bytes(spec.directory)
        self._is_classifier = is_classifier(spec.directory)
        paths = map(Path, spec.config.adapters.values())
        self._adapter_bytes = sum(map(_weights_bytes, paths))
        self.engine.on_ready = self._on_ready

    @property
    def status(self) -> str:
        """The state, as clients see it: an engine that is being restarted is loading."""
        is_restarting = self.state is DeploymentState.READY and not self.engine.ready
        return str(DeploymentState.LOADING if is_restarting else self.state)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that requests can select."""
        loaded = self.engine.adapters if self.engine.info is not None else self.spec.config.adapters
        return tuple(loaded)

    @property
    def shares_weights(self) -> bool:
        """Whether its processes share the weights: those on the CPU of this machine do."""
        config, info = self.spec.config, self.engine.info
        device = config.device if info is None else info.device
        is_local = device in ("auto", "cpu") and config.tp == 1 and not config.ray
        return is_local and not self.shares_no_weights

    @property
    def weights(self) -> str:
        """Identity of the weights; deployments of the same share them."""
        return self._directory if self.shares_weights else f"those of {self.key}"

    @property
    def footprint(self) -> Footprint:
        """The memory that it takes when it is loaded."""
        spec, info = self.spec, self.engine.info
        num_processes = spec.config.tp * spec.config.max_replicas
        # Each rank has them all until it divides them.
        weights_bytes = self._weights_bytes * (1 if self.shares_weights else num_processes)
        if spec.memory_bytes is not None:
            weights_bytes = min(weights_bytes, spec.memory_bytes)
            private_bytes = spec.memory_bytes - weights_bytes
        else:
            configured = spec.config.kv_cache_bytes or spec.default_kv_cache_bytes or 0
            configured = 0 if self._is_classifier else configured
            kv_cache_bytes = configured if info is None else info.kv_cache_bytes
            private_bytes = PROCESS_BYTES + kv_cache_bytes + self._adapter_bytes
            if spec.config.speculate == "int4":
                private_bytes += self._weights_bytes // 3  # the copy with its scales
            private_bytes *= num_processes
        return Footprint(
            weights=self.weights, weights_bytes=weights_bytes, private_bytes=private_bytes
        )

    @property
    def use(self) -> DeploymentUse:
        """What the memory budget has to know."""
        state = self.state
        return DeploymentUse(
            name=self.key,
            footprint=self.footprint,
            is_loaded=state not in (DeploymentState.UNLOADED, DeploymentState.FAILED),
            is_ready=state is DeploymentState.READY,
            is_unloading=state is DeploymentState.UNLOADING,
            pinned=self.spec.pinned,
            num_requests=self.admission.requests + self.num_admin_requests,
            last_use=self.last_use,
        )

    def prepare(self) -> None:
        """Load the tokenizer; raise the error of one that is missing or malformed."""
        self.service = Service(
            model=self.name,
            version=self.version,
            tokenizer=_load_tokenizer(self.spec.directory),
            engine=self.engine,
            admission=self.admission,
            max_request_s=self.spec.config.timeout,
            metrics=self.metrics,
            on_end=lambda response, aborted: self.on_end(response, aborted),
        )

    def start(self, weights_fd: int | None = None) -> asyncio.Task[None]:
        """Load the model and serve until `stop`.

        The task ends when the process has exited; it raises the error of a model that cannot be
        loaded.
        """
        self.error, self.started_at = None, time.monotonic()
        self._set_state(DeploymentState.LOADING)
        return asyncio.create_task(self._run(self._worker_settings(weights_fd)))

    async def _run(self, settings: WorkerSettings) -> None:
        try:
            if self.service is None:
                await asyncio.to_thread(self.prepare)
            if self.state is DeploymentState.LOADING:
                await self._run_engines(settings)
        except Exception as error:
            is_known = isinstance(error, IngotError)
            if not is_known:
                _log.exception("the engine of %s could not be run", self.key)
            text = f"{type(error).__name__}: {error}"[:1000]
            self.error = error if is_known else IngotError(text, hint="see the server's log")
            raise
        finally:
            self.service = None
            failed = self.error is not None
            self._set_state(DeploymentState.FAILED if failed else DeploymentState.UNLOADED)

    async def _run_engines(self, settings: WorkerSettings) -> None:
        autoscale = self.spec.config.autoscale
        if autoscale is None:
            await self.engine.run(settings)
            return
        scaling = asyncio.create_task(Autoscaler(self.engine, autoscale).run())
        try:
            await self.engine.run(settings)
        finally:
            scaling.cancel()

    def stop(self, reason: str) -> None:
        """Stop serving; the task ends when the process has exited."""
        if self.state in (DeploymentState.LOADING, DeploymentState.READY):
            self._set_state(DeploymentState.UNLOADING)
            self.engine.stop(reason)

    def read_metrics(self, role: str = "stable") -> ModelMetrics:
        """Return the metrics as they are now."""
        load = self.engine.load
        gauges: dict[str, float] = {
            "requests_in_flight": self.admission.requests,
            "tokens_in_flight": self.admission.tokens,
            "requests_rejected": self.admission.num_rejected,
            "engine_up": self.engine.num_ready,
            "replicas": self.engine.num_replicas,
            "queue_delay_seconds": load.queue_delay_s if load is not None else 0.0,
            "engine_restarts": self.engine.restarts,
            "request_retries": self.engine.num_retries,
            "model_loads": self.num_loads,
        }
        engines = [(engine.info, engine.stats) for engine in self.engine.engines]
        return ModelMetrics(self.name, self.metrics, engines, gauges, self.version, role)

    def _worker_settings(self, weights_fd: int | None) -> WorkerSettings:
        config = self.spec.config
        return WorkerSettings(
            directory=str(self.spec.directory),
            device=config.device,
            tp=config.tp,
            engines_per_machine=config.max_replicas,
            kv_cache_bytes=config.kv_cache_bytes,
            default_kv_cache_bytes=self.spec.default_kv_cache_bytes,
            kv_cache_dtype=config.kv_cache_dtype,
            speculate=config.speculate,
            adapters={name: str(Path(path).absolute()) for name, path in config.adapters.items()},
            max_loras=config.max_loras,
            max_lora_rank=config.max_lora_rank,
            weights_fd=weights_fd,
            max_batch_size=config.max_batch_size,
            max_queue_delay=config.max_queue_delay,
            json_logs=config.json_logs,
        )

    def _on_ready(self) -> None:
        """A worker has loaded the model."""
        info = self.engine.info
        assert info is not None
        total = self.admission.total
        limits = AdmissionLimits(requests=self.spec.config.max_requests)
        if info.num_blocks:
            capacity = max(self.engine.num_replicas, 1) * info.num_blocks * info.block_size
            limits = replace(limits, tokens=QUEUE_DEPTH_FACTOR * capacity)
        total.limits = limits
        if self.state is DeploymentState.LOADING:
            self.num_loads += 1
        if self.state in (DeploymentState.LOADING, DeploymentState.READY):
            self._set_state(DeploymentState.READY)

    def _set_state(self, state: DeploymentState) -> None:
        self.state = state
        self.on_change(self)


def _load_tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.empty() if is_classifier(directory) else Tokenizer.load(directory)


def _digests_of(adapters: Mapping[str, Path | str]) -> dict[str, str]:
    """Return the versions of adapters by name; one that does not exist is an error when it is
    loaded."""
    paths = {name: Path(path) for name, path in adapters.items()}
    return {name: version_of(path, {}) if path.is_dir() else "" for name, path in paths.items()}


def _weights_bytes(directory: Path) -> int:
    """Return the size of the weights' files."""
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))
