"""Linear layers: GEMMs with a fused epilogue.

    linear(x)               = residual + act(x W^T + b)
    gated_linear(x)         = act(x G^T) * (x U^T), in one pass over x; SwiGLU with act = silu
                              (both with the second matmul of LoRA adapters: `ingot.ops.lora`)
    grouped_linear(x)       = act(x W_e^T), e being the group of a row (mixture of experts)
    grouped_gated_linear(x) = gated_linear with the gate and up weights of the row's group

and, of their gradients, what ranks that divide a layer compute one after another:

    linear_preact_grad        dz of y = act(z): the gradient before the activation
    gated_linear_preact_grad  the same for gate and up
    gated_linear_input_grad   dx of gate and up, in one sum; that of `linear` is `dz W`

Bias, activation and residual are optional arguments of the call (`ingot.ops.epilogue`). A fused
epilogue works on the accumulator before it is rounded and stored: the intermediate result is not
written to memory, and the output is rounded once instead of once per op.

Weights are (out, in) as in `torch.nn.Linear`; those of groups are (E, out, in). The rows of a group
are contiguous: group e owns rows `offsets[e]` to `offsets[e + 1]`.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from torch import Tensor

from ingot.core.errors import OpError
from ingot.ops.arguments import accum_dtype, fake_like
from ingot.ops.check import check_same_dtype, check_same_shape
from ingot.ops.epilogue import (
    IDENTITY,
    SILU,
    add_lora,
    apply_activation,
    apply_epilogue,
    check_activation,
    check_epilogue,
    check_lora,
    epilogue_bytes,
    lora_flops,
    with_activations,
    with_lora,
)
from ingot.ops.gradient import differentiate
from ingot.ops.inputs import SampleInput, TensorMaker
from ingot.ops.op import op
from ingot.ops.record import Cost, Tolerance


def _biased_samples(make: TensorMaker) -> Iterator[SampleInput]:
    def weight(out: int, width: int) -> Tensor:
        return make(out, width, scale=width**-0.5)

    yield SampleInput("typical", (make(6, 64), weight(48, 64), make(48)))
    yield SampleInput("large", (make(67, 259), weight(131, 259), make(131)))
    yield SampleInput("odd", (make(5, 37), weight(19, 37), None))
    yield SampleInput("one_row", (make(1, 48), weight(32, 48), make(32)))
    yield SampleInput("strided", (make.strided(4, 24), weight(24, 17).T, make(17)))
    yield SampleInput("extreme", (make.spread(4, 33), weight(9, 33), make(9)))
    yield SampleInput("batched", (make(2, 3, 16), weight(8, 16), None))
    yield SampleInput("vector", (make(16), weight(8, 16), make(8)))
    # Positive, because the error of a row with a single value that cancels has no meaning.
    yield SampleInput("one_column", (make(3, 8).abs(), weight(1, 8).abs(), make(1).abs()))


def _samples(make: TensorMaker) -> Iterator[SampleInput]:
    yield from with_activations(_biased_samples, make, IDENTITY)
    for sample in _biased_samples(make):
        x, weight, _ = sample.args
        residual = make(*x.shape[:-1], weight.shape[0])
        yield SampleInput(f"{sample.name}_residual", (*sample.args, IDENTITY, residual))
    x, weight, bias = next(_biased_samples(make)).args
    yield SampleInput("typical_silu_residual", (x, weight, bias, SILU, make(6, 48)))
    yield from with_lora(_biased_samples, make, IDENTITY, None)
    lora = make(6, 3).to(accum_dtype(make.dtype)), make(1, 3, 48), None
    yield SampleInput("typical_silu_residual_lora", (x, weight, bias, SILU, make(6, 48), *lora))


def _two_weight_samples(make: TensorMaker) -> Iterator[SampleInput]:
    for sample in _biased_samples(make):
        x, weight, _ = sample.args
        up_weight = make(*weight.shape, scale=x.shape[-1] ** -0.5)
        up_weight = up_weight.abs() if len(weight) == 1 else up_weight
        yield SampleInput(sample.name, (x, weight, up_weight))


def _gated_samples(make: TensorMaker) -> Iterator[SampleInput]:
    yield from with_activations(_two_weight_samples, make, SILU)
    yield from with_lora(_two_weight_samples, make, SILU, parts=2)


def _offset_samples(make: TensorMaker) -> Iterator[SampleInput]:
    def grouped(name: str, x: Tensor, out: int, *ends: int) -> SampleInput:
        weight = make(len(ends), out, x.shape[1], scale=x.shape[1] ** -0.5)
        return SampleInput(name, (x, weight, make.tensor([0, *ends])))

    yield grouped("typical", make(6, 64), 48, 2, 5, 6)
    yield grouped("large", make(67, 259), 131, 40, 41, 67)
    yield grouped("odd", make(5, 37), 19, 0, 3, 3, 5)
    yield grouped("one_row", make(1, 48), 32, 0, 1)
    x, weight, offsets = grouped("strided", make.strided(4, 24), 17, 3, 4).args
    yield SampleInput("strided", (x, weight.transpose(0, 1).contiguous().transpose(0, 1), offsets))
    yield grouped("extreme", make.spread(4, 33), 9, 1, 4)
    x, weight, offsets = grouped("int32", make(4, 16), 8, 2, 4).args
    yield SampleInput("int32", (x, weight, offsets.int()))


def _grouped_samples(make: TensorMaker) -> Iterator[SampleInput]:
    return with_activations(_offset_samples, make, IDENTITY)


def _two_offset_samples(make: TensorMaker) -> Iterator[SampleInput]:
    for sample in _offset_samples(make):
        x, weight, offsets = sample.args
        up_weight = make(*weight.shape, scale=x.shape[-1] ** -0.5)
        yield SampleInput(sample.name, (x, weight, up_weight, offsets))


def _grouped_gated_samples(make: TensorMaker) -> Iterator[SampleInput]:
    return with_activations(_two_offset_samples, make, SILU)


def _with_output_grad(
    samples: Callable[[TensorMaker], Iterator[SampleInput]], make: TensorMaker
) -> Iterator[SampleInput]:
    """Yield samples of a layer, after the gradient of its output."""
    for sample in samples(make):
        x, weight, *_ = sample.args
        grad = make(*x.shape[:-1], len(weight))
        # Positive for the same reason as the sample itself.
        yield SampleInput(sample.name, (grad.abs() if len(weight) == 1 else grad, *sample.args))


def _preact_samples(make: TensorMaker) -> Iterator[SampleInput]:
    def plain(make: TensorMaker) -> Iterator[SampleInput]:
        return with_activations(_biased_samples, make, IDENTITY)

    return _with_output_grad(plain, make)


def _gated_preact_samples(make: TensorMaker) -> Iterator[SampleInput]:
    def gated(make: TensorMaker) -> Iterator[SampleInput]:
        return with_activations(_two_weight_samples, make, SILU)

    return _with_output_grad(gated, make)


def _input_grad_samples(make: TensorMaker) -> Iterator[SampleInput]:
    for sample in _with_output_grad(_two_weight_samples, make):
        grad, _, *weights = sample.args
        other = make(*grad.shape)
        other = other.abs() if sample.name == "one_column" else other
        yield SampleInput(sample.name, (grad, other, *weights))


def _check_weight(op_name: str, x: Tensor, weight: Tensor) -> None:
    check_same_dtype(op_name, x=x, weight=weight)
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise OpError(
            f"{op_name}: weight must be (out, {x.shape[-1]}) for x of {x.shape[-1]} channels, "
            f"got {tuple(weight.shape)}",
            hint="pass the weight as (out, in), in being the channels of x",
        )


def _check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: int,
    residual: Tensor | None,
    lora_h: Tensor | None,
    lora_b: Tensor | None,
    lora_index: Tensor | None,
) -> None:
    _check_weight("linear", x, weight)
    check_epilogue("linear", x, weight.shape[0], bias, activation, residual)
    check_lora("linear", x, weight.shape[0], lora_h, [lora_b], lora_index)


def _check_gated(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    activation: int,
    lora_h: Tensor | None,
    gate_lora_b: Tensor | None,
    up_lora_b: Tensor | None,
    lora_index: Tensor | None,
) -> None:
    bs = (gate_lora_b, up_lora_b)
    check_lora("gated_linear", x, up_weight.shape[0], lora_h, bs, lora_index)
    check_same_shape("gated_linear", gate_weight=gate_weight, up_weight=up_weight)
    _check_weight("gated_linear", x, gate_weight)
    check_activation("gated_linear", activation)


def _check_preact(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, activation: int
) -> None:
    _check_weight("linear_preact_grad", x, weight)
    check_epilogue("linear_preact_grad", x, weight.shape[0], bias, activation, grad)


def _check_gated_preact(
    grad: Tensor, x: Tensor, gate_weight: Tensor, up_weight: Tensor, activation: int
) -> None:
    name = "gated_linear_preact_grad"
    check_same_shape(name, gate_weight=gate_weight, up_weight=up_weight)
    _check_weight(name, x, gate_weight)
    check_epilogue(name, x, gate_weight.shape[0], None, activation, grad)


def _check_input_grad(
    gate_grad: Tensor, up_grad: Tensor, gate_weight: Tensor, up_weight: Tensor
) -> None:
    name = "gated_linear_input_grad"
    check_same_shape(name, gate_weight=gate_weight, up_weight=up_weight)
    check_same_shape(name, gate_grad=gate_grad, up_grad=up_grad)
    check_same_dtype(name, gate_grad=gate_grad, up_grad=up_grad, up_weight=up_weight)
    _check_weight(name, gate_grad, gate_weight.T)


def _check_grouped(x: Tensor, weight: Tensor, offsets: Tensor, activation: int) -> None:
    check_same_dtype("grouped_linear", x=x, weight=weight)
    if not (x.dim() == 2 and weight.dim() == 3 and weight.shape[2] == x.shape[1]):
        raise OpError(
            "grouped_linear: x must be (rows, in) and weight (groups, out, in), "
            f"got {tuple(x.shape)} and {tuple(weight.shape)}",
            hint="flatten the batch dimensions of x, and stack one weight per group",
        )
    if offsets.shape != (len(weight) + 1,) or offsets.is_floating_point():
        raise OpError(
            f"grouped_linear: offsets must be {len(weight) + 1} integers for {len(weight)} groups, "
            f"got {offsets.dtype} {tuple(offsets.shape)}",
            hint="pass the first row of each group, followed by the number of rows",
        )
    check_activation("grouped_linear", activation)


def _check_grouped_gated(
    x: Tensor, gate_weight: Tensor, up_weight: Tensor, offsets: Tensor, activation: int
) -> None:
    check_same_shape("grouped_gated_linear", gate_weight=gate_weight, up_weight=up_weight)
    _check_grouped(x, gate_weight, offsets, activation)


def _groups(x: Tensor, offsets: Tensor) -> list[tuple[int, Tensor]]:
    """Return the index and the rows of each group that has rows."""
    ends: list[int] = offsets.tolist()
    if not (ends[0] == 0 and ends[-1] == len(x) and ends == sorted(ends)):
        raise OpError(
            f"grouped_linear: offsets must rise from 0 to {len(x)}, the number of rows, "
            f"got {ends[:8]}",
            hint="pass the first row of each group, followed by the number of rows",
        )
    return [(e, x[a:b]) for e, (a, b) in enumerate(pairwise(ends)) if a < b]


def _fake(x: Tensor, weight: Tensor, *_: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _fake_twice(grad: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return fake_like(grad), fake_like(grad)


def _fake_input_grad(
    gate_grad: Tensor, up_grad: Tensor, gate_weight: Tensor, up_weight: Tensor
) -> Tensor:
    return gate_grad.new_empty((*gate_grad.shape[:-1], gate_weight.shape[1]))


def _grouped_fake(x: Tensor, weight: Tensor, *_: object) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[1]))


def _rows(x: Tensor) -> int:
    return x.numel() // x.shape[-1]


def _cost(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: int = IDENTITY,
    residual: Tensor | None = None,
    lora_h: Tensor | None = None,
    lora_b: Tensor | None = None,
    lora_index: Tensor | None = None,
) -> Cost:
    rows, out = _rows(x), weight.shape[0]
    result = rows * out * x.itemsize + epilogue_bytes(residual, lora_h, lora_b)
    lora = lora_flops(lora_h, out)
    return Cost(bytes=x.nbytes + weight.nbytes + result, flops=2 * rows * weight.numel() + lora)


def _gated_cost(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    activation: int = SILU,
    lora_h: Tensor | None = None,
    gate_lora_b: Tensor | None = None,
    up_lora_b: Tensor | None = None,
    lora_index: Tensor | None = None,
) -> Cost:
    rows, out = _rows(x), up_weight.shape[0]
    result = rows * out * x.itemsize + epilogue_bytes(None, lora_h, gate_lora_b, up_lora_b)
    lora = lora_flops(lora_h, out)
    return Cost(
        bytes=x.nbytes + 2 * up_weight.nbytes + result, flops=4 * rows * up_weight.numel() + lora
    )


def _preact_cost(grad: Tensor, x: Tensor, weight: Tensor, *_: object) -> Cost:
    flops = 2 * _rows(x) * weight.numel()
    return Cost(bytes=x.nbytes + weight.nbytes + 2 * grad.nbytes, flops=flops)


def _gated_preact_cost(
    grad: Tensor, x: Tensor, gate_weight: Tensor, up_weight: Tensor, *_: object
) -> Cost:
    flops = 4 * _rows(x) * up_weight.numel()
    return Cost(bytes=x.nbytes + 2 * up_weight.nbytes + 3 * grad.nbytes, flops=flops)


def _input_grad_cost(
    gate_grad: Tensor, up_grad: Tensor, gate_weight: Tensor, up_weight: Tensor
) -> Cost:
    rows = _rows(up_grad)
    result = rows * up_weight.shape[1] * up_grad.itemsize
    read = 2 * up_grad.nbytes + 2 * up_weight.nbytes
    return Cost(bytes=read + result, flops=4 * rows * up_weight.numel())


def _grouped_cost(x: Tensor, weight: Tensor, offsets: Tensor, activation: int = IDENTITY) -> Cost:
    result = len(x) * weight.shape[1] * x.itemsize
    read = len(_groups(x, offsets)) * weight[0].nbytes
    return Cost(bytes=x.nbytes + read + result, flops=2 * len(x) * weight[0].numel())


def _grouped_gated_cost(
    x: Tensor, gate_weight: Tensor, up_weight: Tensor, offsets: Tensor, activation: int = SILU
) -> Cost:
    one = _grouped_cost(x, gate_weight, offsets)
    read = len(_groups(x, offsets)) * up_weight[0].nbytes
    return Cost(bytes=one.bytes + read, flops=2 * one.flops)


@op(
    check=_check,
    fake=_fake,
    samples=_samples,
    tolerance=Tolerance(),
    cost=_cost,
    row_args=("x", "residual", "lora_h", "lora_index"),
)
def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: int = IDENTITY,
    residual: Tensor | None = None,
    lora_h: Tensor | None = None,
    lora_b: Tensor | None = None,
    lora_index: Tensor | None = None,
) -> Tensor:
    """Return `residual + activation(x @ weight.T + lora_h @ lora_b[lora_index] + bias)`.

    `activation` is an `ActivationFn`. LoRA: `lora_h` (T, R) is the result of `lora_shrink`, and
    `lora_b` (E, R, out) belongs to E adapters; `lora_index` (T) selects that of each row, -1 for
    none. Without an index, all rows have adapter 0.

    >>> linear(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]]))
    tensor([[11.]])
    >>> from ingot.ops import ActivationFn
    >>> linear(torch.ones(1, 1), torch.ones(1, 1), activation=ActivationFn.GELU)
    tensor([[0.8413]])
    """
    y = add_lora(x @ weight.T, lora_h, lora_b, lora_index)
    return apply_epilogue(y, bias, activation, residual)


@op(
    check=_check_gated,
    fake=_fake,
    samples=_gated_samples,
    tolerance=Tolerance(),
    cost=_gated_cost,
    row_args=("x", "lora_h", "lora_index"),
)
def gated_linear(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    activation: int = SILU,
    lora_h: Tensor | None = None,
    gate_lora_b: Tensor | None = None,
    up_lora_b: Tensor | None = None,
    lora_index: Tensor | None = None,
) -> Tensor:
    """Return `activation(x @ gate_weight.T) * (x @ up_weight.T)`: SwiGLU by default.

    LoRA as in `linear`: the first R columns of `lora_h` (T, 2 R) are multiplied by `gate_lora_b`
    (E, R, out) and added to the first product, the others by `up_lora_b` for the second.

    >>> gated_linear(torch.ones(1, 1), torch.ones(1, 1), torch.ones(1, 1))
    tensor([[0.7311]])
    """
    gate_h, up_h = (None, None) if lora_h is None else lora_h.chunk(2, dim=-1)
    gate = add_lora(x @ gate_weight.T, gate_h, gate_lora_b, lora_index)
    up = add_lora(x @ up_weight.T, up_h, up_lora_b, lora_index)
    return apply_activation(gate, activation) * up


@op(
    check=_check_grouped,
    fake=_grouped_fake,
    samples=_grouped_samples,
    tolerance=Tolerance(),
    cost=_grouped_cost,
    row_args=(),
)
def grouped_linear(
    x: Tensor, weight: Tensor, offsets: Tensor, activation: int = IDENTITY
) -> Tensor:
    """Multiply rows (T, in) by the weight of their group, (E, out, in); offsets are (E + 1).

    >>> weight = torch.tensor([[[1.0]], [[2.0]]])
    >>> grouped_linear(torch.ones(3, 1), weight, torch.tensor([0, 1, 3])).T
    tensor([[1., 2., 2.]])
    """
    # By group: in PyTorch, the bits of an exp depend on where in a tensor the element is.
    groups = _groups(x, offsets)
    parts = [apply_activation(rows @ weight[e].T, activation) for e, rows in groups]
    return torch.cat([x[:0] @ weight[0].T, *parts])


@op(
    check=_check_grouped_gated,
    fake=_grouped_fake,
    samples=_grouped_gated_samples,
    tolerance=Tolerance(),
    cost=_grouped_gated_cost,
    row_args=(),
)
def grouped_gated_linear(
    x: Tensor, gate_weight: Tensor, up_weight: Tensor, offsets: Tensor, activation: int = SILU
) -> Tensor:
    """Apply `gated_linear` with the gate and up weights of each row's group.

    >>> weight, offsets = torch.ones(2, 1, 1), torch.tensor([0, 1, 1])
    >>> grouped_gated_linear(torch.ones(1, 1), weight, weight, offsets)
    tensor([[0.7311]])
    """
    gate = grouped_linear.reference(x, gate_weight, offsets, activation)
    return gate * grouped_linear.reference(x, up_weight, offsets)


@op(
    check=_check_preact,
    fake=fake_like,
    samples=_preact_samples,
    tolerance=Tolerance(),
    cost=_preact_cost,
    row_args=("grad", "x"),
    gradient=None,
)
def linear_preact_grad(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: int = IDENTITY,
) -> Tensor:
    """Return the gradient of z for that of `activation(z)`, where `z = x @ weight.T + bias`.

    >>> from ingot.ops import ActivationFn
    >>> x, weight = torch.tensor([[1.0], [-1.0]]), torch.ones(1, 1)
    >>> linear_preact_grad(torch.ones(2, 1), x, weight, activation=ActivationFn.RELU).T
    tensor([[1., 0.]])
    """

    def act(z: Tensor) -> Tensor:
        return apply_activation(z, activation)

    (found,) = differentiate(act)([True], [grad], apply_epilogue(x @ weight.T, bias, 0, None))
    assert found is not None
    return found


@op(
    check=_check_gated_preact,
    fake=_fake_twice,
    samples=_gated_preact_samples,
    tolerance=Tolerance(),
    cost=_gated_preact_cost,
    row_args=("grad", "x"),
    gradient=None,
)
def gated_linear_preact_grad(
    grad: Tensor, x: Tensor, gate_weight: Tensor, up_weight: Tensor, activation: int = SILU
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `x @ gate_weight.T` and `x @ up_weight.T` for that of `gated_linear`.

    >>> one = torch.ones(1, 1)
    >>> gated_linear_preact_grad(one, one, one, one)
    (tensor([[0.9277]]), tensor([[0.7311]]))
    """

    def gated(gate: Tensor, up: Tensor) -> Tensor:
        return apply_activation(gate, activation) * up

    both = differentiate(gated)([True, True], [grad], x @ gate_weight.T, x @ up_weight.T)
    assert both[0] is not None
    assert both[1] is not None
    return both[0], both[1]


@op(
    check=_check_input_grad,
    fake=_fake_input_grad,
    samples=_input_grad_samples,
    tolerance=Tolerance(),
    cost=_input_grad_cost,
    row_args=("gate_grad", "up_grad"),
    gradient=None,
)
def gated_linear_input_grad(
    gate_grad: Tensor, up_grad: Tensor, gate_weight: Tensor, up_weight: Tensor
) -> Tensor:
    """Return `gate_grad @ gate_weight + up_grad @ up_weight`, rounded once.

    >>> one = torch.ones(1, 1)
    >>> gated_linear_input_grad(one, 2 * one, one, one)
    tensor([[3.]])
    """
    return gate_grad @ gate_weight + up_grad @ up_weight
