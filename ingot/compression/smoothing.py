"""Scale the input channels of a layer before its weight is quantized: AWQ and SmoothQuant.

The layer computes W x = (W s) (x / s) for a scale s per channel. The division is folded into the
parameters that produce x, so that the model computes what it did, at no cost:

    attention_norm        -> attention.qkv
    rows of v             -> attention.out     (with GQA, heads that share v share scales)
    mlp_norm              -> mlp.gate_up
    rows of mlp.up        -> mlp.down

Where a nonlinear function produces x (the activation of an MLP that is not gated), or the residual
stream is x (post-norm), the layer stays as it is.

Scales are rounded to powers of two. So folding rounds nothing: the model before quantization
computes the same bits.

Legend: N rows (output channels), D channels.

References: Lin et al. 2023 (AWQ), Xiao et al. 2022 (SmoothQuant).
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ingot.compression.calibration import LayerInputs, LinearLayer, linear_layers, squared_norm
from ingot.compression.method import Method, RoundToNearest
from ingot.nn.decoder import Block
from ingot.nn.formats import QuantizedTensors, WeightFormat
from ingot.nn.mlp import SwiGLU

_STEPS = 20  # exponents that AWQ tries, from 0
_ROWS = 256  # about the number of rows that it tries them on, evenly spaced
_ROUNDING = RoundToNearest(weighted=True)


@dataclass(frozen=True)
class Fold:
    """A layer whose input channels can be scaled, and the parameters that produce them."""

    layer: LinearLayer
    producers: tuple[Tensor, ...]
    """Views of parameters, with the channels as first dimension."""
    shape: tuple[int, int, int]
    """D as (groups, repeats, channels of a group): a producer's channel is repeated."""

    def tie(self, values_D: Tensor) -> Tensor:
        """Return the largest value of the channels that one channel of a producer becomes."""
        tied = values_D.view(self.shape).amax(1, keepdim=True)
        return tied.expand(self.shape).flatten()

    def apply(self, scale_D: Tensor) -> None:
        """Multiply the weights of the layer, and divide what the producers compute."""
        for linear in self.layer.linears:
            linear.weight.mul_(scale_D)
        scale_P = scale_D.view(self.shape)[:, 0].flatten()
        for tensor in self.producers:
            tensor.div_(scale_P.view(-1, *[1] * (tensor.dim() - 1)))


def folds(block: Block) -> Iterator[Fold]:
    """Yield the layers of a block whose inputs can be scaled, in the order of the forward pass."""
    attention, mlp = block.attention, block.mlp
    heads, width = attention.kv_heads, attention.kv_heads * attention.head_dim
    norms = {"attention.qkv": block.attention_norm, "mlp.gate_up": block.mlp_norm}
    norms |= {"mlp.up": block.mlp_norm}
    for layer in linear_layers(block):
        channels = layer.linears[0].in_features
        if layer.name in norms and not block.post_norm:
            yield Fold(layer, tuple(norms[layer.name].parameters()), (1, 1, channels))
        elif layer.name == "attention.out":
            v_rows = tuple(parameter[-width:] for parameter in attention.qkv.parameters())
            yield Fold(layer, v_rows, (heads, attention.heads // heads, attention.head_dim))
        elif layer.name == "mlp.down" and isinstance(mlp, SwiGLU):
            assert mlp.up is not None
            yield Fold(layer, (mlp.up.weight,), (1, 1, channels))


@dataclass(frozen=True, kw_only=True)
class Smoothing:
    """Chooses scales of the input channels; then another method rounds the scaled weights."""

    rounding: Method = _ROUNDING

    @property
    def calibrated(self) -> bool:
        """Whether it needs the inputs of the layer."""
        return True

    def scale(self, format: WeightFormat, fold: Fold, inputs: LayerInputs) -> Tensor:
        """Return the scales of the channels, (D,), powers of two."""
        raise NotImplementedError

    def encode(
        self, format: WeightFormat, weight_ND: Tensor, hessian_DD: Tensor | None
    ) -> QuantizedTensors:
        """Quantize a weight; `hessian` is the mean of x x^T over the inputs of the layer."""
        return self.rounding.encode(format, weight_ND, hessian_DD)


@dataclass(frozen=True, kw_only=True)
class AWQ(Smoothing):
    """Scales channels by a power of their inputs' RMS, the one of least error of the output.

    >>> AWQ().rounding, AWQ(rounding=RoundToNearest()).rounding
    (RoundToNearest(weighted=True), RoundToNearest(weighted=False))
    """

    def scale(self, format: WeightFormat, fold: Fold, inputs: LayerInputs) -> Tensor:
        """Return the scales of the channels, (D,), powers of two."""
        weight_ND, hessian_DD = fold.layer.weight_ND, inputs.hessian_DD
        weight_ND = weight_ND[:: max(1, len(weight_ND) // _ROWS)]
        rms_D = _relative(fold.tie(hessian_DD.diagonal().sqrt()))

        def error(scale_D: Tensor) -> float:
            scaled_ND = weight_ND * scale_D
            grid = format.grid(scaled_ND)
            return squared_norm(
                (grid.decode(grid.round(scaled_ND)) - scaled_ND) / scale_D, hessian_DD
            )

        return min((_power_of_two(rms_D ** (step / _STEPS)) for step in range(_STEPS)), key=error)


@dataclass(frozen=True, kw_only=True)
class SmoothQuant(Smoothing):
    """Divides the range of a channel between input and weight, for inputs quantized to int8.

    >>> SmoothQuant(alpha=0.8).alpha
    0.8
    """

    alpha: float = 0.5
    """From 0 to 1: at 1, the inputs have one range in all channels."""

    def scale(self, format: WeightFormat, fold: Fold, inputs: LayerInputs) -> Tensor:
        """Return the scales of the channels, (D,), powers of two."""
        weight_D = _relative(fold.tie(fold.layer.weight_ND.abs().amax(0)))
        input_D = _relative(fold.tie(inputs.max_D))
        return _power_of_two(input_D**self.alpha / weight_D ** (1 - self.alpha))


def _relative(values_D: Tensor) -> Tensor:
    """Return magnitudes relative to their mean, none of them 0."""
    return (values_D / values_D.mean().clamp_min(1e-30)).clamp_min(1e-4)


def _power_of_two(values_D: Tensor) -> Tensor:
    return torch.exp2(values_D.log2().round())
