"""`embedding` on GPUs: a copy of rows; its gradient adds up the rows of equal tokens.

The tokens are sorted first, so that each row of the gradient has one program, which adds up in the
order of the tokens: no atomics, and the same bits every time. A token that is very frequent makes
its program slow. A token outside the table is a row of zeros: a kernel cannot raise.
"""

# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ingot import ops
from ingot.kernels.triton.kernel import Config, by_elements, kernel
from ingot.kernels.triton.provider import Meta, as_rows, provide
from ingot.kernels.triton.target import Target


def _space(target: Target, WIDTH: int, **_: object) -> Iterator[Config]:
    yield from by_elements(target, WIDTH)


@kernel(space=_space, bound="bandwidth", scalars=1)
@triton.jit
def _embedding(
    tokens, weight, y, vocabulary, width, weight_row, weight_column, WIDTH: tl.constexpr
):
    """A piece of the row of a token."""
    place = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    token = tl.load(tokens + place).to(tl.int64)
    readable = tl.where((token >= 0) & (token < vocabulary), width, 0)
    at = weight + token * weight_row + column * weight_column
    values = tl.load(at, column < readable, other=0.0)
    tl.store(y + place * width + column, values, column < width)


@kernel(space=_space, bound="bandwidth", scalars=4)
@triton.jit
def _embedding_backward(
    tokens, order, grad, weight_grad, vocabulary, width, grad_row, WIDTH: tl.constexpr
):
    """A piece of a row: the sum over the run of equal tokens that begins at this program's.

    Behind the sorted tokens stands one that is none of them.
    """
    place = tl.program_id(0)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    token = tl.load(tokens + place).to(tl.int64)
    before = tl.load(tokens + tl.maximum(place - 1, 0)).to(tl.int64)
    begins = (place == 0) | (token != before)
    if begins & (token >= 0) & (token < vocabulary):
        total = tl.zeros([WIDTH], tl.float32)
        following = token
        while following == token:
            row = tl.load(order + place).to(tl.int64)
            total += tl.load(grad + row * grad_row + column, column < width, other=0.0).to(
                tl.float32
            )
            place += 1
            following = tl.load(tokens + place).to(tl.int64)
        at = weight_grad + token * width + column
        tl.store(at, total.to(weight_grad.dtype.element_ty), column < width)


def _tile(width: int) -> int:
    return min(2048, triton.next_power_of_2(width))


def embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    """One kernel."""
    vocabulary, width = weight.shape
    y = weight.new_empty((*tokens.shape, width))
    tile = _tile(width)
    _embedding.launch(
        (tokens.numel(), triton.cdiv(width, tile)),
        *(tokens.contiguous(), weight, y, vocabulary, width, *weight.stride()),
        WIDTH=tile,
    )
    return y


def _backward(
    needs: list[bool], grads: list[Tensor], tokens: Tensor, weight: Tensor
) -> list[Tensor | None]:
    vocabulary, width = weight.shape
    of_weight = weight.new_zeros(weight.shape)
    grad = as_rows(grads[0])
    ranked, order = tokens.flatten().sort(stable=True)
    tile = _tile(width)
    _embedding_backward.launch(
        (tokens.numel(), triton.cdiv(width, tile)),
        *(torch.cat((ranked, ranked.new_full((1,), -1))), order, grad, of_weight),
        *(vocabulary, width, grad.stride(0)),
        WIDTH=tile,
    )
    return [None, of_weight]


def _fits(tokens: Tensor, weight: Tensor) -> bool:
    return tokens.numel() > 0 and weight.numel() > 0 and tokens.dtype != torch.uint8


def _example(make: Meta) -> tuple[Any, ...]:
    return make.ints(8192, below=131072), make(131072, 4096)


provide(ops.embedding, embedding, example=_example, supports=_fits, backward=_backward)
