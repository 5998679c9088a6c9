"""Every weight is in one chunk, in order."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from ingot.training.chunked import CHUNK_BYTES, chunk_by_bytes


@given(st.lists(st.integers(0, CHUNK_BYTES // 2), max_size=12))
def test_chunks_hold_all_weights_in_order(sizes: list[int]) -> None:
    weights = [torch.empty(1, dtype=torch.float32).expand(size) for size in sizes]
    chunks = list(chunk_by_bytes(weights))
    assert [id(weight) for chunk in chunks for weight in chunk] == [id(w) for w in weights]
    for chunk in chunks:
        assert len(chunk) == 1 or sum(weight.nbytes for weight in chunk) <= CHUNK_BYTES
    assert all(chunks)
