"""What may not be in compiled code; each kind of fault by a sentence."""

from __future__ import annotations

from ingot.kernels.triton.compiler import CompiledKernel
from ingot.kernels.triton.target import TARGETS

# Kernel and target of what is allowed to spill, and why.
ALLOWED_SPILLS: dict[tuple[str, str], str] = {}


def violations(fact: CompiledKernel) -> list[str]:
    """What is wrong with a compiled kernel; nothing, if it may land."""
    target, found = TARGETS[fact.target], list[str]()
    if fact.stats.spills and (fact.kernel, fact.target) not in ALLOWED_SPILLS:
        found.append(f"spills {fact.stats.spills}")
    if fact.shared_bytes > target.max_shared_bytes:
        found.append(f"shared memory {fact.shared_bytes}, the most is {target.max_shared_bytes}")
    if fact.bound_by == "tensor cores" and not fact.tensor_core:
        found.append("no instruction of the tensor cores")
    narrow = sum(count for bits, count in fact.stats.loads.items() if bits < 128)
    if fact.bound_by == "bandwidth" and narrow > fact.scalar_loads:
        found.append(f"{narrow - fact.scalar_loads} loads of less than 128 bits")
    return [f"{fact.name} {fact.target} {fact.config}: {fault}" for fault in found]
