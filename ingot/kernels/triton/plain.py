"""The plainest kernels for a product and for attention: what ours are held against.

They are the algorithms of Triton's tutorials 03 (matrix multiplication) and 06 (fused attention),
in the tiles that those name for large products and heads of 128 channels. They know no bias, no
packed sequences, no grouped heads, no window, no pages and no exactness. Nobody calls them: they
are compiled as our own are, so that a table can show what all of that costs.
"""

# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ingot.kernels.triton.kernel import Config, Kernel, Launch
from ingot.kernels.triton.provider import Meta

_GROUP = 8  # tiles of rows that are taken together, for L2


@triton.jit
def _product(
    x, weight, y, rows, columns, depth, x_row, weight_row, y_row,
    GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """A tile of x (M, K) times the transpose of weight (N, K)."""
    program = tl.program_id(0)
    in_group = GROUP * tl.cdiv(columns, COLUMNS)
    top = program // in_group * GROUP
    height = tl.minimum(tl.cdiv(rows, ROWS) - top, GROUP)
    row = (top + program % in_group % height) * ROWS + tl.arange(0, ROWS)
    column = program % in_group // height * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, INNER)
    left = x + (row % rows)[:, None] * x_row + inner[None, :]
    right = weight + (column % columns)[None, :] * weight_row + inner[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, depth, INNER):
        a = tl.load(left, (inner < depth - first)[None, :], other=0.0)
        b = tl.load(right, (inner < depth - first)[:, None], other=0.0)
        total = tl.dot(a, b, total)
        left += INNER
        right += INNER
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(y + row[:, None] * y_row + column[None, :], total.to(y.dtype.element_ty), inside)


@triton.jit
def _attend(
    q, k, v, y, length, scale, WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr
):  # fmt: skip
    """Causal attention of a tile of queries of one head; (heads, length, WIDTH), contiguous."""
    head = tl.program_id(1).to(tl.int64) * length * WIDTH
    channel = tl.arange(0, WIDTH)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = head + row[:, None] * WIDTH + channel[None, :]
    queries = tl.load(q + at, (row < length)[:, None], other=0.0)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, WIDTH], tl.float32)
    for first in range(0, tl.minimum((tl.program_id(0) + 1) * ROWS, length), KEYS):
        key = first + tl.arange(0, KEYS)
        there = key < length
        keys = tl.load(k + head + key[None, :] * WIDTH + channel[:, None], there[None, :])
        scores = tl.dot(queries, keys) * scale
        scores = tl.where(key[None, :] <= row[:, None], scores, float("-inf"))
        now = tl.maximum(largest, tl.max(scores, 1))
        p = tl.exp2(scores - now[:, None])
        shrunk = tl.exp2(largest - now)
        total = total * shrunk + tl.sum(p, 1)
        values = tl.load(
            v + head + key[:, None] * WIDTH + channel[None, :], (key < length)[:, None]
        )
        result = tl.dot(p.to(values.dtype), values, result * shrunk[:, None])
        largest = now
    mean = result / total[:, None]
    tl.store(y + at, mean.to(y.dtype.element_ty), (row < length)[:, None])


def plain() -> dict[str, tuple[Launch, Config]]:
    """A launch of each, at the shape of our own representative call, and its configuration."""
    make = Meta()
    x, weight, y = make(8192, 4096), make(4096, 4096), make(8192, 4096)
    heads = [make(32, 8192, 128) for _ in range(4)]
    sizes = (8192, 4096, 4096, 4096, 4096, 4096)
    return {
        "tutorial 03, matmul": (
            _launch("plain_product", _product, (x, weight, y, *sizes), GROUP=_GROUP),
            Config.of(8, 3, ROWS=128, COLUMNS=256, INNER=64),
        ),
        "tutorial 06, attention": (
            _launch("plain_attention", _attend, (*heads, 8192, 0.1), WIDTH=128),
            Config.of(8, 3, ROWS=128, KEYS=128),
        ),
    }


def _launch(name: str, function: Any, args: tuple[Any, ...], **constants: int) -> Launch:
    kernel = Kernel(
        name=name,
        function=function,
        space=lambda *_, **__: iter(()),
        bound="tensor cores",
        scalars=0,
        keys=None,
    )
    return Launch(kernel, (), args, constants)
