"""Which configuration a launch gets."""

# pyright: basic
from __future__ import annotations

from ingot.kernels.triton.kernel import Config, Launch
from ingot.kernels.triton.target import TARGETS


def choose(launch: Launch) -> Config:
    """The first."""
    return default(launch, "sm_90")


def default(launch: Launch, target: str) -> Config:
    """The first."""
    return launch.configs(TARGETS[target])[0]
