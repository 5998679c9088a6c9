"""Every weight is in one piece, in order."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from ingot.training.chunked import CHUNK_BYTES, chunk_by_bytes


@given(st.lists(st.integers(0, CHUNK_BYTES // 2), max_size=12))
def test_pieces(sizes: list[int]) -> None:
    weights = [torch.empty(1, dtype=torch.float32).expand(size) for size in sizes]
    found = list(chunk_by_bytes(weights))
    assert [id(weight) for piece in found for weight in piece] == [id(w) for w in weights]
    for piece in found:
        assert len(piece) == 1 or sum(weight.nbytes for weight in piece) <= CHUNK_BYTES
    assert all(found)
