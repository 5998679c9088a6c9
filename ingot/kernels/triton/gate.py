"""What may not be in compiled code; each kind of fault by a sentence."""

from __future__ import annotations

from ingot.kernels.triton.compiler import Fact
from ingot.kernels.triton.target import TARGETS

# Kernel and target of what is allowed to spill, and why.
SPILLS: dict[tuple[str, str], str] = {}


def faults(fact: Fact) -> list[str]:
    """What is wrong with a compiled kernel; nothing, if it may land."""
    target, found = TARGETS[fact.target], list[str]()
    if fact.code.spills and (fact.kernel, fact.target) not in SPILLS:
        found.append(f"spills {fact.code.spills}")
    if fact.shared_bytes > target.shared_program:
        found.append(f"shared memory {fact.shared_bytes}, the most is {target.shared_program}")
    if fact.bound == "tensor cores" and not fact.tensor_core:
        found.append("no instruction of the tensor cores")
    narrow = sum(count for bits, count in fact.code.loads.items() if bits < 128)
    if fact.bound == "bandwidth" and narrow > fact.scalars:
        found.append(f"{narrow - fact.scalars} loads of less than 128 bits")
    return [f"{fact.name} {fact.target} {fact.config}: {fault}" for fault in found]
