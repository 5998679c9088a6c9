"""Linear layers with quantized weights.

    linear_int8(x)         = x (s * W)^T           int8 weight, x as it is (W8A16)
    linear_int4(x)         = x (s * (W - z))^T     4-bit weight, s and z per group (W4A16)
    linear_int8_dynamic(x) = (t * Q) (s * W)^T     x rounded to int8 too: Q = round(x / t) (W8A8)
    linear_int4_dynamic(x) = (t * Q) (s * (W - z))^T                                       (W4A8)

each followed by the epilogue of `linear`: `residual + activation(... + bias)`. The dynamic ops have
the rest of it, too: LoRA adapters, and `gated`, where the weight has the rows of gate and of up and
the result is `activation(gate) * up`.

The quantized weight is data: errors are measured against the GEMM with the dequantized weight, not
against the weight before quantization. It has no gradient; scales and `x` have one, which the
dynamic ops pass through the rounding of x (straight-through).

- int8 weights are (out, in), with one scale per row.
- The weights of the dynamic ops may also be in panels: see `ingot.ops.codec`.
- int4 weights are (out, in / 2) bytes. The low nibble is an even channel, the high nibble the next
  one. `scale` and `zero_point` are (out, in / group_size) for groups of 32, 64 or 128 consecutive
  channels. Without `zero_point`, 8 represents 0.
- `minimum` replaces the zero point by a term of its own, s * W + m, as in GGUF's Q4_1.
- Scales may have any floating dtype; the arithmetic is in float32. The kernels read the scales of
  adjacent rows together: pass panels, or the transpose of a contiguous (groups, out).
- Where x is quantized, each row is, in groups of channels: those of the weight's scales, or
  `x_group` channels if the weight has one scale per row, where 0 is the whole row. A channel of
  large magnitude then costs precision in its own group only. The scale of a group is its max
  magnitude over 127. Values are rounded to nearest, ties to even, in float32 for every dtype, so
  that all providers round alike. A group with a non-finite value yields a non-finite row.

References: Dettmers et al. 2022 (LLM.int8()), Frantar et al. 2022 (GPTQ), Lin et al. 2023 (AWQ).
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ingot.core.errors import OpError
from ingot.ops.arguments import accum_dtype
from ingot.ops.check import check_same_dtype
from ingot.ops.codec import (
    GROUP_SIZES,
    INT8_GROUP_SIZES,
    decode_int4,
    decode_int8,
    round_activations,
    sample_int4,
    sample_int8,
    scale_shape,
    to_panels,
    weight_shape,
)
from ingot.ops.epilogue import (
    IDENTITY,
    SILU,
    ActivationFn,
    add_lora,
    apply_activation,
    apply_epilogue,
    check_epilogue,
    check_lora,
    epilogue_bytes,
    lora_flops,
)
from ingot.ops.gradient import straight_through
from ingot.ops.inputs import SampleInput, TensorMaker
from ingot.ops.op import op
from ingot.ops.record import Cost, Tolerance

# Max K for which a dot product of int8 vectors fits int32.
MAX_INT8_K = 131072


def _biased_int8_samples(make: TensorMaker) -> Iterator[SampleInput]:
    yield SampleInput("typical", (make(6, 64), *sample_int8(make, 48, 64), make(48)))
    yield SampleInput("large", (make(67, 260), *sample_int8(make, 131, 260), make(131)))
    yield SampleInput("odd", (make(5, 37), *sample_int8(make, 19, 37), None))
    yield SampleInput("one_row", (make(1, 48), *sample_int8(make, 32, 48), make(32)))
    weight, scale = sample_int8(make, 24, 17)
    yield SampleInput(
        "strided", (make.strided(4, 24), weight.T, make.strided(17).float().abs() / 400)
    )
    yield SampleInput("extreme", (make.spread(4, 33), *sample_int8(make, 9, 33), make(9)))
    yield SampleInput("long_rows", (make(2, 4100), *sample_int8(make, 5, 4100), None))
    x = make(2, 3, 16)
    x[1, 1] = 0
    yield SampleInput("batched", (x, *sample_int8(make, 8, 16), None))
    weight, scale = sample_int8(make, 8, 16)
    yield SampleInput("half_scales", (make(3, 16), weight, scale.to(make.dtype), None))


def _int8_samples(make: TensorMaker) -> Iterator[SampleInput]:
    yield from _biased_int8_samples(make)
    args = make(6, 64), *sample_int8(make, 48, 64), make(48)
    yield from _epilogue_samples(make, args)


def _epilogue_samples(make: TensorMaker, args: tuple[Any, ...]) -> Iterator[SampleInput]:
    """Yield a call of shape (6, 64) x (48, 64) with each epilogue."""
    for activation in ActivationFn:
        if activation != IDENTITY:
            yield SampleInput(f"typical_{activation.name.lower()}", (*args, int(activation)))
    yield SampleInput("typical_residual", (*args, IDENTITY, make(6, 48)))
    yield SampleInput("typical_silu_residual", (*args, SILU, make(6, 48)))


def _biased_int4_samples(make: TensorMaker) -> Iterator[SampleInput]:
    yield SampleInput("typical", (make(6, 64), *sample_int4(make, 48, 64, 32), make(48)))
    yield SampleInput("large", (make(67, 384), *sample_int4(make, 131, 384, 128), make(131)))
    yield SampleInput("odd", (make(5, 96), *sample_int4(make, 19, 96, 32), None))
    packed, scale, _ = sample_int4(make, 32, 128, 64)
    yield SampleInput("one_row", (make(1, 128), packed, scale, None, make(32)))
    packed, scale, _ = sample_int4(make, 32, 34, 32)
    transposed = packed.T, make.strided(17, 2).float().abs() / 40, make.strided(17, 2).float()
    yield SampleInput("strided", (make.strided(4, 64), *transposed, make.strided(17)))
    yield SampleInput("extreme", (make.spread(4, 64), *sample_int4(make, 9, 64, 64), make(9)))
    yield SampleInput("batched", (make(2, 3, 64), *sample_int4(make, 8, 64, 64), None))
    packed, scale, zero = sample_int4(make, 8, 64, 32)
    halves = scale.to(make.dtype), zero.to(make.dtype)
    yield SampleInput("half_scales", (make(3, 64), packed, *halves, None))


def _int4_samples(make: TensorMaker) -> Iterator[SampleInput]:
    yield from _biased_int4_samples(make)
    yield from _epilogue_samples(make, (make(6, 64), *sample_int4(make, 48, 64, 32), make(48)))


def _dynamic_samples(
    make: TensorMaker, args: tuple[Any, ...], between: tuple[Any, ...] = ()
) -> Iterator[SampleInput]:
    """Yield calls of shape (6, 64) x (48, 64) that only the dynamic ops have.

    `between` are the arguments between the residual and `gated`.
    """
    args = (*args, None)
    lora = make(6, 4).to(accum_dtype(make.dtype)), make(3, 4, 48, scale=0.5)
    pair = make(6, 8).to(accum_dtype(make.dtype)), make(1, 4, 48, scale=0.5)
    index = make.tensor([0, -1, 2, 2, 1, 0], torch.int32)
    none = (None, None, None)
    residual = (IDENTITY, make(6, 48), *between)
    yield SampleInput("lora", (*args, *residual, False, *lora, index, False))
    yield SampleInput("gated", (*args, SILU, make(6, 24), *between, True, *none, False))
    yield SampleInput("gated_lora", (*args, SILU, None, *between, True, *pair, None, False))
    yield SampleInput("float32", (*args, IDENTITY, None, *between, False, *none, True))


def _int8_dynamic_samples(make: TensorMaker) -> Iterator[SampleInput]:
    yield from _int8_samples(make)
    weight, scale = sample_int8(make, 48, 64)
    yield from _dynamic_samples(make, (make(6, 64), weight, scale), (32,))
    for group in GROUP_SIZES:
        args = make.spread(5, 300), *sample_int8(make, 19, 300), make(19), IDENTITY, None, group
        yield SampleInput(f"group_{group}", args)
    weight, scale = sample_int8(make, 64, 48)
    yield SampleInput("panels", (make(5, 48), to_panels(weight), scale, make(64)))
    weight, _ = sample_int8(make, 33, 192)
    scales = (make(6, 33).float().abs() + 0.5).T / 900
    yield SampleInput("group_scales", (make(4, 192), weight, scales))
    weight, _ = sample_int8(make, 16, 96)
    scales = (make(6, 16).float().abs() + 0.5).T / 900
    yield SampleInput("group_of_16", (make(3, 96), to_panels(weight), to_panels(scales)))


def _int4_dynamic_samples(make: TensorMaker) -> Iterator[SampleInput]:
    for sample in _int4_samples(make):
        x, weight, scale, zero_point, *rest = sample.args
        yield SampleInput(sample.name, (x, weight, scale, zero_point, None, *rest))
    packed, scale, minimum = sample_int4(make, 48, 64, 32)
    yield from _dynamic_samples(make, (make(6, 64), packed, scale, None, None))
    yield SampleInput("minimum", (make(6, 64), packed, scale, None, minimum / 64, make(48)))
    panels = to_panels(packed)
    yield SampleInput("panels", (make(5, 64), panels, scale, minimum))
    yield SampleInput(
        "panels_of_scales", (make(5, 64), panels, to_panels(scale), to_panels(minimum))
    )
    transposed = scale.T.contiguous().T, minimum.T.contiguous().T
    yield SampleInput("adjacent_scales", (make(3, 64), packed, *transposed))


def _check_int8(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    activation: int,
    residual: Tensor | None,
) -> None:
    _check_int8_weight("linear_int8", x, weight)
    if scale.shape != weight.shape[:1] or not scale.is_floating_point():
        raise OpError(
            f"linear_int8: weight is {tuple(weight.shape)}, scale {scale.dtype} "
            f"{tuple(scale.shape)}",
            hint="pass floats, one per row of the weight",
        )
    check_epilogue("linear_int8", x, weight.shape[0], bias, activation, residual)


def _row_bytes(op: str, weight: Tensor) -> int:
    """Return the bytes of a row; 0 for panels where the op does not take them."""
    return weight_shape(weight)[1] if weight.dim() == 2 or op.endswith("_dynamic") else 0


def _check_int8_weight(op: str, x: Tensor, weight: Tensor) -> None:
    check_same_dtype(op, x=x)
    if weight.dtype != torch.int8 or _row_bytes(op, weight) != x.shape[-1]:
        raise OpError(
            f"{op}: x has {x.shape[-1]} channels, weight is {weight.dtype} {tuple(weight.shape)}",
            hint="pass a weight of (out, in) in int8, in being x's channels",
        )


def _check_int8_dynamic(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    activation: int,
    residual: Tensor | None,
    x_group: int,
    *tail: Any,
) -> None:
    name = "linear_int8_dynamic"
    _check_int8_weight(name, x, weight)
    if scale.dim() != 1:
        _check_group_scale(name, x, weight, scale)
    elif len(scale) != weight_shape(weight)[0] or not scale.is_floating_point():
        raise OpError(
            f"{name}: weight is {tuple(weight.shape)}, scale {scale.dtype} {tuple(scale.shape)}",
            hint="pass floats, one per row of the weight, or per row and group of its channels",
        )
    if x_group not in (0, *GROUP_SIZES) or (x_group and scale.dim() != 1):
        raise OpError(
            f"{name}: x_group is {x_group}, scale {tuple(scale.shape)}",
            hint="pass 0, 32, 64 or 128 channels; with a scale per group it must be 0",
        )
    if not 0 < x.shape[-1] <= MAX_INT8_K:
        raise OpError(
            f"{name}: x has {x.shape[-1]} channels",
            hint=f"pass 1 to {MAX_INT8_K}: sums are in int32",
        )
    _check_dynamic_epilogue(name, x, weight, bias, activation, residual, *tail)


def _check_dynamic_epilogue(
    op: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: int,
    residual: Tensor | None,
    gated: bool,
    lora_h: Tensor | None,
    lora_b: Tensor | None,
    lora_index: Tensor | None,
    to_float32: bool,
) -> None:
    # The parts of a gated weight in panels must be panels, too.
    if gated and (len(weight) % 2 or bias is not None):
        raise OpError(
            f"{op}: gated, weight is {tuple(weight.shape)}",
            hint="pass the rows of gate and of up as one weight, and no bias",
        )
    parts = 2 if gated else 1
    width = weight_shape(weight)[0] // parts
    check_epilogue(op, x, width, bias, activation, residual)
    bs = [None] * parts if lora_b is None else lora_b.chunk(parts, -1)
    check_lora(op, x, width, lora_h, bs, lora_index)


def _check_group_scale(op: str, x: Tensor, weight: Tensor, scale: Tensor) -> None:
    rows, _ = weight_shape(weight)
    scales, groups = scale_shape(scale)
    sizes = GROUP_SIZES if weight.dtype == torch.uint8 else INT8_GROUP_SIZES
    fits = scale.dim() == 2 or (scale.dim() == 3 and weight.dim() == 4)
    if not fits or scales != rows or x.shape[-1] not in [group * groups for group in sizes]:
        raise OpError(
            f"{op}: {rows} rows of {x.shape[-1]} channels, scale is {tuple(scale.shape)}",
            hint=f"pass one scale per row and group of {', '.join(map(str, sizes))} channels",
        )
    check_same_dtype(op, scale=scale)


def _check_int4_weight(
    op: str, x: Tensor, weight: Tensor, scale: Tensor, zero_point: Tensor | None
) -> None:
    check_same_dtype(op, x=x)
    if weight.dtype != torch.uint8 or 2 * _row_bytes(op, weight) != x.shape[-1]:
        raise OpError(
            f"{op}: x has {x.shape[-1]} channels, weight is {weight.dtype} {tuple(weight.shape)}",
            hint="pass a weight of (out, in / 2) bytes, in being x's channels",
        )
    _check_group_scale(op, x, weight, scale)
    check_same_dtype(op, scale=scale, zero_point=zero_point)
    if zero_point is not None and zero_point.shape != scale.shape:
        raise OpError(
            f"{op}: scale is {tuple(scale.shape)}, zero_point {tuple(zero_point.shape)}",
            hint="pass both in the same shape",
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
    _check_int4_weight("linear_int4", x, weight, scale, zero_point)
    check_epilogue("linear_int4", x, weight.shape[0], bias, activation, residual)


def _check_int4_dynamic(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    minimum: Tensor | None,
    *epilogue: Any,
) -> None:
    name = "linear_int4_dynamic"
    if zero_point is not None and minimum is not None:
        raise OpError(f"{name}: zero_point and minimum", hint="pass at most one of them")
    _check_int4_weight(name, x, weight, scale, zero_point if minimum is None else minimum)
    _check_dynamic_epilogue(name, x, weight, *epilogue)


def _fake(x: Tensor, weight: Tensor, *_: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _dynamic_fake(x: Tensor, weight: Tensor, *args: Any) -> Tensor:
    gated, *_, to_float32 = args[-5:]
    shape = (*x.shape[:-1], weight_shape(weight)[0] // (2 if gated else 1))
    return x.new_empty(shape, dtype=accum_dtype(x.dtype) if to_float32 else x.dtype)


def _int8_dynamic_cost(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    activation: int = IDENTITY,
    residual: Tensor | None = None,
    x_group: int = 0,
    gated: bool = False,
    lora_h: Tensor | None = None,
    *_: object,
) -> Cost:
    rows, width = x.numel() // x.shape[-1], weight_shape(weight)[0]
    result = rows * width // (2 if gated else 1) * x.itemsize + epilogue_bytes(residual, lora_h)
    return Cost(
        bytes=x.nbytes + weight.nbytes + scale.nbytes + result,
        flops=2 * rows * weight.numel() + lora_flops(lora_h, width),
    )


def _int4_dynamic_cost(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    minimum: Tensor | None = None,
    bias: Tensor | None = None,
    activation: int = IDENTITY,
    residual: Tensor | None = None,
    gated: bool = False,
    lora_h: Tensor | None = None,
    *_: object,
) -> Cost:
    rows, width = x.numel() // x.shape[-1], weight_shape(weight)[0]
    result = rows * width // (2 if gated else 1) * x.itemsize + epilogue_bytes(residual, lora_h)
    scales = epilogue_bytes(scale, zero_point, minimum)
    return Cost(
        bytes=x.nbytes + weight.nbytes + scales + result,
        flops=4 * rows * weight.numel() + lora_flops(lora_h, width),
    )


def _dynamic_result(
    y: Tensor,
    bias: Tensor | None,
    activation: int,
    residual: Tensor | None,
    gated: bool,
    lora: tuple[Tensor | None, Tensor | None, Tensor | None],
    to_float32: bool,
) -> Tensor:
    """Apply the epilogue of a dynamic op in plain PyTorch."""
    h, b, index = lora
    dtype = accum_dtype(y.dtype) if to_float32 else y.dtype
    if not gated:
        return apply_epilogue(add_lora(y, h, b, index), bias, activation, residual).to(dtype)
    gate_h, up_h = (None, None) if h is None else h.chunk(2, -1)
    gate_b, up_b = (None, None) if b is None else b.chunk(2, -1)
    gate, up = y.chunk(2, -1)
    gate, up = add_lora(gate, gate_h, gate_b, index), add_lora(up, up_h, up_b, index)
    y = apply_activation(gate, activation) * up
    return (y if residual is None else residual + y).to(dtype)


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
    y = x @ decode_int8(weight, scale, x.dtype).T
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
    y = x @ decode_int4(weight, scale, zero_point, None, x.dtype).T
    return apply_epilogue(y, bias, activation, residual)


@op(
    check=_check_int8_dynamic,
    fake=_dynamic_fake,
    samples=_int8_dynamic_samples,
    tolerance=Tolerance(),
    cost=_int8_dynamic_cost,
    row_args=("x", "residual", "lora_h", "lora_index"),
    gradient=straight_through,
)
def linear_int8_dynamic(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    activation: int = IDENTITY,
    residual: Tensor | None = None,
    x_group: int = 0,
    gated: bool = False,
    lora_h: Tensor | None = None,
    lora_b: Tensor | None = None,
    lora_index: Tensor | None = None,
    to_float32: bool = False,
) -> Tensor:
    """Apply `linear_int8` with each row of x quantized to int8 too, in an integer GEMM (W8A8).

    `scale` is (out,), or (out, groups) for groups of 32, 64 or 128 channels. `to_float32` returns
    the accumulators as they are, for logits.

    >>> weight = torch.tensor([[3, 4]], dtype=torch.int8)
    >>> linear_int8_dynamic(torch.tensor([[63.6, 127.0]]), weight, torch.tensor([0.5]))
    tensor([[350.]])
    """
    group = x.shape[-1] // scale.shape[1] if scale.dim() > 1 else x_group
    y = round_activations(x, group) @ decode_int8(weight, scale, x.dtype).T
    lora = lora_h, lora_b, lora_index
    return _dynamic_result(y, bias, activation, residual, gated, lora, to_float32)


@op(
    check=_check_int4_dynamic,
    fake=_dynamic_fake,
    samples=_int4_dynamic_samples,
    tolerance=Tolerance(),
    cost=_int4_dynamic_cost,
    row_args=("x", "residual", "lora_h", "lora_index"),
    gradient=straight_through,
)
def linear_int4_dynamic(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    minimum: Tensor | None = None,
    bias: Tensor | None = None,
    activation: int = IDENTITY,
    residual: Tensor | None = None,
    gated: bool = False,
    lora_h: Tensor | None = None,
    lora_b: Tensor | None = None,
    lora_index: Tensor | None = None,
    to_float32: bool = False,
) -> Tensor:
    """Apply `linear_int4` with each row of x quantized to int8 in the groups of the weight (W4A8).

    >>> weight = torch.full((1, 16), 0x9A, dtype=torch.uint8)  # 10 and 9, which are 2 and 1
    >>> linear_int4_dynamic(torch.ones(1, 32), weight, torch.tensor([[0.5]]))
    tensor([[24.]])
    """
    values = decode_int4(weight, scale, zero_point, minimum, x.dtype)
    y = round_activations(x, x.shape[-1] // scale.shape[1]) @ values.T
    lora = lora_h, lora_b, lora_index
    return _dynamic_result(y, bias, activation, residual, gated, lora, to_float32)
