"""Quantization-aware training (QAT): layers compute with quantized weights and train the original.

    prepare_qat_(decoder, Int4(group=32))       # the linear layers of all blocks
    ...                                         # train it: its parameters are the same as before
    quantized = convert_qat(decoder, Int4(group=32))

The forward quantizes a weight and calls the op that serves it, so what is trained is what is
served, bit for bit. Rounding has no useful derivative: it is 0 almost everywhere. The backward
takes that of the identity (straight-through, Bengio et al. 2013) for the rounding of weights and
activations: the gradients are those of a floating-point layer with the dequantized weight,

    dL/dx = dL/dy Q,    dL/dW = (dL/dy)^T x.

A weight is quantized once for each update, not for each micro-batch. torchao has the same concepts
with the names `FakeQuantizer`, prepare and convert; there the forward simulates the served kernel.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ingot import ops
from ingot.core.errors import ConfigError
from ingot.nn.decoder import Decoder
from ingot.nn.formats import Int4, Int8, LinearEpilogue, QuantizedTensors, WeightFormat
from ingot.nn.linear import Linear
from ingot.nn.mlp import SwiGLU
from ingot.nn.quantized import arrange, is_quantized, quantized_copy
from ingot.ops.epilogue import IDENTITY


@dataclass(frozen=True, kw_only=True)
class QatConfig:
    """Train the linear layers of a decoder's blocks as they are served in a quantized format.

    >>> QatConfig(format="int8", group=0).weight_format
    Int8()
    """

    format: Literal["int4", "int8"] = "int4"
    """Bits of a weight."""
    group: int = 32
    """Channels that share a scale: 32, 64 or 128; for int8 also 16, or 0 for a whole row."""
    symmetric: bool = False
    """For int4, no zero points."""

    def __post_init__(self) -> None:
        _ = self.weight_format  # raises an error for an unsupported group

    @property
    def weight_format(self) -> WeightFormat:
        """The format of the weights."""
        if self.format == "int8":
            return Int8(group=self.group or None)
        return Int4(group=self.group, zero_point=not self.symmetric)


class FakeQuantizer:
    """Computes a linear layer with its weight quantized; the weight has a gradient nevertheless.

    >>> x, weight = torch.ones(1, 32), torch.full((1, 32), 0.5, requires_grad=True)
    >>> y = FakeQuantizer(Int8())(x, [weight])
    >>> y.backward()
    >>> y.item(), weight.grad[0, :2]
    (15.99..., tensor([1., 1.]))
    """

    def __init__(self, format: WeightFormat) -> None:
        self.format = format
        self._versions: list[tuple[int, int]] = []
        self._tensors: QuantizedTensors | None = None

    def __call__(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        bias: Tensor | None = None,
        activation: int = IDENTITY,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Compute `linear` with one weight, or `gated_linear` with those of gate and up."""
        tensors = self._encode(weights)
        return _StraightThrough.apply(self.format, tensors, activation, x, bias, residual, *weights)  # pyright: ignore[reportReturnType]

    def _encode(self, weights: Sequence[Tensor]) -> QuantizedTensors:
        """Return the quantized weights; those of the last call unless they have changed."""
        versions = [(weight.data_ptr(), weight._version) for weight in weights]
        if self._tensors is None or versions != self._versions:
            with torch.inference_mode(False), torch.no_grad():
                rows = weights[0] if len(weights) == 1 else torch.cat(list(weights))
                tensors = self.format.encode(rows.detach())
                self._tensors = arrange(tensors, gated=len(weights) > 1)
            self._versions = versions
        return self._tensors


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        format: WeightFormat,
        tensors: QuantizedTensors,
        activation: int,
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        *weights: Tensor,
    ) -> Tensor:
        ctx.format, ctx.tensors, ctx.activation = format, tensors, activation
        ctx.save_for_backward(x, bias)
        epilogue = LinearEpilogue(bias, activation, residual, gated=len(weights) > 1)
        return format.linear(x, tensors, epilogue)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        x, bias = ctx.saved_tensors
        of_x, of_bias, of_residual, *of_weights = ctx.needs_input_grad[3:]
        values_ND = ctx.format.decode(ctx.tensors).to(x.dtype)
        if len(of_weights) > 1:
            op, args = ops.gated_linear, (x, *values_ND.chunk(2), ctx.activation)
            needs = [of_x, *of_weights]
        else:
            op, args = ops.linear, (x, values_ND, bias, ctx.activation)
            needs = [of_x, *of_weights, of_bias]
        args = op.with_defaults(args)
        flags = [*needs, *(False for _ in args[len(needs) :])]
        found = iter(op.backward_overload(flags, [grad.contiguous()], *args))
        grads = [next(found) if needed else None for needed in needs]
        x_grad, weight_grads = grads[0], grads[1 : 1 + len(of_weights)]
        bias_grad = grads[2] if len(of_weights) == 1 else None
        return None, None, None, x_grad, bias_grad, grad if of_residual else None, *weight_grads


def prepare_qat_(decoder: Decoder, format: WeightFormat) -> None:
    """Let the linear layers of all blocks compute with quantized weights.

    >>> from ingot.nn import preset
    >>> model = Decoder.from_config(preset("tiny"), seed=0)
    >>> prepare_qat_(model, Int4(group=32))
    >>> type(model.blocks[0].attention.qkv.compute).__name__
    'FakeQuantizer'
    """
    if is_quantized(decoder):
        raise ConfigError("the model is quantized already", hint="train the original model")
    for module in decoder.blocks.modules():
        if isinstance(module, Linear):
            format.empty(*module.weight.shape, device="meta")  # checks that groups fit
        if isinstance(module, Linear | SwiGLU):
            module.compute = FakeQuantizer(format)


def convert_qat(decoder: Decoder, format: WeightFormat) -> Decoder:
    """Return a copy with quantized weights, which computes the same bits."""
    return quantized_copy(decoder, lambda name: format if name.startswith("blocks.") else None)
