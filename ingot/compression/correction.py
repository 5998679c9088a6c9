"""Let each layer correct the errors of the quantized layers before it.

In the quantized model, a layer has inputs x that differ from the inputs o that it has in the
original model. The weight whose output W' x is closest to the original output W o, over calibration
data, is

    W' = W + W C H^-1,    C = mean of (o - x) x^T,    H = mean of x x^T.

Calibrated methods round a weight halfway between W and W': C is estimated from few tokens, and its
error adds up over the layers. For SmolLM2 in int4 by GPTQ without coordinate descent, the KL
divergence to the original is 0.096 without the correction, 0.081 with all of it, 0.062 with half.

Legend: T tokens, N rows (output channels), D channels.

Reference: Arai and Ichikawa 2025 (QEP).
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ingot.compression.calibration import (
    Batch,
    LayerInputs,
    damped_cholesky,
    linear_layers,
)

_STRENGTH = 0.5
_DAMPING = 0.1  # added to the diagonal of H, relative to its mean


class OriginalRun(NamedTuple):
    """A forward pass of a block of the original model."""

    inputs: dict[str, list[Tensor]]
    """Inputs of each linear layer, (T, D) for each batch."""
    outputs: list[Batch]


def run_original(block: nn.Module, batches: Sequence[Batch]) -> OriginalRun:
    """Run a block that is not yet quantized with the hidden states of the original model."""
    layers = linear_layers(block)
    inputs: dict[str, list[Tensor]] = {layer.name: [] for layer in layers}

    def recorder(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _, args: inputs[name].append(args[0])

    handles = [layer.module.register_forward_pre_hook(recorder(layer.name)) for layer in layers]
    try:
        outputs = [(block(x_TD, layout), layout) for x_TD, layout in batches]
    finally:
        for handle in handles:
            handle.remove()
    return OriginalRun(inputs, outputs)


def correct(weight_ND: Tensor, inputs: LayerInputs) -> Tensor:
    """Return a weight whose outputs are closer to those of the original model.

    >>> weight, x = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    >>> drift = torch.tensor([[1.0, 0.0], [0.0, 0.0]])  # the first channel was 2, not 1
    >>> correct(weight, LayerInputs(x.T @ x / 2, x.abs().amax(0), drift)).round(decimals=1)
    tensor([[1.5000, 0.0000]])
    """
    if inputs.drift_DD is None:
        return weight_ND
    lower_DD = damped_cholesky(inputs.hessian_DD, _DAMPING)
    difference_ND = torch.cholesky_solve((weight_ND @ inputs.drift_DD).T, lower_DD).T
    return weight_ND + _STRENGTH * difference_ND
