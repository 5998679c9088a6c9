"""Declaration of kernels: each is declared once, with its tuning space and its bound.

    @kernel(space=elementwise_space, bound_by="bandwidth")
    @triton.jit
    def _silu(x, y, size, BLOCK: tl.constexpr): ...

    _silu.launch(grid, x, y, size, BLOCK=1024)

`space` yields the configurations of a launch that fit a target, given the launch's own constants:
number of warps and pipeline stages, and those constants of the kernel that only affect speed. The
first one is reasonable on any target. `config_store.choose_config` selects among them.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ingot.kernels.triton.config_store import choose_config
from ingot.kernels.triton.launch import BoundBy, KernelConfig, KernelSpec, Launch, record
from ingot.kernels.triton.target import TargetSpec

KERNELS: dict[str, Kernel] = {}


@dataclass(frozen=True, kw_only=True, eq=False)
class Kernel(KernelSpec):
    """A declared kernel that can be launched."""

    def launch(self, grid: Any, *args: Any, shape: tuple[int, ...] = (), **constants: Any) -> None:
        """Launch on a grid: a tuple, or a function from all constants to a tuple.

        `shape` lists further sizes that the configuration may be tuned for; each is rounded up to
        a power of 2.
        """
        launch = Launch(self, grid, args, constants, shape)
        if record(launch):
            launch.run(choose_config(launch))


def kernel(
    *,
    space: Callable[..., Iterator[KernelConfig]],
    bound_by: BoundBy,
    scalar_loads: int = 0,
    config_keys: tuple[str, ...] | None = None,
) -> Callable[[Any], Kernel]:
    """Declare the decorated Triton function as a kernel."""

    def declare(function: Any) -> Kernel:
        name = function.__name__.strip("_")
        KERNELS[name] = Kernel(
            name=name,
            function=function,
            space=space,
            bound_by=bound_by,
            scalar_loads=scalar_loads,
            config_keys=config_keys,
        )
        return KERNELS[name]

    return declare


def elementwise_space(
    target: TargetSpec, num_elements: int, min_per_thread: int = 8
) -> Iterator[KernelConfig]:
    """Yield configurations for a block of `num_elements`: `min_per_thread` to 32 per thread.

    8 half-precision elements are the 128 bits of the widest load; above 32 per thread, the
    intermediate values no longer fit in registers.

    >>> from ingot.kernels.triton.target import TARGETS
    >>> [str(config) for config in elementwise_space(TARGETS["sm_90"], 2048)]
    ['num_warps=4 num_stages=1', 'num_warps=8 num_stages=1', 'num_warps=2 num_stages=1']
    """
    max_warps = 1024 // target.warp_size
    per_thread = {n: num_elements // (target.warp_size * n) for n in (1, 2, 4, 8, 16, 32)}
    fitting = [
        n for n, count in per_thread.items() if min_per_thread <= count <= 32 and n <= max_warps
    ]
    # Closest to 16 per thread first: two loads in flight.
    for num_warps in sorted(fitting, key=lambda n: abs(per_thread[n] - 16)):
        yield KernelConfig.of(num_warps)
    if not fitting:
        yield KernelConfig.of(1 if per_thread[1] < min_per_thread else max_warps)
