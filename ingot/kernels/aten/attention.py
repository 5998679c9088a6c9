"""`attention` with `scaled_dot_product_attention`, one sequence at a time.

On a GPU, packed sequences in half precision are computed by FlashAttention in one call.

`padded_attention` packs the tokens of the batch and calls `ops.attention`, of any provider, without
a mask. Queries at padding, whose results few models use, are gathered and computed with one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ingot import ops
from ingot.kernels.aten import aten, on_gpu
from ingot.ops.attention import padded_visible, sequences, visible
from ingot.ops.dispatch import Override
from ingot.ops.gradient import differentiate


def supports_flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor | None = None,
    block_table: Tensor | None = None,
    *_: object,
) -> bool:
    """Return whether FlashAttention supports the call: packed sequences, as in training."""
    packed = context_lens is None and block_table is None and len(q) > 0
    fits = q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0
    return packed and fits and q.shape[-1] <= 256 and on_gpu(q)


def _varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    causal: bool,
    window: int | None,
    scale: float | None,
) -> Tensor:
    from torch.nn.attention import varlen

    reach = -1 if window is None else window - 1  # -1 is unlimited
    starts = cu_seqlens.int()
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    # The number of all queries bounds the longest sequence without a device synchronization.
    out = varlen.varlen_attn(
        *(q, k, v, starts, starts, len(q), len(q)),
        scale=scale,
        window_size=(reach, 0 if causal else reach),
        enable_gqa=True,
    )
    assert isinstance(out, Tensor)
    return out.contiguous()


@aten(
    ops.attention,
    preferred_for=Override(
        when=supports_flash,
        reason="packed sequences in half precision: FlashAttention (`torch.nn.attention.varlen`) "
        "keeps one accumulator in registers where the batch-invariant kernel keeps two",
    ),
)
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
    """Gather the blocks and loop over the sequences; use a mask only if necessary."""
    if supports_flash(q, k, v, cu_seqlens, context_lens, block_table):
        return _varlen(q, k, v, cu_seqlens, causal, window, scale)
    outputs = [q[:0]]
    for q_b, k_b, v_b in sequences(q, k, v, cu_seqlens, context_lens, block_table):
        square = len(q_b) == len(k_b)
        flag_suffices = window is None and (square or not causal)
        mask = None if flag_suffices else visible(len(q_b), len(k_b), causal, window).to(q.device)
        # With a batch dimension: without one, SDPA takes its slow path.
        q_1NQH, k_1GKH, v_1GKH = (t.transpose(0, 1)[None] for t in (q_b, k_b, v_b))
        out_1NQH = F.scaled_dot_product_attention(
            q_1NQH,
            k_1GKH,
            v_1GKH,
            attn_mask=mask,
            is_causal=causal and flag_suffices,
            scale=scale,
            enable_gqa=True,
        )
        outputs.append(out_1NQH[0].transpose(0, 1))
    return torch.cat(outputs).contiguous()


def padded_attention(
    q: Tensor, k: Tensor, v: Tensor, tokens: Tensor, causal: bool, scale: float | None
) -> Tensor:
    """Compute the queries at tokens as packed sequences, then those at padding with a mask."""
    rest = _cu_seqlens(tokens), None, None, causal, None, scale
    if bool(tokens.all()):
        packed = [t.flatten(0, 1) for t in (q, k, v)]
        return ops.attention(packed[0], packed[1], packed[2], *rest).view(q.shape)
    out = _attend_from_padding(q, k, v, tokens, causal, scale)
    out[tokens] = ops.attention(q[tokens], k[tokens], v[tokens], *rest)
    return out


def _cu_seqlens(tokens: Tensor) -> Tensor:
    return F.pad(tokens.sum(1).cumsum(0), (1, 0)).int()


def _attend_from_padding(
    q: Tensor, k: Tensor, v: Tensor, tokens: Tensor, causal: bool, scale: float | None
) -> Tensor:
    """Return the results of the queries at padding; the others are 0."""
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    for b, at_B in enumerate((~tokens).unbind()):
        if bool(at_B.any()):
            q_1NQH, k_1GKH, v_1GKH = (t.transpose(0, 1)[None] for t in (q[b, at_B], k[b], v[b]))
            mask = padded_visible(tokens[b : b + 1], causal)[0, 0][at_B]
            out_1NQH = F.scaled_dot_product_attention(
                q_1NQH, k_1GKH, v_1GKH, attn_mask=mask, scale=scale, enable_gqa=True
            )
            out[b, at_B] = out_1NQH[0].transpose(0, 1)
    return out


_backward_from_padding = differentiate(_attend_from_padding)


def padded_attention_backward(
    needs: list[bool],
    grads: list[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tokens: Tensor,
    causal: bool,
    scale: float | None,
) -> list[Tensor | None]:
    """Add the gradients of both parts; that of padding is usually 0."""
    (grad,) = grads
    rest = _cu_seqlens(tokens), None, None, causal, None, scale
    packed = [t[tokens] for t in (q, k, v)]
    flags = [True] * 3 + [False] * len(rest)
    parts = ops.attention.backward_overload(flags, [grad[tokens]], *packed, *rest)
    found = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (q, k, v)]
    for total, part in zip(found, parts, strict=True):
        total[tokens] = part
    if bool((grad[~tokens] != 0).any()):
        flags = [True] * 3 + [False] * 3
        parts = _backward_from_padding(flags, grads, q, k, v, tokens, causal, scale)
        found = [t if part is None else t + part for t, part in zip(found, parts, strict=False)]
    return [*found, None, None, None]


aten(ops.padded_attention, backward=padded_attention_backward)(padded_attention)
