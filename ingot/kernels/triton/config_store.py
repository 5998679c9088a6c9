"""Choice of a launch's configuration: tuned on this GPU, else the target's default, else the first.

Tuned configurations are written by `ingot tune` (`ingot.kernels.tuned`): the fastest one for a
kernel's source, its constants and shape bucket, a dtype and a device. Defaults are in
`defaults.json`, ranked from the compiled code by `python -m tools.gpu_defaults`.

The number of rows is not part of any key: a row's bits depend on the configuration.
"""

# pyright: basic
from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ingot.kernels import tuned
from ingot.kernels.triton import interpreting
from ingot.kernels.triton.launch import KernelConfig, Launch
from ingot.kernels.triton.target import TARGETS, TargetSpec, nearest

DEFAULTS = Path(__file__).parent / "defaults.json"
config_cache: dict[Any, KernelConfig] = {}
"""Configurations that this process has chosen, by `dispatch_key`."""


def choose_config(launch: Launch) -> KernelConfig:
    """Return the configuration for a launch on the device of its tensors."""
    key = dispatch_key(launch)
    config = config_cache.get(key)
    if config is None:
        target, device = current_target()
        config = load_tuned(launch, device, target) or default_config(launch, target.name)
        config_cache[key] = config
    return config


def dispatch_key(launch: Launch) -> tuple[str, tuple[Any, ...], str]:
    """Return what dispatch distinguishes: launches with equal keys share a configuration."""
    return launch.kernel.name, launch.bucket, _dtype(launch)


@cache
def current_target() -> tuple[TargetSpec, str]:
    """Return this process's target and device name; sm_90 in Triton's interpreter."""
    if interpreting():
        return TARGETS["sm_90"], "interpreter"
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return nearest(device_arch()), properties.name


@cache
def device_arch() -> str:
    """Return the architecture of this process's device, such as "sm_90" or "gfx942"."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    if torch.version.hip:
        return properties.gcnArchName.partition(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def default_config(launch: Launch, target: str) -> KernelConfig:
    """Return the target's best default within the launch's space, else the first of the space."""
    configs = {str(config): config for config in launch.configs(TARGETS[target])}
    ranking = load_defaults().get(launch.kernel.name, {}).get(target, [])
    return next(
        (configs[name] for name in ranking if name in configs), next(iter(configs.values()))
    )


@cache
def load_defaults() -> dict[str, dict[str, list[str]]]:
    """Return the ranked default configurations by kernel and target, best first."""
    return json.loads(DEFAULTS.read_text()) if DEFAULTS.exists() else {}


def save(launch: Launch, device: str, config: KernelConfig, microseconds: float) -> None:
    """Store the fastest configuration of a launch on a device."""
    tuned.save(_key(launch, device), str(config), microseconds)
    config_cache.pop(dispatch_key(launch), None)


def load_tuned(launch: Launch, device: str, target: TargetSpec) -> KernelConfig | None:
    """Return the stored configuration, if there is one that is still in the launch's space."""
    stored = tuned.load(_key(launch, device))
    return next((c for c in launch.configs(target) if str(c) == stored), None)


def _key(launch: Launch, device: str) -> tuned.Key:
    source = getattr(launch.kernel.function, "cache_key", "")
    return tuned.Key(launch.kernel.name, source, repr(launch.bucket), _dtype(launch), device)


def _dtype(launch: Launch) -> str:
    tensors = (arg for arg in launch.args if isinstance(arg, torch.Tensor))
    return str(next(tensors).dtype).removeprefix("torch.")
