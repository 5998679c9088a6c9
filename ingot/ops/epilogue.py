"""The epilogue of a linear op, applied to the GEMM's accumulator before it is rounded and stored.

    y = residual + activation(x W^T + bias)

A weight format (floating point, int8, int4) is one op record, and its epilogue is an argument of
the call: a new format adds one record, not one for each epilogue. The functions here check, count
and compute the epilogue for all of them.

The activation is an integer in the op's schema. A string would be allocated at every call, and the
conversion in torch's stable ABI (2.13, `ToImpl<std::string>`) leaks it. Where calls are frequent,
pass `int(activation)`: torch takes 1 us longer to convert an IntEnum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import IntEnum

import torch
from torch import Tensor

from ingot.core.errors import OpError
from ingot.ops import activation as functions
from ingot.ops.check import check_same_dtype
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


def epilogue_bytes(residual: Tensor | None) -> int:
    """Count the bytes that the epilogue reads. The bias is not counted: it is small and cached.

    >>> epilogue_bytes(torch.ones(2, 8))
    64
    """
    return 0 if residual is None else residual.nbytes


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
