"""Embedding: look up a row of the weight for each token.

`embedding_int8` and `embedding_int4` decode the rows of a quantized table: see `ingot.ops.codec`.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ingot.core.errors import OpError
from ingot.ops.arguments import accum_dtype
from ingot.ops.check import is_integral
from ingot.ops.codec import (
    decode_int4,
    decode_int8,
    sample_int4,
    sample_int8,
    scale_shape,
    to_panels,
    to_rows,
    weight_shape,
)
from ingot.ops.inputs import SampleInput, TensorMaker
from ingot.ops.op import op
from ingot.ops.record import Cost, Tolerance


def _samples(make: TensorMaker) -> Iterator[SampleInput]:
    yield SampleInput("typical", (make.ints(50, 16), make(50, 32)))
    yield SampleInput("odd", (make.ints(11, 7), make(11, 13)))
    yield SampleInput("one_row", (make.ints(11, 1), make(11, 13)))
    yield SampleInput("strided", (make.ints(11, 5), make(13, 11).T))
    yield SampleInput("extreme", (make.ints(11, 5), make.spread(11, 9, low=-14, high=12)))
    yield SampleInput("large", (make.ints(103, 67), make(103, 257)))
    yield SampleInput("int32", (make.ints(11, 5, dtype=torch.int32), make(11, 8)))
    yield SampleInput("repeated", (make.tensor([3, 3, 3, 0]), make(5, 8)))
    yield SampleInput("batched", (make.ints(11, 2, 3), make(11, 8)))


def _check_tokens(op: str, tokens: Tensor) -> None:
    if not is_integral(tokens) or tokens.dtype == torch.bool:
        raise OpError(
            f"{op}: tokens are {tokens.dtype}",
            hint="pass token ids in int32 or int64; the weight is the second argument",
        )


def _check(tokens: Tensor, weight: Tensor) -> None:
    _check_tokens("embedding", tokens)
    if weight.dim() != 2:
        raise OpError(f"embedding: weight is {tuple(weight.shape)}", hint="pass (V, D)")


def _fake(tokens: Tensor, weight: Tensor) -> Tensor:
    return weight.new_empty((*tokens.shape, weight.shape[1]))


def _cost(tokens: Tensor, weight: Tensor) -> Cost:
    row_bytes = weight.shape[1] * weight.itemsize
    return Cost(bytes=tokens.nbytes + 2 * tokens.numel() * row_bytes, flops=0)


@op(
    check=_check,
    fake=_fake,
    samples=_samples,
    tolerance=Tolerance(),
    cost=_cost,
    row_args=("tokens",),
)
def embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    """Return the row of `weight` for each token.

    >>> embedding(torch.tensor([1, 0]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([[3., 4.],
            [1., 2.]])
    """
    rows = weight.index_select(0, tokens.flatten())  # unlike weight[tokens], rejects negative ids
    return rows.view(*tokens.shape, weight.shape[1])


def _int8_samples(make: TensorMaker) -> Iterator[SampleInput]:
    low = make.dtype == torch.bfloat16
    for name, rows, width in (("typical", 50, 32), ("odd", 11, 13), ("large", 103, 257)):
        yield SampleInput(name, (make.ints(rows, 7), *sample_int8(make, rows, width), low))
    yield SampleInput("one_row", (make.ints(11, 1), *sample_int8(make, 11, 13), low))
    weight, scale = sample_int8(make, 32, 36)
    yield SampleInput("panels", (make.ints(32, 9), to_panels(weight), scale, low))
    weight, _ = sample_int8(make, 13, 64)
    scales = (make(13, 2).float().abs() + 0.5) / 90
    yield SampleInput("strided", (make.ints(13, 5), weight, scales.T.contiguous().T, low))
    yield SampleInput("extreme", (make.ints(13, 5), weight, scales * 2.0**20, low))
    yield SampleInput("batched", (make.ints(13, 2, 3), weight, scales, low))


def _int4_samples(make: TensorMaker) -> Iterator[SampleInput]:
    low = make.dtype == torch.bfloat16
    for name, rows, width, group in (("typical", 50, 64, 32), ("large", 103, 256, 128)):
        packed, scale, zero = sample_int4(make, rows, width, group)
        yield SampleInput(name, (make.ints(rows, 16), packed, scale, zero, None, low))
    packed, scale, zero = sample_int4(make, 48, 64, 32)
    panels = [to_panels(tensor) for tensor in (packed, scale, zero)]
    yield SampleInput("panels", (make.ints(48, 9), *panels, None, low))
    packed, scale, zero = sample_int4(make, 13, 96, 32)
    yield SampleInput("odd", (make.ints(13, 7), packed, scale, None, None, low))
    yield SampleInput("one_row", (make.ints(13, 1), packed, scale, None, zero, low))
    transposed = scale.T.contiguous().T, zero.T.contiguous().T
    yield SampleInput("strided", (make.ints(13, 5), packed, *transposed, None, low))
    yield SampleInput("extreme", (make.ints(13, 5), packed, scale * 2.0**20, zero, None, low))
    yield SampleInput("batched", (make.ints(13, 2, 3), packed, scale, zero, None, low))


def _check_table(
    op: str, tokens: Tensor, weight: Tensor, scale: Tensor, dtype: torch.dtype
) -> None:
    _check_tokens(op, tokens)
    rows, row_bytes = weight_shape(weight)
    channels = row_bytes * (2 if dtype == torch.uint8 else 1)
    scales, groups = scale_shape(scale)
    fits = weight.dtype == dtype and rows > 0 and scale.dim() > 0
    if not fits or scales != rows or groups < 1 or channels % groups:
        raise OpError(
            f"{op}: weight is {weight.dtype} {tuple(weight.shape)}, scale {tuple(scale.shape)}",
            hint="pass a table of (V, D) and one scale per row, or per row and group of channels",
        )


def _check_int8(tokens: Tensor, weight: Tensor, scale: Tensor, bf16: bool) -> None:
    _check_table("embedding_int8", tokens, weight, scale, torch.int8)


def _check_int4(
    tokens: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    minimum: Tensor | None,
    bf16: bool,
) -> None:
    _check_table("embedding_int4", tokens, weight, scale, torch.uint8)
    offsets = [offset for offset in (zero_point, minimum) if offset is not None]
    if len(offsets) > 1 or any(offset.shape != scale.shape for offset in offsets):
        raise OpError(
            f"embedding_int4: scale is {tuple(scale.shape)}, zero_point or minimum differs",
            hint="pass at most one of zero_point and minimum, in the shape of scale",
        )


def _table_fake(tokens: Tensor, weight: Tensor, *args: Any) -> Tensor:
    width = weight_shape(weight)[1] * (2 if weight.dtype == torch.uint8 else 1)
    dtype = torch.bfloat16 if args[-1] else accum_dtype(args[0].dtype)
    return weight.new_empty((*tokens.shape, width), dtype=dtype)


def _table_cost(tokens: Tensor, weight: Tensor, *args: Any) -> Cost:
    width = weight_shape(weight)[1] * (2 if weight.dtype == torch.uint8 else 1)
    tensors = (weight, *(arg for arg in args if isinstance(arg, Tensor)))
    read = sum(tensor.nbytes for tensor in tensors) // max(1, weight_shape(weight)[0])
    result = width * (2 if args[-1] is True else 4)
    return Cost(bytes=tokens.nbytes + tokens.numel() * (read + result), flops=0)


@op(
    check=_check_int8,
    fake=_table_fake,
    samples=_int8_samples,
    tolerance=Tolerance(),
    cost=_table_cost,
    row_args=("tokens",),
    gradient=None,
)
def embedding_int8(tokens: Tensor, weight: Tensor, scale: Tensor, bf16: bool = False) -> Tensor:
    """Return the rows of an int8 table for each token, in float32 or `bf16`.

    >>> table = torch.tensor([[2, -4]], dtype=torch.int8)
    >>> embedding_int8(torch.tensor([0]), table, torch.tensor([0.5]))
    tensor([[ 1., -2.]])
    """
    rows, scales = (to_rows(t).index_select(0, tokens.flatten()) for t in (weight, scale))
    values = decode_int8(rows, scales, accum_dtype(scale.dtype))
    return values.view(*tokens.shape, -1).to(torch.bfloat16 if bf16 else values.dtype)


@op(
    check=_check_int4,
    fake=_table_fake,
    samples=_int4_samples,
    tolerance=Tolerance(),
    cost=_table_cost,
    row_args=("tokens",),
    gradient=None,
)
def embedding_int4(
    tokens: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    minimum: Tensor | None = None,
    bf16: bool = False,
) -> Tensor:
    """Return the rows of a 4-bit table for each token, in float32 or `bf16`.

    >>> table = torch.full((1, 16), 0x9A, dtype=torch.uint8)
    >>> embedding_int4(torch.tensor([0]), table, torch.tensor([[0.5]]))[0, :2]
    tensor([1.0000, 0.5000])
    """

    def select(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else to_rows(tensor).index_select(0, tokens.flatten())

    rows = map(select, (weight, scale, zero_point, minimum))
    values = decode_int4(*rows, accum_dtype(scale.dtype))  # pyright: ignore
    return values.view(*tokens.shape, -1).to(torch.bfloat16 if bf16 else values.dtype)
