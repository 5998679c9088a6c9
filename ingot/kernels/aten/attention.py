"""`attention` by `scaled_dot_product_attention`, a sequence at a time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ingot import ops
from ingot.kernels.aten import aten
from ingot.ops.attention import sequences, visible


@aten(ops.attention)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor | None,
    block_table: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float | None,
) -> Tensor:
    """Pages are gathered, sequences looped over; the mask is left out where none is needed."""
    outputs = [q[:0]]
    for q_b, k_b, v_b in sequences(q, k, v, cu_seqlens, context_lens, block_table):
        square = len(q_b) == len(k_b)
        flag_says_all = window is None and (square or not causal)
        mask = None if flag_says_all else visible(len(q_b), len(k_b), causal, window).to(q.device)
        # With a batch dimension: without one, SDPA takes its slow path.
        q_1NQH, k_1GKH, v_1GKH = (t.transpose(0, 1)[None] for t in (q_b, k_b, v_b))
        out_1NQH = F.scaled_dot_product_attention(
            q_1NQH,
            k_1GKH,
            v_1GKH,
            attn_mask=mask,
            is_causal=causal and flag_says_all,
            scale=scale,
            enable_gqa=True,
        )
        outputs.append(out_1NQH[0].transpose(0, 1))
    return torch.cat(outputs).contiguous()
