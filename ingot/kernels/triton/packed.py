"""Mapping of tiles to sequences (or groups) whose rows are packed one after another.

Sequence b owns the rows `cu_rows[b]` to `cu_rows[b + 1]`. Its first tile has the index
`cu_rows[b] // BLOCK + b`. This leaves every sequence enough tiles, sometimes one too many, and can
be computed without summing the tile counts of the preceding sequences. The host does not need the
lengths, so a launch never waits for the GPU.
"""

# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_sequence(cu_rows, num_sequences, tile, GROUP_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the sequence that owns a tile, by bisection; each row counts `GROUP_SIZE` times."""
    low = 0
    high = num_sequences
    while low < high:
        middle = (low + high) // 2
        first_tile = tl.load(cu_rows + middle).to(tl.int32) * GROUP_SIZE // BLOCK + middle
        if first_tile <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


def max_tiles(num_rows: int, num_sequences: int, block: int) -> int:
    """Return an upper bound on the number of tiles.

    >>> max_tiles(num_rows=10, num_sequences=3, block=4)
    5
    """
    return num_rows // block + num_sequences
