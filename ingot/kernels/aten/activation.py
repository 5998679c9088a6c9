"""Activations with `torch.nn.functional`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ingot import ops
from ingot.kernels.aten import aten
from ingot.ops.epilogue import ActivationFn

_EPILOGUES: dict[int, Callable[[Tensor], Tensor]] = {
    ActivationFn.IDENTITY: lambda y: y,
    ActivationFn.GELU: F.gelu,
    ActivationFn.GELU_TANH: lambda y: F.gelu(y, approximate="tanh"),
    ActivationFn.SILU: F.silu,
    ActivationFn.RELU: torch.relu,
}


def apply_activation(y: Tensor, activation: int) -> Tensor:
    """Apply the activation of an epilogue, an `ActivationFn`.

    >>> apply_activation(torch.tensor([-1.0, 2.0]), ActivationFn.RELU)
    tensor([0., 2.])
    """
    return _EPILOGUES[activation](y)


@aten(ops.gelu)
def gelu(x: Tensor) -> Tensor:
    """Make one fused call."""
    return F.gelu(x).contiguous()


@aten(ops.gelu_tanh)
def gelu_tanh(x: Tensor) -> Tensor:
    """Make one fused call."""
    return F.gelu(x, approximate="tanh").contiguous()


@aten(ops.silu)
def silu(x: Tensor) -> Tensor:
    """Make one fused call."""
    return F.silu(x).contiguous()


@aten(ops.swiglu)
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Apply an activation, then multiply."""
    return (F.silu(gate) * up).contiguous()


@aten(ops.geglu)
def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """Apply an activation, then multiply."""
    return (F.gelu(gate) * up).contiguous()


@aten(ops.geglu_tanh)
def geglu_tanh(gate: Tensor, up: Tensor) -> Tensor:
    """Apply an activation, then multiply."""
    return (F.gelu(gate, approximate="tanh") * up).contiguous()
