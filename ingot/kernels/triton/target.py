"""What GPUs have, as their makers publish it: limits of an architecture, peaks of a chip.

Limits: NVIDIA, CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; AMD,
"CDNA3 Instruction Set Architecture" and LLVM's AMDGPU guide. Peaks: the data sheets of A100 80GB
SXM, H100 SXM, HGX B200 (an eighth of it) and MI300X; bfloat16 without sparsity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

_KiB = 1024


@dataclass(frozen=True, kw_only=True)
class Chip:
    """A GPU and its published peaks."""

    name: str
    bytes_per_second: float
    flops: float
    """In bfloat16 with sums in float32, dense."""

    def seconds(self, num_bytes: int, flops: int) -> float:
        """The least time for so much traffic and arithmetic, whichever takes longer.

        >>> CHIPS["H100"].seconds(3_350_000, 0)
        1e-06
        """
        return max(num_bytes / self.bytes_per_second, flops / self.flops)

    def limit(self, num_bytes: int, flops: int) -> str:
        """What that time is spent on."""
        slower = num_bytes / self.bytes_per_second > flops / self.flops
        return "bandwidth" if slower else "tensor cores"


@dataclass(frozen=True, kw_only=True)
class TargetSpec:
    """An architecture that kernels are compiled for.

    A unit is what programs reside on: a streaming multiprocessor, a compute unit.
    """

    name: str
    backend: Literal["cuda", "hip"]
    arch: int | str
    warp_size: int
    """Threads of a warp."""
    warps: int
    """That a unit holds at most; likewise programs."""
    programs: int
    registers: int
    """32-bit registers of a unit, all warp_size together."""
    register_granularity: int
    """Registers are given to a warp in multiples of so many."""
    shared: int
    """Bytes of shared memory of a unit."""
    max_shared_bytes: int
    """Bytes of it that one program may have."""
    reserved_shared_bytes: int
    """Bytes that each program takes besides its own."""
    max_tile_registers: int
    """Registers of a thread that a kernel may plan for results and scores: fewer, where operands
    of the tensor cores come from registers too."""
    chip: Chip | None

    def occupancy(self, registers: int, shared: int, warps: int) -> float:
        """The share of the warps that can reside which do, given what a program of so many warps
        takes: registers a thread, bytes of shared memory.

        >>> TARGETS["sm_90"].occupancy(registers=64, shared=0, warps=4)
        0.5
        """
        step = self.register_granularity
        per_warp = -(-registers * self.warp_size // step) * step
        by_registers = self.registers // (per_warp * warps) if registers else self.programs
        by_shared = (
            self.shared // (shared + self.reserved_shared_bytes) if shared else self.programs
        )
        resident = min(self.programs, self.warps // warps, by_registers, by_shared)
        return resident * warps / self.warps


def nearest(capability: str) -> TargetSpec:
    """The target whose limits hold for a device of this architecture.

    >>> nearest("sm_103").name, nearest("sm_89").name, nearest("gfx950").name
    ('sm_100', 'sm_120', 'gfx942')
    """
    if capability in TARGETS:
        return TARGETS[capability]
    if capability.startswith("gfx"):
        return TARGETS["gfx942"]
    number = int(capability.removeprefix("sm_"))
    # Consumer parts of any generation have 100 KiB of shared memory, as sm_120 has.
    large = {9: "sm_90", 10: "sm_100"}
    return TARGETS[large.get(number // 10, "sm_120")]


CHIPS = {
    chip.name: chip
    for chip in (
        Chip(name="A100", bytes_per_second=2.039e12, flops=312e12),
        Chip(name="H100", bytes_per_second=3.35e12, flops=989.4e12),
        Chip(name="B200", bytes_per_second=8.0e12, flops=2250e12),
        Chip(name="MI300X", bytes_per_second=5.3e12, flops=1307.4e12),
    )
}


def _nvidia(arch: int, warps: int, programs: int, shared: int, chip: Chip | None) -> TargetSpec:
    return TargetSpec(
        name=f"sm_{arch}",
        backend="cuda",
        arch=arch,
        warp_size=32,
        warps=warps,
        programs=programs,
        registers=65536,
        register_granularity=256,
        shared=shared * _KiB,
        max_shared_bytes=(shared - 1) * _KiB,
        reserved_shared_bytes=_KiB,
        max_tile_registers=160 if arch in (90, 100) else 100,
        chip=chip,
    )


TARGETS = {
    target.name: target
    for target in (
        _nvidia(80, 64, 32, 164, CHIPS["A100"]),
        _nvidia(90, 64, 32, 228, CHIPS["H100"]),
        _nvidia(100, 64, 32, 228, CHIPS["B200"]),
        _nvidia(120, 48, 24, 100, None),
        TargetSpec(
            name="gfx942",
            backend="hip",
            arch="gfx942",
            warp_size=64,
            warps=32,
            programs=32,
            registers=4 * 512 * 64,
            register_granularity=8 * 64,
            shared=64 * _KiB,
            max_shared_bytes=64 * _KiB,
            reserved_shared_bytes=0,
            max_tile_registers=160,
            chip=CHIPS["MI300X"],
        ),
    )
}
