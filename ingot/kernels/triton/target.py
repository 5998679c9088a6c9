"""Published properties of GPUs: resources per architecture, peaks per chip.

Resources: NVIDIA, CUDA C++ Programming Guide, "Technical Specifications per Compute Capability";
AMD, "CDNA3 Instruction Set Architecture" and LLVM's AMDGPU guide. Peaks: the data sheets of A100
80GB SXM, H100 SXM, HGX B200 (an eighth of it) and MI300X; dense bfloat16.
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
    """Dense bfloat16 FLOPs per second with float32 accumulation."""

    def seconds(self, num_bytes: int, flops: int) -> float:
        """Return the roofline time for this traffic and arithmetic.

        >>> CHIPS["H100"].seconds(3_350_000, 0)
        1e-06
        """
        return max(num_bytes / self.bytes_per_second, flops / self.flops)

    def bound_by(self, num_bytes: int, flops: int) -> str:
        """Return which peak determines the roofline time."""
        memory_bound = num_bytes / self.bytes_per_second > flops / self.flops
        return "bandwidth" if memory_bound else "tensor cores"


@dataclass(frozen=True, kw_only=True)
class TargetSpec:
    """Resources of an architecture that kernels are compiled for.

    SM stands for streaming multiprocessor, and for compute unit on AMD GPUs.
    """

    name: str
    backend: Literal["cuda", "hip"]
    arch: int | str
    warp_size: int
    max_warps: int
    """Resident warps per SM."""
    max_programs: int
    """Resident programs (thread blocks) per SM."""
    num_registers: int
    """32-bit registers per SM."""
    register_granularity: int
    """Registers are allocated to a warp in multiples of this number."""
    sm_shared_bytes: int
    """Shared memory per SM."""
    max_shared_bytes: int
    """Shared memory that one program may use."""
    reserved_shared_bytes: int
    """Shared memory reserved for each program in addition to its own."""
    max_tile_registers: int
    """Registers per thread that a kernel may use for accumulators and scores; fewer where the
    operands of the tensor cores come from registers too."""
    chip: Chip | None

    def occupancy(self, registers: int, shared_bytes: int, num_warps: int) -> float:
        """Return the fraction of `max_warps` that can be resident, given the registers per thread,
        the shared memory and the warps of one program.

        >>> TARGETS["sm_90"].occupancy(registers=64, shared_bytes=0, num_warps=4)
        0.5
        """
        granularity = self.register_granularity
        per_warp = -(-registers * self.warp_size // granularity) * granularity
        by_registers = by_shared = self.max_programs
        if registers:
            by_registers = self.num_registers // (per_warp * num_warps)
        if shared_bytes:
            by_shared = self.sm_shared_bytes // (shared_bytes + self.reserved_shared_bytes)
        resident = min(self.max_programs, self.max_warps // num_warps, by_registers, by_shared)
        return resident * num_warps / self.max_warps


def nearest(arch: str) -> TargetSpec:
    """Return the target whose resource limits hold for a device of this architecture.

    >>> nearest("sm_103").name, nearest("sm_89").name, nearest("gfx950").name
    ('sm_100', 'sm_120', 'gfx942')
    """
    if arch in TARGETS:
        return TARGETS[arch]
    if arch.startswith("gfx"):
        return TARGETS["gfx942"]
    number = int(arch.removeprefix("sm_"))
    # Consumer parts of any generation have 100 KiB of shared memory, like sm_120.
    data_center = {9: "sm_90", 10: "sm_100"}
    return TARGETS[data_center.get(number // 10, "sm_120")]


CHIPS = {
    chip.name: chip
    for chip in (
        Chip(name="A100", bytes_per_second=2.039e12, flops=312e12),
        Chip(name="H100", bytes_per_second=3.35e12, flops=989.4e12),
        Chip(name="B200", bytes_per_second=8.0e12, flops=2250e12),
        Chip(name="MI300X", bytes_per_second=5.3e12, flops=1307.4e12),
    )
}


def _nvidia(
    arch: int, max_warps: int, max_programs: int, shared_kib: int, chip: Chip | None
) -> TargetSpec:
    return TargetSpec(
        name=f"sm_{arch}",
        backend="cuda",
        arch=arch,
        warp_size=32,
        max_warps=max_warps,
        max_programs=max_programs,
        num_registers=65536,
        register_granularity=256,
        sm_shared_bytes=shared_kib * _KiB,
        max_shared_bytes=(shared_kib - 1) * _KiB,
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
            max_warps=32,
            max_programs=32,
            num_registers=4 * 512 * 64,
            register_granularity=8 * 64,
            sm_shared_bytes=64 * _KiB,
            max_shared_bytes=64 * _KiB,
            reserved_shared_bytes=0,
            max_tile_registers=160,
            chip=CHIPS["MI300X"],
        ),
    )
}
