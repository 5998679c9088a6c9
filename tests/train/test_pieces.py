"""Every parameter with a gradient is in one piece, in order."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from ingot.train.pieces import PIECE, pieces


@given(st.lists(st.tuples(st.integers(0, PIECE // 2), st.booleans()), max_size=12))
def test_pieces(sizes: list[tuple[int, bool]]) -> None:
    weights = [torch.empty(1, dtype=torch.float32).expand(size) for size, _ in sizes]
    for weight, (_, used) in zip(weights, sizes, strict=True):
        if used:
            weight.grad = torch.empty(1).expand(weight.shape)
    found = list(pieces(weights))
    wanted = [weight for weight in weights if weight.grad is not None]
    assert [id(weight) for piece in found for weight in piece] == [id(w) for w in wanted]
    for piece in found:
        assert len(piece) == 1 or sum(weight.nbytes for weight in piece) <= PIECE
    assert all(found)
