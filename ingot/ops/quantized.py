"""Linear layers with quantized weights.

    linear_int8(x)         = x (s * W)^T           int8 weight, x as it is (W8A16)
    linear_int8_dynamic(x) = (t * Q) (s * W)^T     x rounded to int8 too: Q = round(x / t) (W8A8)
    linear_int4(x)         = x (s * (W - z))^T     4-bit weight, s and z per group (W4A16)

each followed by the epilogue of `linear`: `residual + activation(... + bias)`.

The quantized weight is data: errors are measured against the GEMM with the dequantized weight, not
against the weight before quantization. The weight has no gradient; scales and `x` have one, except
in `linear_int8_dynamic`, where rounding has none.

- int8 weights are (out, in), with one scale per row.
- int4 weights are (out, in / 2) bytes. The low nibble is an even channel, the high nibble the next
  one. `scale` and `zero_point` are (out, in / group_size) for groups of 32, 64 or 128 consecutive
  channels. Without `zero_point`, 8 represents 0.
- Scales may have any floating dtype; the arithmetic is in float32.
- Where x is quantized, a row's scale is its max magnitude over 127. Values are rounded to nearest,
  ties to even, in float32 for every dtype, so that all providers round alike. A row with a
  non-finite value yields a non-finite row.

References: Dettmers et al. 2022 (LLM.int8()), Frantar et al. 2022 (GPTQ), Lin et al. 2023 (AWQ).
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ingot.core.errors import OpError
from ingot.ops.check import check_same_dtype
from ingot.ops.epilogue import (
    IDENTITY,
    SILU,
    ActivationFn,
    apply_epilogue,
    check_epilogue,
    epilogue_bytes,
)
from ingot.ops.inputs import SampleInput, TensorMaker
from ingot.ops.op import op
from ingot.ops.record import Cost, Tolerance

GROUP_SIZES = (32, 64, 128)
# Max K for which a dot product of int8 vectors fits int32.
MAX_INT8_K = 131072
# Rows of smaller magnitude use this one, so that the scale is a normal number.
_MIN_MAGNITUDE = 2.0**-100


def pack_int4(weight: Tensor) -> Tensor:
    """Pack integers from 0 to 15, (out, in), into bytes, (out, in / 2).

    >>> pack_int4(torch.tensor([[1, 2, 3, 15]]))
    tensor([[ 33, 243]], dtype=torch.uint8)
    """
    return (weight[..., ::2] | weight[..., 1::2] << 4).to(torch.uint8)


def unpack_int4(packed: Tensor) -> Tensor:
    """Unpack bytes, (out, in / 2), into integers from 0 to 15, (out, in).

    >>> unpack_int4(torch.tensor([[33, 243]], dtype=torch.uint8))
    tensor([[ 1,  2,  3, 15]], dtype=torch.uint8)
    """
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize each row to int8 with a scale in float32: `x` is about `q * scale[..., None]`.

    >>> quantize_rows(torch.tensor([[1.0, -127.0]]))
    (tensor([[   1, -127]], dtype=torch.int8), tensor([1.]))
    """
    wide = x.float()
    scale = wide.abs().amax(-1).clamp_min(_MIN_MAGNITUDE) / 127
    return (wide / scale[..., None]).round().to(torch.int8), scale


def _int8(make: TensorMaker, out: int, width: int) -> tuple[Tensor, Tensor]:
    """Return a weight whose dequantized values have a typical magnitude, and its scales."""
    weight = (make.ints(256, out, width) - 128).to(torch.int8)
    return weight, (make(out).float().abs() + 0.5) / (90 * width**0.5)


def _biased_int8_samples(make: TensorMaker) -> Iterator[SampleInput]:
    yield SampleInput("typical", (make(6, 64), *_int8(make, 48, 64), make(48)))
    yield SampleInput("large", (make(67, 260), *_int8(make, 131, 260), make(131)))
    yield SampleInput("odd", (make(5, 37), *_int8(make, 19, 37), None))
    yield SampleInput("one_row", (make(1, 48), *_int8(make, 32, 48), make(32)))
    weight, scale = _int8(make, 24, 17)
    yield SampleInput(
        "strided", (make.strided(4, 24), weight.T, make.strided(17).float().abs() / 400)
    )
    yield SampleInput("extreme", (make.spread(4, 33), *_int8(make, 9, 33), make(9)))
    yield SampleInput("long_rows", (make(2, 4100), *_int8(make, 5, 4100), None))
    x = make(2, 3, 16)
    x[1, 1] = 0
    yield SampleInput("batched", (x, *_int8(make, 8, 16), None))
    weight, scale = _int8(make, 8, 16)
    yield SampleInput("half_scales", (make(3, 16), weight, scale.to(make.dtype), None))


def _int8_samples(make: TensorMaker) -> Iterator[SampleInput]:
    yield from _biased_int8_samples(make)
    args = make(6, 64), *_int8(make, 48, 64), make(48)
    yield from _epilogue_samples(make, args)


def _epilogue_samples(make: TensorMaker, args: tuple[Any, ...]) -> Iterator[SampleInput]:
    """Yield a call of shape (6, 64) x (48, 64) with each epilogue."""
    for activation in ActivationFn:
        if activation != IDENTITY:
            yield SampleInput(f"typical_{activation.name.lower()}", (*args, int(activation)))
    yield SampleInput("typical_residual", (*args, IDENTITY, make(6, 48)))
    yield SampleInput("typical_silu_residual", (*args, SILU, make(6, 48)))


def _int4(make: TensorMaker, out: int, width: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    packed = make.ints(256, out, width // 2, dtype=torch.uint8)
    scale = (make(out, width // group).float().abs() + 0.5) / (6 * width**0.5)
    return packed, scale, 7 + make(out, width // group).float()


def _biased_int4_samples(make: TensorMaker) -> Iterator[SampleInput]:
    yield SampleInput("typical", (make(6, 64), *_int4(make, 48, 64, 32), make(48)))
    yield SampleInput("large", (make(67, 384), *_int4(make, 131, 384, 128), make(131)))
    yield SampleInput("odd", (make(5, 96), *_int4(make, 19, 96, 32), None))
    packed, scale, _ = _int4(make, 32, 128, 64)
    yield SampleInput("one_row", (make(1, 128), packed, scale, None, make(32)))
    packed, scale, _ = _int4(make, 32, 34, 32)
    transposed = packed.T, make.strided(17, 2).float().abs() / 40, make.strided(17, 2).float()
    yield SampleInput("strided", (make.strided(4, 64), *transposed, make.strided(17)))
    yield SampleInput("extreme", (make.spread(4, 64), *_int4(make, 9, 64, 64), make(9)))
    yield SampleInput("batched", (make(2, 3, 64), *_int4(make, 8, 64, 64), None))
    packed, scale, zero = _int4(make, 8, 64, 32)
    halves = scale.to(make.dtype), zero.to(make.dtype)
    yield SampleInput("half_scales", (make(3, 64), packed, *halves, None))


def _int4_samples(make: TensorMaker) -> Iterator[SampleInput]:
    yield from _biased_int4_samples(make)
    yield from _epilogue_samples(make, (make(6, 64), *_int4(make, 48, 64, 32), make(48)))


def _check_int8(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    activation: int,
    residual: Tensor | None,
) -> None:
    check_same_dtype("linear_int8", x=x)
    if weight.dtype != torch.int8 or weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise OpError(
            f"linear_int8: x has {x.shape[-1]} channels, weight is {weight.dtype} "
            f"{tuple(weight.shape)}",
            hint="pass a weight of (out, in) in int8, in being x's channels",
        )
    if scale.shape != weight.shape[:1] or not scale.is_floating_point():
        raise OpError(
            f"linear_int8: weight is {tuple(weight.shape)}, scale {scale.dtype} "
            f"{tuple(scale.shape)}",
            hint="pass floats, one per row of the weight",
        )
    check_epilogue("linear_int8", x, weight.shape[0], bias, activation, residual)


def _check_dynamic(x: Tensor, *args: Any) -> None:
    _check_int8(x, *args)
    if not 0 < x.shape[-1] <= MAX_INT8_K:
        raise OpError(
            f"linear_int8_dynamic: x has {x.shape[-1]} channels",
            hint=f"pass 1 to {MAX_INT8_K}: sums are in int32",
        )


def _check_int4(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    bias: Tensor | None,
    activation: int,
    residual: Tensor | None,
) -> None:
    check_same_dtype("linear_int4", x=x)
    if weight.dtype != torch.uint8 or weight.dim() != 2 or 2 * weight.shape[1] != x.shape[-1]:
        raise OpError(
            f"linear_int4: x has {x.shape[-1]} channels, weight is {weight.dtype} "
            f"{tuple(weight.shape)}",
            hint="pass a weight of (out, in / 2) bytes, in being x's channels",
        )
    fits = scale.dim() == 2 and scale.shape[0] == weight.shape[0] and scale.shape[1] > 0
    if not fits or x.shape[-1] not in [group * scale.shape[1] for group in GROUP_SIZES]:
        raise OpError(
            f"linear_int4: {weight.shape[0]} rows of {x.shape[-1]} channels, scale is "
            f"{tuple(scale.shape)}",
            hint="pass one scale per row and group of 32, 64 or 128 channels",
        )
    check_same_dtype("linear_int4", scale=scale, zero_point=zero_point)
    if zero_point is not None and zero_point.shape != scale.shape:
        raise OpError(
            f"linear_int4: scale is {tuple(scale.shape)}, zero_point {tuple(zero_point.shape)}",
            hint="pass both in the same shape",
        )
    check_epilogue("linear_int4", x, weight.shape[0], bias, activation, residual)


def _fake(x: Tensor, weight: Tensor, *_: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _int8_cost(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    activation: int = IDENTITY,
    residual: Tensor | None = None,
) -> Cost:
    rows = x.numel() // x.shape[-1]
    result = rows * weight.shape[0] * x.itemsize + epilogue_bytes(residual)
    return Cost(
        bytes=x.nbytes + weight.nbytes + scale.nbytes + result, flops=2 * rows * weight.numel()
    )


def _int4_cost(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    bias: Tensor | None = None,
    activation: int = IDENTITY,
    residual: Tensor | None = None,
) -> Cost:
    rows = x.numel() // x.shape[-1]
    result = rows * weight.shape[0] * x.itemsize + epilogue_bytes(residual)
    scales = scale.nbytes * (1 if zero_point is None else 2)
    return Cost(bytes=x.nbytes + weight.nbytes + scales + result, flops=4 * rows * weight.numel())


@op(
    check=_check_int8,
    fake=_fake,
    samples=_int8_samples,
    tolerance=Tolerance(),
    cost=_int8_cost,
    row_args=("x", "residual"),
)
def linear_int8(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    activation: int = IDENTITY,
    residual: Tensor | None = None,
) -> Tensor:
    """Apply `linear` with an int8 weight and a scale per row of it (W8A16).

    >>> weight = torch.tensor([[3, 4]], dtype=torch.int8)
    >>> linear_int8(torch.tensor([[1.0, 2.0]]), weight, torch.tensor([0.5]))
    tensor([[5.5000]])
    """
    y = x @ (weight.to(x.dtype) * scale.to(x.dtype)[:, None]).T
    return apply_epilogue(y, bias, activation, residual)


@op(
    check=_check_dynamic,
    fake=_fake,
    samples=_int8_samples,
    tolerance=Tolerance(),
    cost=_int8_cost,
    row_args=("x", "residual"),
    gradient=None,
)
def linear_int8_dynamic(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    activation: int = IDENTITY,
    residual: Tensor | None = None,
) -> Tensor:
    """Apply `linear_int8` with each row of x quantized to int8 too, in an integer GEMM (W8A8).

    >>> weight = torch.tensor([[3, 4]], dtype=torch.int8)
    >>> linear_int8_dynamic(torch.tensor([[63.6, 127.0]]), weight, torch.tensor([0.5]))
    tensor([[350.]])
    """
    q, x_scale = quantize_rows(x)
    rounded = q.to(x.dtype) * x_scale.to(x.dtype)[..., None]
    y = rounded @ (weight.to(x.dtype) * scale.to(x.dtype)[:, None]).T
    return apply_epilogue(y, bias, activation, residual)


@op(
    check=_check_int4,
    fake=_fake,
    samples=_int4_samples,
    tolerance=Tolerance(),
    cost=_int4_cost,
    row_args=("x", "residual"),
)
def linear_int4(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    bias: Tensor | None = None,
    activation: int = IDENTITY,
    residual: Tensor | None = None,
) -> Tensor:
    """Apply `linear` with a 4-bit weight and a scale per group of channels (W4A16).

    >>> weight = torch.full((1, 16), 0x9A, dtype=torch.uint8)  # 10 and 9, which are 2 and 1
    >>> linear_int4(torch.ones(1, 32), weight, torch.tensor([[0.5]]))
    tensor([[24.]])
    """
    groups = scale.to(x.dtype)[..., None]
    offset = 8 if zero_point is None else zero_point.to(x.dtype)[..., None]
    values = unpack_int4(weight).to(x.dtype).unflatten(-1, (scale.shape[1], -1))
    y = x @ ((values - offset) * groups).flatten(-2).T
    return apply_epilogue(y, bias, activation, residual)
