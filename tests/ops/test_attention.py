from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ingot import ops
from ingot.core.errors import OpError
from ingot.ops.dispatch import prefer

HEADS, KV_HEADS, WIDTH = 4, 2, 8


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def qkv(length: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = ((length, HEADS, WIDTH), (length, KV_HEADS, WIDTH), (length, KV_HEADS, WIDTH))
    q, k, v = (torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes)
    return q, k, v


def whole(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    return ops.attention(q, k, v, int32(0, len(q)), window=window)


@pytest.mark.parametrize("causal", [True, False])
def test_reference_equals_scaled_dot_product_attention(causal: bool) -> None:
    q, k, v = qkv(11)
    q_NTH, k_GTH, v_GTH = (t.transpose(0, 1) for t in (q, k, v))
    theirs_NTH = F.scaled_dot_product_attention(
        q_NTH, k_GTH, v_GTH, is_causal=causal, enable_gqa=True
    )
    with prefer("reference"):
        torch.testing.assert_close(
            ops.attention(q, k, v, int32(0, 11), causal=causal), theirs_NTH.transpose(0, 1)
        )


def test_sequences_do_not_attend_to_each_other() -> None:
    one, other = qkv(5, 1), qkv(7, 2)
    both = [torch.cat(pair) for pair in zip(one, other, strict=True)]
    together = ops.attention(*both, cu_seqlens=int32(0, 5, 12))
    torch.testing.assert_close(together, torch.cat((whole(*one), whole(*other))))


@given(
    length=st.integers(1, 24),
    page=st.integers(1, 6),
    window=st.none() | st.integers(1, 30),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_chunks_and_blocks_equal_the_whole_prompt(
    length: int, page: int, window: int | None, data: st.DataObject
) -> None:
    q, k, v = qkv(length)
    cuts = sorted(data.draw(st.sets(st.integers(1, length - 1)) if length > 1 else st.just(set())))
    num_pages = -(-length // page)
    table = data.draw(st.permutations(range(num_pages + 2)))[:num_pages]
    k_cache = torch.full((num_pages + 2, page, KV_HEADS, WIDTH), torch.nan).double()
    v_cache = k_cache.clone()
    for position in range(length):
        slot = table[position // page], position % page
        k_cache[slot], v_cache[slot] = k[position], v[position]

    plain: list[Tensor] = []
    paged: list[Tensor] = []
    for start, end in zip([0, *cuts], [*cuts, length], strict=True):
        starts, lens = int32(0, end - start), int32(end)
        plain.append(ops.attention(q[start:end], k[:end], v[:end], starts, lens, window=window))
        block_table = torch.tensor([table], dtype=torch.int32)
        paged.append(
            ops.attention(q[start:end], k_cache, v_cache, starts, lens, block_table, window=window)
        )
    torch.testing.assert_close(torch.cat(plain), whole(q, k, v, window))
    assert torch.equal(torch.cat(paged), torch.cat(plain))


def test_window_of_one_attends_to_itself() -> None:
    q, k, v = qkv(6)
    torch.testing.assert_close(whole(q, k, v, window=1), v.repeat_interleave(2, dim=1))


@pytest.mark.parametrize(
    ("metadata", "complaint"),
    [
        ({"cu_seqlens": int32(4, 4)}, "cu_seqlens is [4, 4] for 4 queries"),
        ({"cu_seqlens": int32(0, 3)}, "cu_seqlens is [0, 3] for 4 queries"),
        ({"cu_seqlens": int32(0, 3, 2, 4)}, "cu_seqlens is [0, 3, 2, 4]"),
        ({"cu_seqlens": int32(0, 4), "context_lens": int32(9)}, "4 keys, but the sequences have"),
        ({"cu_seqlens": int32(0, 2, 4), "context_lens": int32(4)}, "2 sequences, but 1 context"),
        ({"cu_seqlens": int32(0, 4), "window": 0}, "window is 0"),
    ],
)
def test_invalid_metadata_raises(metadata: dict[str, Any], complaint: str) -> None:
    with pytest.raises(OpError, match=re.escape(complaint)):
        ops.attention(*qkv(4), **metadata)


@pytest.mark.parametrize("table", [[[0]], [[0, -1]], [[0, 2]]])
def test_missing_blocks_raise(table: list[list[int]]) -> None:
    q, k, v = qkv(4)
    k_cache, v_cache = k.view(2, 2, KV_HEADS, WIDTH), v.view(2, 2, KV_HEADS, WIDTH)
    block_table = torch.tensor(table, dtype=torch.int32)
    with pytest.raises(OpError, match="do not fit in blocks"):
        ops.attention(q, k_cache, v_cache, int32(0, 4), int32(4), block_table)


def test_no_tokens_return_an_empty_result() -> None:
    q, k, v = qkv(0)
    assert ops.attention(q, k, v, int32(0)).shape == q.shape


def test_more_queries_than_keys_raises_with_a_hint() -> None:
    q, k, v = qkv(3)
    with pytest.raises(OpError, match="3 queries but 2 keys"):
        ops.attention(q, k[:2], v[:2], int32(0, 3), int32(2))
