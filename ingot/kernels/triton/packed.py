"""Rows of many sequences, or of many groups, one after another: which tile is whose.

Sequence b has the rows `starts[b]` to `starts[b + 1]`. Its tiles begin at number
`starts[b] // TILE + b`: that leaves it as many as it needs, at times one more that has no rows, and
can be computed without adding up the tiles of those before it. The host need not know the lengths,
so nothing waits for the GPU.
"""

# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def owner(starts, count, tile, EACH: tl.constexpr, TILE: tl.constexpr):
    """The sequence that a tile belongs to, by bisection; each row counts `EACH` times."""
    low = 0
    high = count
    while low < high:
        middle = (low + high) // 2
        first = tl.load(starts + middle).to(tl.int32) * EACH // TILE + middle
        if first <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


def tiles(rows: int, count: int, tile: int) -> int:
    """How many tiles there are at most.

    >>> tiles(rows=10, count=3, tile=4)
    5
    """
    return rows // tile + count
