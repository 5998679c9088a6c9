"""Kernel launches as data: the kernel, its arguments, and the configuration it is compiled in.

A `Launch` is what a call of `Kernel.launch` asks for, before a configuration is chosen. The
autotuner times it in several configurations, the compiler builds it for GPUs that are not present,
and dispatch runs it.

Under `record_launches()` launches are collected instead of executed. That is how kernels are
compiled without a GPU: an op is called on meta tensors, and each launch it would make is compiled
exactly as Triton's just-in-time compiler would compile it.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ingot.kernels.triton.target import TargetSpec

BoundBy = Literal["bandwidth", "tensor cores", "latency"]

# Always contract into fused multiply-adds, whatever TRITON_DEFAULT_FP_FUSION says: its default
# changes with Triton 3.10, and the bits of results with it.
PINNED_OPTIONS = {"enable_fp_fusion": True}


@dataclass(frozen=True, kw_only=True)
class KernelConfig:
    """Compile-time parameters that affect a kernel's speed: block sizes, warps, pipeline stages."""

    num_warps: int
    num_stages: int = 1
    constants: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, num_warps: int, num_stages: int = 1, **constants: int) -> KernelConfig:
        """Build a configuration from the kernel's tunable constants.

        >>> str(KernelConfig.of(4, 3, BLOCK_M=64))
        'BLOCK_M=64 num_warps=4 num_stages=3'
        """
        return cls(num_warps=num_warps, num_stages=num_stages, constants=tuple(constants.items()))

    def __str__(self) -> str:
        constants = "".join(f"{name}={value} " for name, value in self.constants)
        return f"{constants}num_warps={self.num_warps} num_stages={self.num_stages}"

    @property
    def options(self) -> dict[str, int]:
        """The configuration as keyword arguments of a Triton launch."""
        return {
            **dict(self.constants),
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class KernelSpec:
    """A Triton function, its tuning space, and the resource that bounds its speed."""

    name: str
    function: Any
    space: Callable[..., Iterator[KernelConfig]]
    bound_by: BoundBy
    scalar_loads: int
    """Number of single-value loads per program (a token id, a position): these may be narrow."""
    config_keys: tuple[str, ...] | None
    """Constants that the choice of a configuration may depend on; None for all of them."""


@dataclass(frozen=True, eq=False)
class Launch:
    """A requested kernel launch, without its configuration."""

    kernel: KernelSpec
    grid: Any
    args: tuple[Any, ...]
    constants: dict[str, Any]
    shape: tuple[int, ...] = ()

    def run(self, config: KernelConfig) -> None:
        """Execute the launch in this configuration."""
        options = {**self.constants, **config.options, **PINNED_OPTIONS}
        device = next(arg.device for arg in self.args if isinstance(arg, Tensor))
        # Triton launches on the current device, which may differ from the tensors' device.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self.kernel.function[self.grid](*self.args, **options)

    @property
    def bucket(self) -> tuple[Any, ...]:
        """The part of the launch, besides dtype and device, that a configuration may depend on.

        The number of rows is never part of it: batch invariance requires that a row is computed in
        the same configuration whatever the batch.
        """
        keys = self.kernel.config_keys
        constants = tuple(
            pair for pair in sorted(self.constants.items()) if keys is None or pair[0] in keys
        )
        return *constants, *(1 << (size - 1).bit_length() for size in self.shape)

    def configs(self, target: TargetSpec) -> list[KernelConfig]:
        """Return the tuning space of this launch on a target."""
        return list(self.kernel.space(target, **self.constants))


@dataclass(frozen=True)
class _Recorder:
    launches: list[Launch]
    execute: bool


_recorder: ContextVar[_Recorder | None] = ContextVar("recorder", default=None)


@contextmanager
def record_launches(execute: bool = False) -> Generator[list[Launch]]:
    """Collect launches instead of executing them; with `execute`, do both."""
    recorder = _Recorder([], execute)
    token = _recorder.set(recorder)
    try:
        yield recorder.launches
    finally:
        _recorder.reset(token)


def record(launch: Launch) -> bool:
    """Add a launch to the active recording, if any; return whether it should be executed."""
    recorder = _recorder.get()
    if recorder is None:
        return True
    recorder.launches.append(launch)
    return recorder.execute
