from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ingot.core.errors import DataError
from ingot.data.array import ArrayDataset, xor
from ingot.data.loader import Loader


def rows(count: int) -> ArrayDataset:
    return ArrayDataset(torch.arange(2.0 * count).view(count, 2), torch.arange(count))


def test_x_and_y_stay_together() -> None:
    batch = next(Loader(rows(20), batch_size=6, seed=5))
    assert batch.y.tolist() == batch.sample_ids
    assert torch.equal(batch.x[:, 0], 2.0 * batch.y)


@given(count=st.integers(2, 60), fraction=st.floats(0.01, 0.99))
def test_a_split_keeps_every_sample_on_one_side(count: int, fraction: float) -> None:
    if not 0 < round(count * fraction) < count:
        return
    train, validation = rows(count).split(fraction)
    assert sorted(train.y.tolist() + validation.y.tolist()) == list(range(count))
    assert len(validation) == round(count * fraction)
    again = rows(count).split(fraction)
    assert torch.equal(again[1].y, validation.y)


def test_a_split_does_not_follow_the_order() -> None:
    _, validation = rows(1000).split(0.2)
    assert 80 < (validation.y < 500).sum() < 120


@pytest.mark.parametrize("fraction", [0.0, 1.0, 0.01, -1.0, 2.0])
def test_a_split_that_leaves_no_samples_is_rejected(fraction: float) -> None:
    with pytest.raises(DataError, match="empty"):
        rows(10).split(fraction)


def test_rows_that_do_not_match_are_rejected() -> None:
    with pytest.raises(DataError, match="one row of each"):
        ArrayDataset(torch.zeros(3, 2), torch.zeros(2))


def test_xor_is_exclusive_or() -> None:
    for x, y in zip(xor().x.tolist(), xor().y.tolist(), strict=True):
        assert y == (x[0] != x[1])
