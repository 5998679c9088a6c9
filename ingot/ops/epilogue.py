"""The epilogue of a linear op, applied to the GEMM's accumulator before it is rounded and stored.

    y = residual + activation(x W^T + h B + bias)

h B is the term of LoRA adapters (`ingot.ops.lora`).

A weight format (floating point, int8, int4) is one op record, and its epilogue is an argument of
the call: a new format adds one record, not one for each epilogue. The functions here check, count
and compute the epilogue for all of them.

The activation is an integer in the op's schema: a string would be allocated at every call. Where
calls are frequent, pass `int(activation)`: torch takes 1 us longer to convert an IntEnum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from ingot.core.errors import OpError
from ingot.ops import activation as functions
from ingot.ops.arguments import accum_dtype
from ingot.ops.check import check_same_dtype, is_integral
from ingot.ops.inputs import SampleInput, TensorMaker


class ActivationFn(IntEnum):
    """Activation of an epilogue. The values are those of `ActivationFn` in kernels/cpu/linear.cpp.

    >>> ActivationFn["SILU"].value
    3
    """

    IDENTITY = 0
    GELU = 1
    GELU_TANH = 2
    SILU = 3
    RELU = 4


IDENTITY = int(ActivationFn.IDENTITY)
SILU = int(ActivationFn.SILU)

_REFERENCES: dict[int, Callable[[Tensor], Tensor]] = {
    ActivationFn.IDENTITY: lambda y: y,
    ActivationFn.GELU: functions.gelu.reference,
    ActivationFn.GELU_TANH: functions.gelu_tanh.reference,
    ActivationFn.SILU: functions.silu.reference,
    ActivationFn.RELU: torch.relu,
}


def apply_activation(y: Tensor, activation: int) -> Tensor:
    """Apply the activation in plain PyTorch.

    >>> apply_activation(torch.tensor([-1.0, 2.0]), ActivationFn.RELU)
    tensor([0., 2.])
    """
    return _REFERENCES[activation](y)


def apply_epilogue(
    y: Tensor, bias: Tensor | None, activation: int, residual: Tensor | None
) -> Tensor:
    """Compute `residual + activation(y + bias)` in plain PyTorch.

    >>> apply_epilogue(torch.tensor([1.0]), torch.tensor([2.0]), ActivationFn.IDENTITY, None)
    tensor([3.])
    """
    y = apply_activation(y if bias is None else y + bias, activation)
    return y if residual is None else residual + y


def check_activation(op: str, activation: int) -> None:
    """Require a value of `ActivationFn`.

    >>> check_activation("linear", 3)
    """
    if activation not in _REFERENCES:
        raise OpError(
            f"{op}: activation must be an ActivationFn (0 to {len(_REFERENCES) - 1}), "
            f"got {activation}",
            hint="pass a member of ingot.ops.ActivationFn",
        )


def check_epilogue(
    op: str,
    x: Tensor,
    out_features: int,
    bias: Tensor | None,
    activation: int,
    residual: Tensor | None,
) -> None:
    """Require an epilogue that fits an output of `out_features` channels.

    >>> check_epilogue("linear", torch.ones(2, 4), 8, torch.ones(8), 0, torch.ones(2, 8))
    """
    check_same_dtype(op, x=x, bias=bias, residual=residual)
    check_activation(op, activation)
    if bias is not None and bias.shape != (out_features,):
        raise OpError(
            f"{op}: bias must be ({out_features},), got {tuple(bias.shape)}",
            hint="pass one bias value for each output channel",
        )
    shape = (*x.shape[:-1], out_features)
    if residual is not None and residual.shape != shape:
        raise OpError(
            f"{op}: residual must have the output's shape {shape}, got {tuple(residual.shape)}",
            hint="expand the residual; ops do not broadcast",
        )


def add_lora(y: Tensor, h: Tensor | None, b: Tensor | None, index: Tensor | None) -> Tensor:
    """Add `h @ b[index]` to y in plain PyTorch; rows without an adapter are unchanged.

    >>> h, b = torch.ones(2, 1), torch.full((1, 1, 3), 5.0)
    >>> add_lora(torch.zeros(2, 3), h, b, torch.tensor([0, -1]))
    tensor([[5., 5., 5.],
            [0., 0., 0.]])
    """
    if h is None or b is None:
        return y
    # One matmul for all adapters: a row of h is placed in the columns of its own adapter.
    is_own = adapter_mask(h, index, len(b))
    placed = (h.unsqueeze(-2) * is_own.unsqueeze(-1)).flatten(-2)
    return y + (placed @ b.flatten(0, 1).to(h.dtype)).to(y.dtype)


def adapter_mask(x: Tensor, index: Tensor | None, adapters: int) -> Tensor:
    """Return which adapter each row has, (rows, adapters): all the first one without an index.

    >>> adapter_mask(torch.zeros(3, 8), torch.tensor([1, -1, 0]), 2).int().tolist()
    [[0, 1], [0, 0], [1, 0]]
    """
    if index is None:
        index = torch.zeros(x.shape[:-1], dtype=torch.int32, device=x.device)
    return index.unsqueeze(-1) == torch.arange(adapters, device=index.device)


def check_adapters(op: str, x: Tensor, index: Tensor | None, adapters: int) -> None:
    """Require an integer index for each row of x, or none, and at least one adapter.

    >>> check_adapters("linear", torch.ones(2, 4), torch.tensor([0, -1]), 1)
    """
    if adapters < 1:
        raise OpError(f"{op}: there must be at least one adapter", hint="pass (E, R, ...)")
    if index is not None and (index.shape != x.shape[:-1] or not is_integral(index)):
        raise OpError(
            f"{op}: the adapter index must be integers of shape {tuple(x.shape[:-1])}, "
            f"got {index.dtype} {tuple(index.shape)}",
            hint="pass the adapter of each row, -1 for none",
        )


def check_lora(
    op: str,
    x: Tensor,
    out_features: int,
    h: Tensor | None,
    bs: Sequence[Tensor | None],
    index: Tensor | None,
) -> None:
    """Require the LoRA term of an epilogue to be complete; h has the columns of each of `bs`.

    >>> h, b = torch.ones(2, 3), torch.ones(1, 3, 8)
    >>> check_lora("linear", torch.ones(2, 4), 8, h, [b], None)
    """
    if h is None or any(b is None for b in bs):
        if h is not None or index is not None or any(b is not None for b in bs):
            raise OpError(
                f"{op}: lora_h and lora_b must be given together",
                hint="pass both, or neither and no lora_index",
            )
        return
    for b in bs:
        assert b is not None
        check_same_dtype(op, x=x, lora_b=b)
        shape = (*x.shape[:-1], b.shape[1] * len(bs)) if b.dim() == 3 else None
        if shape is None or b.shape[2] != out_features or h.shape != shape:
            raise OpError(
                f"{op}: lora_b must be (adapters, rank, {out_features}) and lora_h (rows, rank)"
                f"{' of both' if len(bs) > 1 else ''}, got {tuple(b.shape)} and {tuple(h.shape)}",
                hint="compute lora_h with ops.lora_shrink for the rows of x",
            )
        check_adapters(op, x, index, len(b))
    if h.dtype != accum_dtype(x.dtype):
        raise OpError(
            f"{op}: lora_h must be {accum_dtype(x.dtype)}, got {h.dtype}",
            hint="pass the result of ops.lora_shrink as it is",
        )


def epilogue_bytes(residual: Tensor | None, *lora: Tensor | None) -> int:
    """Count the bytes that the epilogue reads. The bias is not counted: it is small and cached.

    >>> epilogue_bytes(torch.ones(2, 8))
    64
    """
    return sum(tensor.nbytes for tensor in (residual, *lora) if tensor is not None)


def lora_flops(h: Tensor | None, out_features: int) -> int:
    """Count the FLOPs of a LoRA term.

    >>> lora_flops(torch.ones(2, 4), 8)
    128
    """
    return 0 if h is None else 2 * h.numel() * out_features


def with_lora(
    samples: Callable[[TensorMaker], Iterator[SampleInput]],
    make: TensorMaker,
    *defaults: Any,
    parts: int = 1,
) -> Iterator[SampleInput]:
    """Yield the samples with a LoRA term appended, as `odd_lora`: of one adapter, or of three.

    `defaults` come between the sample's arguments and the term.
    """
    for number, sample in enumerate(samples(make)):
        x, weight, *_ = sample.args
        adapters, rank = (3, 4) if number % 2 else (1, 5)
        h = make(*x.shape[:-1], parts * rank).to(accum_dtype(make.dtype))
        bs = [make(adapters, rank, len(weight), scale=rank**-0.5) for _ in range(parts)]
        if len(weight) == 1:  # see the samples of `linear`
            h, bs = h.abs(), [b.abs() for b in bs]
        index = make.ints(adapters + 1, *x.shape[:-1], dtype=torch.int32) - 1
        term = (h, *bs, None if adapters == 1 else index)
        yield SampleInput(f"{sample.name}_lora", (*sample.args, *defaults, *term))


def with_activations(
    samples: Callable[[TensorMaker], Iterator[SampleInput]], make: TensorMaker, default: int
) -> Iterator[SampleInput]:
    """Yield the samples with the default activation, then again with each other activation.

    Sample `odd` becomes `odd_gelu`. The activation is appended to the sample's arguments.
    """
    for activation in sorted(ActivationFn, key=lambda fn: fn != default):
        suffix = "" if activation == default else f"_{activation.name.lower()}"
        for sample in samples(make):
            yield SampleInput(f"{sample.name}{suffix}", (*sample.args, int(activation)))
