"""Attention with its projections: the layer that reads the batch layout and the KV cache.

One weight, `qkv`, projects to queries, keys and values: the rows of q, then of k, then of v. A
decode step reads it in one pass; then `rope_and_cache` rotates q and k and writes k and v to the
cache.

With `kv_cache_dtype` "int8", every query attends to keys and values that were rounded to int8, each
token and head by itself. The cache holds the integers; a forward without a cache, as in training,
rounds k and v to the same values. So its result has the bits of one with a cache.

Legend: T tokens, D channels, N query heads, G key-value heads, H channels of a head.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ingot import ops
from ingot.core.errors import ConfigError, IngotError
from ingot.nn.config import QkNorm, Rope
from ingot.nn.layout import BatchLayout, KVCacheDtype, KVSpec
from ingot.nn.linear import Linear
from ingot.nn.lora import LoraShape, LoraSite
from ingot.nn.norm import RMSNorm
from ingot.nn.recompute import recomputable
from ingot.ops.codec import round_kv


class Attention(nn.Module):
    """Self-attention over packed tokens, causal by default; usable in custom models.

    `layer` is the index of its keys and values in the `KVCache`; number the layers from 0. Without
    `causal` a token attends to all tokens of its sequence, and nothing can be cached.

    >>> attention = Attention(32, heads=4, kv_heads=2, rope=Rope())
    >>> layout = BatchLayout.packed([3, 2])
    >>> attention(torch.zeros(5, 32), layout).shape
    torch.Size([5, 32])
    """

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        layer: int = 0,
        rope: Rope | None = None,
        sliding_window: int | None = None,
        qk_norm: QkNorm | None = None,
        qkv_bias: bool = False,
        o_bias: bool = False,
        eps: float = 1e-5,
        causal: bool = True,
    ) -> None:
        super().__init__()
        self.causal = causal
        self.heads, self.kv_heads = heads, heads if kv_heads is None else kv_heads
        self.head_dim = dim // heads if head_dim is None else head_dim
        if heads % self.kv_heads or (head_dim is None and dim % heads):
            raise ConfigError(
                "heads must divide dim and be a multiple of kv_heads, got "
                f"dim {dim}, heads {heads} and kv_heads {self.kv_heads}",
                hint="change heads or kv_heads, or give head_dim",
            )
        self.layer, self.sliding_window, self.qk_norm = layer, sliding_window, qk_norm
        rows = (heads + 2 * self.kv_heads) * self.head_dim
        self.qkv = Linear(dim, rows, bias=qkv_bias)
        self.out = Linear(heads * self.head_dim, dim, bias=o_bias)
        self.rotary = Rotary(self.head_dim, rope)
        self.kv_cache_dtype: KVCacheDtype = "auto"
        if qk_norm:
            full = qk_norm is QkNorm.FULL
            self.q_norm = RMSNorm(self.head_dim * (heads if full else 1), eps)
            self.k_norm = RMSNorm(self.head_dim * (self.kv_heads if full else 1), eps)

    @property
    def lora_sites(self) -> list[LoraSite]:
        """The modules that take LoRA adapters."""
        widths = [n * self.head_dim for n in (self.heads, self.kv_heads, self.kv_heads)]
        qkv = LoraShape.of(self.qkv, "q_proj", "k_proj", "v_proj", widths=widths)
        return [(self.qkv, qkv), (self.out, LoraShape.of(self.out, "o_proj"))]

    @property
    def kv_spec(self) -> KVSpec | None:
        """Shape and dtype of the keys and values cached for a token; None if it is not causal."""
        if not self.causal:
            return None
        dtype = torch.int8 if self.kv_cache_dtype == "int8" else self.qkv.dtype
        return KVSpec(layers=1, kv_heads=self.kv_heads, head_dim=self.head_dim, dtype=dtype)

    def forward(self, x_TD: Tensor, layout: BatchLayout, residual: Tensor | None = None) -> Tensor:
        """Attend to the tokens of each sequence; add `residual` if given."""
        q_TNH, k, v = self._project(x_TD, layout.adapters)
        if layout.kv_cache is None:
            q_TNH = recomputable(self.rotary, q_TNH, layout.positions)
            k = recomputable(self.rotary, k, layout.positions)
            if self.kv_cache_dtype == "int8":
                k, v = round_kv(k), round_kv(v)
        else:
            cache = layout.kv_cache.k[self.layer], layout.kv_cache.v[self.layer]
            q_TNH = self.rotary.apply_and_cache(
                q_TNH, k, v, layout.positions, *cache, layout.slot_mapping
            )
            k, v = cache
        out_TNH = self.attend(q_TNH, k, v, layout)
        return self.out(out_TNH.flatten(1), residual, adapters=layout.adapters)

    def attend(self, q_TNH: Tensor, k: Tensor, v: Tensor, layout: BatchLayout) -> Tensor:
        """Return the attention of queries to keys and values, which are packed or in a cache."""
        return ops.attention(
            q_TNH,
            k,
            v,
            layout.cu_seqlens,
            layout.context_lens,
            layout.block_table,
            self.causal,
            self.sliding_window,
        )

    def _project(self, x_TD: Tensor, adapters_T: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        counts = [self.heads, self.kv_heads, self.kv_heads]
        qkv_TXH = self.qkv(x_TD, adapters=adapters_T).view(-1, sum(counts), self.head_dim)
        # Slices instead of `split` would each have a gradient of the full size, mostly zeros.
        q_TNH, k_TGH, v_TGH = qkv_TXH.split(counts, dim=1)
        if self.qk_norm is None:
            return q_TNH, k_TGH, v_TGH
        q_TNH, k_TGH = self._normalize(self.q_norm, q_TNH), self._normalize(self.k_norm, k_TGH)
        return q_TNH, k_TGH, v_TGH

    def _normalize(self, norm: RMSNorm, x_TXH: Tensor) -> Tensor:
        if self.qk_norm is QkNorm.PER_HEAD:
            return recomputable(norm, x_TXH)
        return recomputable(norm, x_TXH.flatten(1)).view(x_TXH.shape)


class Rotary(nn.Module):
    """`ops.rope` and `ops.rope_and_cache` with their frequencies; the identity without a rope.

    The frequencies stay in float32 when the module is converted, and are not created on `meta`: in
    bfloat16 a frequency is off by whole rotations at positions in the hundreds.

    >>> Rotary(4, Rope(theta=100.0)).bfloat16().freqs
    tensor([1.0000, 0.1000])
    """

    def __init__(self, width: int, rope: Rope | None) -> None:
        super().__init__()
        self.enabled = rope is not None
        with torch.device("cpu"):
            self.freqs, self.scale = torch.empty(0), 1.0
            if rope is not None:
                self.freqs, self.scale = ops.rope_frequencies(width, rope.theta, rope.scaling)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        device = fn(self.freqs.new_empty(0)).device
        if device.type != "meta":
            self.freqs = self.freqs.to(device)
        return self

    def forward(self, x_TNH: Tensor, positions_T: Tensor) -> Tensor:
        """Rotate each head by its token's position."""
        if not self.enabled:
            return x_TNH
        return ops.rope(x_TNH, positions_T, self.freqs, False, self.scale)

    def apply_and_cache(
        self,
        q_TNH: Tensor,
        k_TGH: Tensor,
        v_TGH: Tensor,
        positions_T: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping_T: Tensor | None,
    ) -> Tensor:
        """Rotate queries and keys, write keys and values to their slots, return the queries."""
        if k_TGH.requires_grad:
            raise IngotError(
                "keys and values in a KVCache have no gradient",
                hint="run under torch.inference_mode(), or train with BatchLayout.packed",
            )
        assert slot_mapping_T is not None
        return ops.rope_and_cache(
            q_TNH,
            k_TGH,
            v_TGH,
            positions_T,
            self.freqs,
            k_cache,
            v_cache,
            slot_mapping_T,
            False,
            self.scale,
        )
