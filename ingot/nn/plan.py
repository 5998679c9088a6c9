"""Which tokens belong together, and where their keys and values are.

A model takes packed tokens: those of all sequences one after another, no batch dimension and no
padding. The plan says where each sequence begins (`cu_seqlens`), and, when keys and values are
kept from call to call, where they are kept:

    pool           the memory: for each layer two tensors of pages, (P, page_size, G, H)
    block_table    row b names the pages of sequence b, in order
    context_lens   how many keys sequence b has, those of the new tokens included
    slots          for each new token, page * page_size + offset: where its key and value go

There is no prefill and no decode. A sequence brings some new tokens, one or a thousand, and what
came before is in its pages. Attention is the only layer that reads the plan.

Legend: T new tokens, B sequences, M pages of the longest one, P pages of the pool, G key-value
heads, H channels of a head, L layers.
"""

# pyright: basic
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from ingot.core.errors import IngotError


@dataclass(frozen=True, kw_only=True)
class KVSpec:
    """The state that a model keeps for each token.

    >>> KVSpec(layers=30, kv_heads=3, head_dim=64, dtype=torch.bfloat16).bytes_per_token
    23040
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize

    @staticmethod
    def of(model: nn.Module) -> KVSpec | None:
        """The state of all layers that keep one; None for a model that keeps none.

        >>> KVSpec.of(nn.Linear(2, 2)) is None
        True
        """
        keeping = [m for m in model.modules() if _keeps_state(m)]
        if not keeping:
            return None
        found, count = {m.layer: m.kv_spec for m in keeping}, len(keeping)
        if set(found) != set(range(count)):
            raise IngotError(
                f"{count} layers keep state, as layers {sorted(found)}",
                hint="number them from 0 on, each its own: Attention(..., layer=0)",
            )
        kinds = {(spec.kv_heads, spec.head_dim, spec.dtype) for spec in found.values()}
        if len(kinds) > 1:
            raise IngotError(
                f"layers keep keys and values of different kinds: {sorted(map(str, kinds))}",
                hint="give all of them the same kv_heads, head_dim and dtype",
            )
        kv_heads, head_dim, dtype = kinds.pop()
        return KVSpec(layers=count, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)


class Stateful(Protocol):
    """A layer that keeps state: which of the pool's layers is its own, and what it keeps."""

    layer: int

    @property
    def kv_spec(self) -> KVSpec:
        """What this one layer keeps."""
        ...


def _keeps_state(module: nn.Module) -> TypeGuard[Stateful]:
    # The class first: a module is slow to say that it has no such attribute.
    return hasattr(type(module), "kv_spec") and hasattr(module, "layer")


class KVPool:
    """Memory for keys and values: one allocation, all layers, in pages.

    >>> spec = KVSpec(layers=2, kv_heads=1, head_dim=4, dtype=torch.float32)
    >>> KVPool(spec, pages=3, page_size=16).k[1].shape
    torch.Size([3, 16, 1, 4])
    """

    def __init__(
        self, spec: KVSpec, pages: int, page_size: int, device: torch.device | str | None = None
    ) -> None:
        if pages < 1 or page_size < 1:
            raise IngotError(
                f"a pool of {pages} pages of {page_size} tokens", hint="give at least one of each"
            )
        self.spec, self.pages, self.page_size = spec, pages, page_size
        shape = (spec.layers, 2, pages, page_size, spec.kv_heads, spec.head_dim)
        self.memory = _zeros(shape, spec.dtype, torch.device(device or "cpu"))
        self.k = [layer[0] for layer in self.memory]
        self.v = [layer[1] for layer in self.memory]


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.zeros`, but on the CPU memory that is never used is never taken, and costs no time:
    torch writes its zeros, in about a second for each GB."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    zeros = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(zeros).view(dtype).view(shape)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which tokens belong together; `packed` and `paged` make one.

    >>> Plan.packed([3, 2]).cu_seqlens
    tensor([0, 3, 5], dtype=torch.int32)
    """

    cu_seqlens: Tensor
    context_lens: Tensor | None = None
    block_table: Tensor | None = None
    slots: Tensor | None = None
    pool: KVPool | None = None

    @staticmethod
    def packed(lengths: Sequence[int], device: torch.device | str | None = None) -> Plan:
        """Whole sequences of these lengths, and nothing kept: training, scoring, stateless."""
        return Plan(cu_seqlens=_cumulated(lengths).to(device))

    @staticmethod
    def paged(
        pool: KVPool, lengths: Sequence[int], context_lens: Sequence[int], block_table: Tensor
    ) -> Plan:
        """New tokens of sequences that have, with them, `context_lens` tokens in the pool.

        >>> spec = KVSpec(layers=1, kv_heads=1, head_dim=4, dtype=torch.float32)
        >>> pool = KVPool(spec, pages=4, page_size=2)
        >>> plan = Plan.paged(pool, [2], [3], torch.tensor([[3, 1]]))
        >>> plan.slots, plan.positions()
        (tensor([7, 2]), tensor([1, 2]))
        """
        device = pool.memory.device
        table_BM = block_table.to(device, torch.int32)
        contexts_B = torch.tensor(context_lens, dtype=torch.int32)
        lengths_B = torch.tensor(lengths, dtype=torch.int32)
        if not (len(lengths_B) == len(contexts_B) == len(table_BM) and table_BM.dim() == 2):
            raise IngotError(
                f"{len(lengths_B)} lengths, {len(contexts_B)} context_lens, {len(table_BM)} rows "
                "of the block_table",
                hint="give one of each for every sequence",
            )
        room = table_BM.shape[1] * pool.page_size
        if bool(((lengths_B < 0) | (contexts_B < lengths_B) | (contexts_B > room)).any()):
            raise IngotError(
                f"lengths {list(lengths)[:8]}, context_lens {list(context_lens)[:8]}, and room for "
                f"{room} tokens in the pages of a sequence",
                hint="context_lens counts the new tokens too; name pages for all of them",
            )
        plan = Plan(cu_seqlens=_cumulated(lengths).to(device), context_lens=contexts_B.to(device))
        positions_T = plan.positions()
        sequences_T = torch.arange(len(lengths_B)).repeat_interleave(lengths_B).to(device)
        pages_T = table_BM[sequences_T, positions_T // pool.page_size].long()
        return Plan(
            cu_seqlens=plan.cu_seqlens,
            context_lens=plan.context_lens,
            block_table=table_BM,
            slots=pages_T * pool.page_size + positions_T % pool.page_size,
            pool=pool,
        )

    def positions(self) -> Tensor:
        """The place of each new token in its own sequence.

        >>> Plan.packed([3, 2]).positions()
        tensor([0, 1, 2, 0, 1])
        """
        starts_B, lengths_B = self.cu_seqlens[:-1], self.cu_seqlens.diff()
        contexts_B = lengths_B if self.context_lens is None else self.context_lens
        first_B = (contexts_B - lengths_B - starts_B).long()
        places_T = torch.arange(int(self.cu_seqlens[-1]), device=starts_B.device)
        return places_T + first_B.repeat_interleave(lengths_B)


def _cumulated(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
