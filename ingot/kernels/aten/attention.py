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
    outputs: list[Tensor] = []
    for q_b, k_b, v_b in sequences(q, k, v, cu_seqlens, context_lens, block_table):
        square = len(q_b) == len(k_b)
        flag_says_all = window is None and (square or not causal)
        mask = None if flag_says_all else visible(len(q_b), len(k_b), causal, window).to(q.device)
        out_NQH = F.scaled_dot_product_attention(
            q_b.transpose(0, 1),
            k_b.transpose(0, 1),
            v_b.transpose(0, 1),
            attn_mask=mask,
            is_causal=causal and flag_says_all,
            scale=scale,
            enable_gqa=True,
        )
        outputs.append(out_NQH.transpose(0, 1))
    return torch.cat(outputs).contiguous()
