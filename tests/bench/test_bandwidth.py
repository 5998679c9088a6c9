from __future__ import annotations

import pytest
import torch

from ingot.bench.bandwidth import ROW, ROW_BYTES, allocate, make_reader


@pytest.mark.parametrize(("size", "rows"), [(1, 1), (ROW_BYTES, 1), (5 * ROW_BYTES + 1, 5)])
def test_allocated_rows_fit_the_size(size: int, rows: int) -> None:
    assert allocate(size).shape == (rows, ROW)


def test_reader_walks_through_whole_windows_and_wraps_around() -> None:
    rows = allocate(5 * ROW_BYTES) * torch.arange(5)[:, None]
    read = make_reader(rows, rows_per_call=2)
    sums = [torch.as_tensor(read()).div(ROW).tolist() for _ in range(3)]
    assert sums == [[0, 1], [2, 3], [0, 1]]
