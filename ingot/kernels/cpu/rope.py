"""Register the C++ kernels of rotary position embedding.

The gradient of a rotation is the rotation by the negated angles. Derived from the reference it took
10 ms instead of 0.5 for 512 tokens of SmolLM2 on one core, 5 % of a training step.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ingot import ops
from ingot.kernels.cpu.build import cpu
from ingot.ops.gradient import differentiate


def _rope_gradient(
    needs: list[bool],
    grads: list[Tensor],
    x: Tensor,
    positions: Tensor,
    freqs: Tensor,
    interleaved: bool,
    scale: float,
) -> Sequence[Tensor | None]:
    rotate = ops.rope.providers["cpu"].forward
    grad_x = rotate(grads[0], positions, -freqs, interleaved, scale) if needs[0] else None
    grad_freqs = None
    if needs[2]:  # frequencies are not usually trained: use the reference
        freqs_only = [False, False, True, False, False]
        args = x, positions, freqs, interleaved, scale
        grad_freqs = differentiate(ops.rope.fallback)(freqs_only, grads, *args)[2]
    return [grad_x, None, grad_freqs, None, None]


cpu(ops.rope, gradient=_rope_gradient)
cpu(ops.rope_and_cache)
