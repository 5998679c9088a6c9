"""A file of several models for one server: `ingot serve fleet.toml`.

    memory_gib = 8                      # of all loaded models together

    [deployments.smollm2]               # the name that requests give as their `model`
    model = "smollm2"                   # a directory relative to the file, or ORG/NAME on the hub
    pinned = true                       # loaded at the start, and never unloaded
    adapters = { pirate = "runs/pirate" }

    [deployments.qwen]                  # loaded when the first request asks for it
    model = "Qwen/Qwen3-0.6B"
    kv_cache_gib = 0.5
    max_requests = 64

    [deployments.qwen.canary]           # a new version for a share of the users
    model = "qwen-tuned"
    share = 0.1

What a deployment does not set is that of the command line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from ingot.core import config, device
from ingot.core.errors import ConfigError
from ingot.serving.engine.adapters import check_name
from ingot.serving.fleet.autoscaler import AutoscalerConfig
from ingot.serving.fleet.deployment import DeploymentSpec
from ingot.serving.fleet.fleet import FleetTarget
from ingot.serving.fleet.release import CanaryConfig
from ingot.serving.fleet.rollout import DeploymentTarget
from ingot.serving.server.config import ServerConfig

SUFFIX = ".toml"
MAX_DEPLOYMENTS = 256
MAX_GIB = 1 << 16
MEMORY_FRACTION = 0.75
"""Default of `memory_gib`, as a fraction of the machine's memory."""
DEFAULT_KV_CACHE_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class AutoscaleTable:
    """Bounds of the number of replicas, which follows the load."""

    min: int = 1
    max: int
    max_queue_delay: float = AutoscalerConfig.max_queue_delay_s
    """Seconds that requests may wait for their first step before replicas are added."""
    max_kv_use: float = AutoscalerConfig.max_kv_use
    """Used fraction of the KV caches above which replicas are added."""
    cooldown: float = AutoscalerConfig.cooldown_s
    """Seconds of low load before replicas are removed."""

    def config(self) -> AutoscalerConfig:
        """Return it as the autoscaler's."""
        return AutoscalerConfig(
            min_replicas=self.min,
            max_replicas=self.max,
            max_queue_delay_s=self.max_queue_delay,
            max_kv_use=self.max_kv_use,
            cooldown_s=self.cooldown,
        )


@dataclass(frozen=True, kw_only=True)
class CanaryTable(CanaryConfig):
    """A new version of a deployment, and when it is promoted or rolled back."""

    model: str | None = None
    """A directory relative to the file, or ORG/NAME on the Hugging Face hub; default: that of the
    deployment, with the settings below."""
    kv_cache_dtype: Literal["auto", "int8"] | None = None
    speculate: Literal["ngram", "int4"] | None = None


@dataclass(frozen=True, kw_only=True)
class DeploymentConfig:
    """A table of the file. Fields without a description are those of `ServerConfig`."""

    model: str
    """A directory relative to the file, or ORG/NAME on the Hugging Face hub."""
    pinned: bool = False
    """Whether it is loaded at the start and never unloaded."""
    memory_gib: float | None = None
    """Memory of weights, KV cache and process; default: estimated."""
    kv_cache_gib: float | None = None
    """Size of the KV cache; default: 1 GiB."""
    adapters: Mapping[str, str] = field(default_factory=dict[str, str])
    """Directories of LoRA adapters, relative to the file, by name."""
    device: str | None = None
    tp: int | None = None
    replicas: int | None = None
    autoscale: AutoscaleTable | None = None
    """Instead of `replicas`."""
    max_requests: int | None = None
    timeout: float | None = None
    stall_timeout: float | None = None
    kv_cache_dtype: Literal["auto", "int8"] | None = None
    speculate: Literal["ngram", "int4"] | None = None
    max_loras: int | None = None
    max_lora_rank: int | None = None
    max_batch_size: int | None = None
    max_queue_delay: float | None = None
    canary: CanaryTable | None = None

    def __post_init__(self) -> None:
        for name in ("memory_gib", "kv_cache_gib"):
            _check_gib(name, getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class FleetFile:
    """The content of the file."""

    memory_gib: float | None = None
    """Memory of all loaded models; default: three quarters of the machine's."""
    deployments: Mapping[str, DeploymentConfig]
    """Models by the name that requests give."""

    def __post_init__(self) -> None:
        _check_gib("memory_gib", self.memory_gib)
        if not 1 <= len(self.deployments) <= MAX_DEPLOYMENTS:
            raise ConfigError(
                f"expected 1 to {MAX_DEPLOYMENTS} deployments, got {len(self.deployments)}",
                hint="add a table [deployments.NAME] with a model",
            )
        owners: dict[str, str] = {}
        for name, deployment in self.deployments.items():
            check_name(name, "a deployment")
            for adapter in (name, *deployment.adapters):
                if adapter in owners:
                    raise ConfigError(
                        f"'{adapter}' of deployment '{name}' is also a name of '{owners[adapter]}'",
                        hint="names of deployments and adapters are unique: rename one of them",
                    )
                owners[adapter] = name

    @property
    def memory_bytes(self) -> int:
        """The budget."""
        if self.memory_gib is None:
            return int(MEMORY_FRACTION * device.detect().memory)
        return int(self.memory_gib * 2**30)


def load_fleet(
    path: Path, server: ServerConfig, find_model: Callable[[Path | str], Path]
) -> FleetTarget:
    """Read a file.

    `server` has the settings of the command line, `find_model` returns the directory of a model.
    """
    if server.adapters:
        raise ConfigError(
            "--adapter: the base model is not known", hint=f"add it to a deployment in {path}"
        )
    fleet = config.load(FleetFile, path)
    # A single one that is not pinned would be loaded again at once.
    tables = {
        name: replace(one, pinned=one.pinned or len(fleet.deployments) == 1)
        for name, one in fleet.deployments.items()
    }
    targets = [_target(name, one, path.parent, server, find_model) for name, one in tables.items()]
    return FleetTarget(deployments=targets, memory_bytes=fleet.memory_bytes)


def _target(
    name: str,
    deployment: DeploymentConfig,
    folder: Path,
    server: ServerConfig,
    find_model: Callable[[Path | str], Path],
) -> DeploymentTarget:
    spec = _spec(name, deployment, folder, server, find_model)
    table = deployment.canary
    if table is None:
        return DeploymentTarget(spec=spec)
    changes = {one: getattr(table, one) for one in ("model", "kv_cache_dtype", "speculate")}
    own = replace(deployment, **{one: value for one, value in changes.items() if value is not None})
    canary = _spec(name, own, folder, server, find_model)
    if canary.version == spec.version:
        raise ConfigError(
            f"deployments.{name}.canary: the same version as the deployment's, {spec.version}",
            hint="give it another model, kv_cache_dtype or speculate",
        )
    thresholds = {one.name: getattr(table, one.name) for one in fields(CanaryConfig)}
    return DeploymentTarget(spec=spec, canary=canary, config=CanaryConfig(**thresholds))


def _spec(
    name: str,
    deployment: DeploymentConfig,
    folder: Path,
    server: ServerConfig,
    find_model: Callable[[Path | str], Path],
) -> DeploymentSpec:
    shared = {one.name for one in fields(ServerConfig)} - {"adapters"}
    given: dict[str, Any] = {
        one.name: value
        for one in fields(deployment)
        if one.name in shared and (value := getattr(deployment, one.name)) is not None
    }
    if deployment.kv_cache_gib is not None:
        given["kv_cache_bytes"] = int(deployment.kv_cache_gib * 2**30)
    given["adapters"] = {one: folder / path for one, path in deployment.adapters.items()}
    if deployment.autoscale is not None:
        given["autoscale"] = deployment.autoscale.config()
    local = folder / deployment.model
    memory = deployment.memory_gib
    try:
        own = replace(server, **given)
    except ConfigError as error:
        raise ConfigError(f"deployments.{name}: {error.message}", hint=error.hint) from error
    spec = DeploymentSpec(
        name=name,
        directory=find_model(local if local.is_dir() else deployment.model),
        config=own,
        pinned=deployment.pinned,
        memory_bytes=None if memory is None else int(memory * 2**30),
        default_kv_cache_bytes=DEFAULT_KV_CACHE_BYTES,
    )
    _ = spec.version  # of the files as they are now
    return spec


def _check_gib(name: str, value: float | None) -> None:
    if value is not None and not 0 < value <= MAX_GIB:
        raise ConfigError(f"{name}: expected 0 to {MAX_GIB}, got {value}", hint="give GiB")
