from __future__ import annotations

import pytest
import torch
from torch import nn

from ingot.core.errors import IngotError
from ingot.nn import Attention, BatchLayout, KVCache, KVSpec

SPEC = KVSpec(layers=2, kv_heads=1, head_dim=4, dtype=torch.float32)


def test_slot_mapping_and_positions_of_new_tokens() -> None:
    kv_cache = KVCache(SPEC, num_blocks=9, block_size=3)
    table = torch.tensor([[8, 2, 5], [1, 0, 0], [4, 7, 0]])
    layout = BatchLayout.paged(kv_cache, [2, 0, 4], [7, 1, 4], table)
    assert layout.positions.tolist() == [5, 6, 0, 1, 2, 3]
    assert layout.slot_mapping is not None
    assert layout.slot_mapping.tolist() == [2 * 3 + 2, 5 * 3, 4 * 3, 4 * 3 + 1, 4 * 3 + 2, 7 * 3]
    assert layout.cu_seqlens.tolist() == [0, 2, 2, 6]


def test_kv_cache_is_one_allocation() -> None:
    kv_cache = KVCache(SPEC, num_blocks=2, block_size=3)
    kv_cache.k[1][1, 1], kv_cache.v[1][0, 0] = 1.0, 1.0
    assert kv_cache.memory.count_nonzero() == 8
    assert kv_cache.memory.nbytes == 6 * SPEC.bytes_per_token


@pytest.mark.parametrize(
    ("lengths", "contexts", "rows"),
    [([2], [1], 1), ([-1], [3], 1), ([1], [7], 1), ([1, 1], [1], 1), ([1], [1], 2)],
)
def test_invalid_layouts_raise(lengths: list[int], contexts: list[int], rows: int) -> None:
    kv_cache = KVCache(SPEC, num_blocks=4, block_size=3)
    with pytest.raises(IngotError):
        BatchLayout.paged(kv_cache, lengths, contexts, torch.zeros(rows, 2))


def test_kv_cache_without_blocks_raises() -> None:
    with pytest.raises(IngotError, match="got 0 and 16"):
        KVCache(SPEC, num_blocks=0, block_size=16)


def test_caching_keys_with_gradients_raises() -> None:
    attention = Attention(8, heads=2)
    spec = KVSpec.of(attention)
    assert spec is not None
    kv_cache = KVCache(spec, num_blocks=1, block_size=4)
    layout = BatchLayout.paged(kv_cache, [2], [2], torch.tensor([[0]]))
    with pytest.raises(IngotError, match="no gradient"):
        attention(torch.ones(2, 8), layout)


def test_kv_spec_of_a_model_combines_its_layers() -> None:
    layers = [Attention(8, heads=2, kv_heads=1, layer=i) for i in range(3)]
    spec = KVSpec.of(nn.ModuleList(layers))
    assert spec == KVSpec(layers=3, kv_heads=1, head_dim=4, dtype=torch.float32)
    assert KVSpec.of(nn.ModuleList(layers).bfloat16()).dtype == torch.bfloat16  # pyright: ignore


def test_layers_with_duplicate_index_or_different_shape_raise() -> None:
    with pytest.raises(IngotError, match="number the layers"):
        KVSpec.of(nn.ModuleList([Attention(8, heads=2), Attention(8, heads=2)]))
    different = [Attention(8, heads=2, layer=0), Attention(8, heads=4, layer=1)]
    with pytest.raises(IngotError, match="different KV shapes"):
        KVSpec.of(nn.ModuleList(different))


def test_int8_cache_has_a_scale_for_each_token_and_head() -> None:
    spec = KVSpec(layers=2, kv_heads=3, head_dim=64, dtype=torch.int8)
    kv_cache = KVCache(spec, num_blocks=2, block_size=4)
    assert kv_cache.k[0].shape == (2, 4, 3, 68)
    assert kv_cache.memory.nbytes == 8 * spec.bytes_per_token == 8 * 2 * 2 * 3 * 68
