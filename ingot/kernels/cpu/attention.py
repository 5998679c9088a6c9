"""Register the C++ kernel of `attention`, with gradients except for a `block_table`."""

from __future__ import annotations

from torch import Tensor

from ingot import ops
from ingot.kernels.cpu.build import cpu


def _not_paged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor | None,
    block_table: Tensor | None,
    *_: object,
) -> bool:
    return block_table is None


cpu(ops.attention, backward=_not_paged)
