"""Reads memory as fast as a core can: the probe of every bandwidth measurement.

`torch.mv` over float32 rows of 64 KiB. BLAS reads several rows at once, and a core needs several
streams to keep its line buffers full; `sum`, `amax` and `dot` have one or two.
"""

# pyright: basic
from __future__ import annotations

from itertools import cycle

import torch
from torch import Tensor

from ingot.bench.timing import Run

ROW = 16384  # float32 values: 64 KiB
ROW_BYTES = 4 * ROW


def allocate(size: int, device: torch.device | str = "cpu") -> Tensor:
    """Return rows of ones that take about `size` bytes.

    torch.ones writes every page: pages never written all map to the one page of zeros.
    """
    return torch.ones(max(1, size // ROW_BYTES), ROW, device=device)


def make_reader(rows: Tensor, rows_per_call: int) -> Run:
    """Return a function that reads the next `rows_per_call` rows at each call, round and round."""
    vector = torch.ones(ROW, device=rows.device)
    windows = cycle(rows[: len(rows) // rows_per_call * rows_per_call].split(rows_per_call))
    return lambda: torch.mv(next(windows), vector)
