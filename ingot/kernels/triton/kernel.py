"""A kernel, declared once: its function, its tuning space, what bounds it.

    @kernel(space=row_space, bound="bandwidth")
    @triton.jit
    def _silu(x, y, size, BLOCK: tl.constexpr): ...

    _silu.launch(grid, x, y, size, BLOCK=1024)

`space` lists the configurations for a launch that can fit a target, given the launch's own
constants: number of warps, of pipeline stages, and constants of the kernel that only speed depends
on. The first is a reasonable one anywhere. Which is taken is `choose`'s business: a tuned one where
a GPU has been asked (`tuned.py`), else the default for the target (`defaults.json`, chosen by
`ingot kernels` from the compiled code), else the first. Never does it depend on the number of rows.

While `recording`, a launch is written down and not made. That is how kernels are compiled without
a GPU: an op is called on tensors without memory, and what it would launch is compiled, as Triton's
own just-in-time compiler would have it.
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

from ingot.kernels.triton.target import Target

Bound = Literal["bandwidth", "tensor cores", "latency"]

# Contraction into fused multiply-adds, whatever TRITON_DEFAULT_FP_FUSION says: its default changes
# with Triton 3.10, and bits with it.
PINNED = {"enable_fp_fusion": True}

_recorded: ContextVar[tuple[list[Launch], bool] | None] = ContextVar("recorded", default=None)
KERNELS: dict[str, Kernel] = {}


@dataclass(frozen=True, kw_only=True)
class Config:
    """One way to compile a kernel."""

    warps: int
    stages: int = 1
    constants: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, warps: int, stages: int = 1, **constants: int) -> Config:
        """A configuration with these constants of the kernel.

        >>> str(Config.of(4, 3, TILE=64))
        'TILE=64 warps=4 stages=3'
        """
        return cls(warps=warps, stages=stages, constants=tuple(constants.items()))

    def __str__(self) -> str:
        tiles = "".join(f"{name}={value} " for name, value in self.constants)
        return f"{tiles}warps={self.warps} stages={self.stages}"

    @property
    def options(self) -> dict[str, int]:
        """As keyword arguments of a launch."""
        return {**dict(self.constants), "num_warps": self.warps, "num_stages": self.stages}


@dataclass(frozen=True, kw_only=True, eq=False)
class Kernel:
    """A Triton function and all that is known of it beforehand."""

    name: str
    function: Any
    space: Callable[..., Iterator[Config]]
    bound: Bound
    scalars: int
    """Loads of one value that a program makes: a token, a position."""
    keys: tuple[str, ...] | None
    """Constants that the choice of a configuration may depend on; None for all."""

    def launch(self, grid: Any, *args: Any, shape: tuple[int, ...] = (), **constants: Any) -> None:
        """Run it on a grid: a tuple, or a function of all constants that gives one.

        `shape` is what else a configuration may be tuned for, rounded up to powers of 2.
        """
        launch = Launch(self, grid, args, constants, shape)
        recorded = _recorded.get()
        if recorded is not None:
            launches, made = recorded
            launches.append(launch)
            if not made:
                return
        from ingot.kernels.triton.tuned import choose

        launch.run(choose(launch))


@dataclass(frozen=True, eq=False)
class Launch:
    """A launch that was asked for."""

    kernel: Kernel
    grid: Any
    args: tuple[Any, ...]
    constants: dict[str, Any]
    shape: tuple[int, ...] = ()

    def run(self, config: Config) -> None:
        """Make it, in this configuration."""
        options = {**self.constants, **config.options, **PINNED}
        device = next(arg.device for arg in self.args if isinstance(arg, Tensor))
        # Triton launches on the current device, which need not be the tensors'.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self.kernel.function[self.grid](*self.args, **options)

    @property
    def bucket(self) -> tuple[Any, ...]:
        """What the choice of a configuration depends on, besides dtype and device."""
        keys = self.kernel.keys
        named = tuple(
            pair for pair in sorted(self.constants.items()) if keys is None or pair[0] in keys
        )
        return *named, *(1 << (size - 1).bit_length() for size in self.shape)

    def configs(self, target: Target) -> list[Config]:
        """The tuning space of this launch on a target."""
        return list(self.kernel.space(target, **self.constants))


def kernel(
    *,
    space: Callable[..., Iterator[Config]],
    bound: Bound,
    scalars: int = 0,
    keys: tuple[str, ...] | None = None,
) -> Callable[[Any], Kernel]:
    """Declare the decorated Triton function a kernel."""

    def declare(function: Any) -> Kernel:
        name = function.__name__.strip("_")
        KERNELS[name] = Kernel(
            name=name, function=function, space=space, bound=bound, scalars=scalars, keys=keys
        )
        return KERNELS[name]

    return declare


@contextmanager
def recording(made: bool = False) -> Generator[list[Launch]]:
    """Write launches down instead of making them, or besides."""
    launches: list[Launch] = []
    token = _recorded.set((launches, made))
    try:
        yield launches
    finally:
        _recorded.reset(token)


def by_elements(target: Target, count: int, least: int = 8) -> Iterator[Config]:
    """Configurations for a tile of so many elements: between `least` and 32 of them a thread.

    8 halves are the 128 bits of the widest load; with more than 32 a thread, what is computed from
    them no longer fits registers.

    >>> from ingot.kernels.triton.target import TARGETS
    >>> [str(config) for config in by_elements(TARGETS["sm_90"], 2048)]
    ['warps=4 stages=1', 'warps=8 stages=1', 'warps=2 stages=1']
    """
    most = 1024 // target.lanes
    shares = {warps: count // (target.lanes * warps) for warps in (1, 2, 4, 8, 16, 32)}
    fitting = [warps for warps, share in shares.items() if least <= share <= 32 and warps <= most]
    # 16 a thread first: two loads in flight.
    for warps in sorted(fitting, key=lambda warps: abs(shares[warps] - 16)):
        yield Config.of(warps)
    if not fitting:
        yield Config.of(1 if shares[1] < least else most)
