"""The layout of a packed batch, and the paged KV cache.

A model takes packed tokens: the tokens of all sequences in one dimension, without a batch
dimension or padding. `BatchLayout` holds the sequence boundaries (`cu_seqlens`) and the position of
each token. When keys and values are kept between calls, it also says where:

    kv_cache       for each layer, keys and values in blocks: (P, block_size, G, H) each, or
                   (P, block_size, G, H + 4) in int8, with a scale after each row
    block_table    row b lists the blocks of sequence b, in order
    context_lens   number of keys of sequence b, including the new tokens
    slot_mapping   for each new token, block * block_size + offset: the slot of its key and value

Prefill and decode are not distinguished: a sequence brings one new token or a thousand, and the
keys and values of the earlier ones are in its blocks. Attention is the only layer that reads the
layout, apart from two fields: learned position embeddings read `positions`, linear layers with LoRA
adapters `adapters`.

Legend: T new tokens, B sequences, M blocks of the longest sequence, P blocks of the cache, G
key-value heads, H channels of a head, L layers.
"""

# pyright: basic
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from ingot.core.errors import IngotError
from ingot.ops.codec import KV_SCALE_BYTES

KVCacheDtype = Literal["auto", "int8"]
"""Dtype of cached keys and values; "auto" is that of the activations."""


@dataclass(frozen=True, kw_only=True)
class KVSpec:
    """Shape and dtype of the keys and values that a model caches for each token.

    >>> KVSpec(layers=30, kv_heads=3, head_dim=64, dtype=torch.bfloat16).bytes_per_token
    23040
    >>> KVSpec(layers=30, kv_heads=3, head_dim=64, dtype=torch.int8).bytes_per_token
    12240
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    """Dtype of the cache: that of the activations, or int8."""

    @property
    def row_size(self) -> int:
        """Elements of a key or value of one head, with the 4 bytes of its scale in int8."""
        return self.head_dim + (KV_SCALE_BYTES if self.dtype == torch.int8 else 0)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of the keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.row_size * self.dtype.itemsize

    @staticmethod
    def of(model: nn.Module) -> KVSpec | None:
        """Combine the specs of all layers that cache keys and values; None if there are none.

        >>> KVSpec.of(nn.Linear(2, 2)) is None
        True
        """
        modules = [module for module in model.modules() if _has_kv_cache(module)]
        layers = [(module, spec) for module in modules if (spec := module.kv_spec) is not None]
        if not layers:
            return None
        specs, count = {layer.layer: spec for layer, spec in layers}, len(layers)
        if set(specs) != set(range(count)):
            raise IngotError(
                f"layer indices of {count} attention layers: expected 0 to {count - 1}, each once, "
                f"got {sorted(specs)}",
                hint="number the layers of the model: Attention(..., layer=0), ...",
            )
        shapes = {(spec.kv_heads, spec.head_dim, spec.dtype) for spec in specs.values()}
        if len(shapes) > 1:
            raise IngotError(
                "layers with different KV shapes cannot share a cache, got (kv_heads, head_dim, "
                f"dtype) {sorted(map(str, shapes))}",
                hint="give all layers the same kv_heads, head_dim and dtype",
            )
        kv_heads, head_dim, dtype = shapes.pop()
        return KVSpec(layers=count, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)


class CachedLayer(Protocol):
    """A layer that caches keys and values: its index in the cache, and their shape."""

    layer: int

    @property
    def kv_spec(self) -> KVSpec | None:
        """Spec of this layer alone; None if it caches nothing."""
        ...


def _has_kv_cache(module: nn.Module) -> TypeGuard[CachedLayer]:
    # The class first: `nn.Module.__getattr__` is slow for a missing attribute.
    return hasattr(type(module), "kv_spec") and hasattr(module, "layer")


class KVCache:
    """Paged memory for keys and values of all layers, in one allocation.

    The layers of a block are adjacent, so that the memory in use grows with the blocks in use: with
    the blocks of a layer adjacent, the first token would commit a huge page per layer, for its keys
    and for its values (116 MB more in SmolLM2, and 80 ms to clear them).

    >>> spec = KVSpec(layers=2, kv_heads=1, head_dim=4, dtype=torch.float32)
    >>> KVCache(spec, num_blocks=3, block_size=16).k[1].shape
    torch.Size([3, 16, 1, 4])
    """

    def __init__(
        self,
        spec: KVSpec,
        num_blocks: int,
        block_size: int,
        device: torch.device | str | None = None,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise IngotError(
                "KVCache: num_blocks and block_size must be at least 1, got "
                f"{num_blocks} and {block_size}",
                hint="allocate at least one block of one token",
            )
        self.spec, self.num_blocks, self.block_size = spec, num_blocks, block_size
        shape = (num_blocks, spec.layers, 2, block_size, spec.kv_heads, spec.row_size)
        self.memory = _zeros(shape, spec.dtype, torch.device(device or "cpu"))
        self.k = list(self.memory[:, :, 0].unbind(1))
        self.v = list(self.memory[:, :, 1].unbind(1))


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros whose memory, on the CPU, is committed on first use.

    `torch.zeros` writes them: about 1 s per GB.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    zeros = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(zeros).view(dtype).view(shape)


@dataclass(frozen=True, kw_only=True)
class BatchLayout:
    """Sequence boundaries, positions and cache slots of a packed batch.

    Build one with `packed` or `paged`.

    >>> layout = BatchLayout.packed([3, 2])
    >>> layout.cu_seqlens, layout.positions
    (tensor([0, 3, 5], dtype=torch.int32), tensor([0, 1, 2, 0, 1]))
    """

    cu_seqlens: Tensor
    """Cumulative sequence lengths, (B + 1,), int32."""
    positions: Tensor
    """Position of each new token in its own sequence, (T,)."""
    adapters: Tensor | None = None
    """LoRA adapter of each new token, (T,), int32: a slot of `Decoder.add_lora_slots`, or -1 for
    the base model. None stands for the adapter that is trained, and for the base with slots."""
    context_lens: Tensor | None = None
    block_table: Tensor | None = None
    slot_mapping: Tensor | None = None
    kv_cache: KVCache | None = None

    @staticmethod
    def packed(lengths: Sequence[int], device: torch.device | str | None = None) -> BatchLayout:
        """Lay out whole sequences of these lengths, without a KV cache: training, scoring."""
        starts_B, positions_T = _on_host(lengths, lengths)
        starts_B, positions_T = (t.to(device, non_blocking=True) for t in (starts_B, positions_T))
        return BatchLayout(cu_seqlens=starts_B, positions=positions_T)

    @staticmethod
    def paged(
        kv_cache: KVCache, lengths: Sequence[int], context_lens: Sequence[int], block_table: Tensor
    ) -> BatchLayout:
        """Lay out new tokens of sequences that have `context_lens` tokens, including these.

        >>> spec = KVSpec(layers=1, kv_heads=1, head_dim=4, dtype=torch.float32)
        >>> kv_cache = KVCache(spec, num_blocks=4, block_size=2)
        >>> layout = BatchLayout.paged(kv_cache, [2], [3], torch.tensor([[3, 1]]))
        >>> layout.slot_mapping, layout.positions
        (tensor([7, 2]), tensor([1, 2]))
        """
        device, block_size = kv_cache.memory.device, kv_cache.block_size
        table_BM = block_table.to(device, torch.int32)
        _check_paged(lengths, context_lens, table_BM, block_size)
        starts_B, positions_T = (t.to(device) for t in _on_host(lengths, context_lens))
        sequences_T = torch.from_numpy(
            np.repeat(np.arange(len(lengths)), np.asarray(lengths, np.int64))
        ).to(device)
        blocks_T = table_BM[sequences_T, positions_T // block_size].long()
        return BatchLayout(
            cu_seqlens=starts_B,
            positions=positions_T,
            context_lens=torch.tensor(context_lens, dtype=torch.int32).to(device),
            block_table=table_BM,
            slot_mapping=blocks_T * block_size + positions_T % block_size,
            kv_cache=kv_cache,
        )


def _on_host(lengths: Sequence[int], context_lens: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Compute `cu_seqlens` and `positions` in numpy: on a GPU they would need a sync."""
    starts = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    lengths_B = np.asarray(lengths, np.int64)
    first_B = np.asarray(context_lens, np.int64) - lengths_B - starts[:-1]
    positions = np.arange(starts[-1]) + np.repeat(first_B, lengths_B)
    return torch.from_numpy(starts.astype(np.int32)), torch.from_numpy(positions)


def _check_paged(
    lengths: Sequence[int], context_lens: Sequence[int], table_BM: Tensor, block_size: int
) -> None:
    if not (len(lengths) == len(context_lens) == len(table_BM) and table_BM.dim() == 2):
        raise IngotError(
            "lengths, context_lens and rows of block_table must be equally many, got "
            f"{len(lengths)}, {len(context_lens)} and {len(table_BM)}",
            hint="give one of each for every sequence",
        )
    capacity = table_BM.shape[1] * block_size
    if not all(0 <= n <= c <= capacity for n, c in zip(lengths, context_lens, strict=True)):
        raise IngotError(
            f"0 <= lengths <= context_lens <= {capacity} (the slots in a row of block_table) must "
            f"hold, got lengths {list(lengths)[:8]} and context_lens {list(context_lens)[:8]}",
            hint="count the new tokens in context_lens, and list blocks for all of them",
        )
