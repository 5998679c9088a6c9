"""Checks of compiled kernels: spills, shared memory, tensor-core use and load widths."""

from __future__ import annotations

from ingot.kernels.triton.compiler import CompiledKernel
from ingot.kernels.triton.target import TARGETS

# Kernels that may spill on a target, with the reason.
ALLOWED_SPILLS: dict[tuple[str, str], str] = {}


def violations(compiled: CompiledKernel) -> list[str]:
    """Return the violated checks of a compiled kernel, one sentence each."""
    target, stats, problems = TARGETS[compiled.target], compiled.stats, list[str]()
    if stats.spills and (compiled.kernel, compiled.target) not in ALLOWED_SPILLS:
        problems.append(f"{stats.spills} register spills")
    if compiled.shared_bytes > target.max_shared_bytes:
        problems.append(
            f"{compiled.shared_bytes} bytes of shared memory, more than {target.max_shared_bytes}"
        )
    if compiled.bound_by == "tensor cores" and not compiled.uses_tensor_cores:
        problems.append("no tensor-core instruction")
    narrow = sum(count for bits, count in stats.loads.items() if bits < 128)
    if compiled.bound_by == "bandwidth" and narrow > compiled.scalar_loads:
        problems.append(f"{narrow - compiled.scalar_loads} loads of less than 128 bits")
    prefix = f"{compiled.name} {compiled.target} {compiled.config}"
    return [f"{prefix}: {problem}" for problem in problems]
