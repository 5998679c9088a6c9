"""Quantize the linear layers of a decoder, one after the other.

Layers are calibrated with the inputs that they have in the quantized model: those of a block are
quantized in the order of the forward pass, which is repeated up to the next one. At a time, one
layer is in float32 and the activations of one block are in memory.

The sensitivity of a layer is the relative error of its output over these inputs,

    ||W x - Q x|| / ||W x|| = sqrt(tr(E H E^T) / tr(W H W^T)),   E = W - Q,

where H is the mean of x x^T. That of gate and up is over both.

Legend: T tokens, N rows (output channels), D channels.
"""

# pyright: basic
from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ingot.compression.method import Method
from ingot.core.errors import ConfigError
from ingot.core.log import Progress
from ingot.nn import BatchLayout, Decoder
from ingot.nn.formats import QuantizedTensors, WeightFormat
from ingot.nn.linear import Linear
from ingot.nn.mlp import SwiGLU
from ingot.nn.quantized import QuantizedModule, quantize_

Batch = tuple[Tensor, BatchLayout]
"""Hidden states, (T, D), and the sequences they belong to."""

_BATCH_TOKENS = 1024


class _Stop(Exception):
    """Ends a forward pass once the input of a layer is known."""


@dataclass(frozen=True, kw_only=True)
class LayerSensitivity:
    """How much quantizing the weight of a linear layer changes its output."""

    layer: int
    """Index of the block."""
    kind: str
    """Name within a block: `attention.qkv`, `attention.out`, `mlp.gate_up`, `mlp.down`."""
    relative_error: float


class _MeasuredMethod:
    """Encodes the weights of one layer, and sums up the squared norms of its output and error."""

    def __init__(self, method: Method, hessian_DD: Tensor | None) -> None:
        self._method, self._hessian_DD = method, hessian_DD
        self._output = self._error = 0.0

    def encode(self, format: WeightFormat, weight_ND: Tensor) -> QuantizedTensors:
        tensors = self._method.encode(format, weight_ND, self._hessian_DD)
        if self._hessian_DD is not None:
            weight_ND = weight_ND.float()
            self._output += _squared_norm(weight_ND, self._hessian_DD)
            self._error += _squared_norm(weight_ND - format.decode(tensors), self._hessian_DD)
        return tensors

    @property
    def relative_error(self) -> float:
        return math.sqrt(self._error / self._output) if self._output else 0.0


def _squared_norm(weight_ND: Tensor, hessian_DD: Tensor) -> float:
    """Return tr(W H W^T), the mean of ||W x||^2."""
    return max(0.0, float(((weight_ND @ hessian_DD) * weight_ND).sum(dtype=torch.float64)))


@torch.no_grad()
def quantize(
    decoder: Decoder,
    format: WeightFormat,
    method: Method,
    sequences: Sequence[Sequence[int]] = (),
    progress: Progress | None = None,
) -> list[LayerSensitivity]:
    """Quantize the linear layers of all blocks in place; return their sensitivities.

    Args:
        decoder: The model. Embeddings, LM head and norms stay as they are.
        format: The format of the weights.
        method: How to quantize them.
        sequences: Tokens to calibrate with. A method that is not calibrated needs none; there are
            no sensitivities then.
        progress: Advances by 1 for each block.
    """
    if method.calibrated and not sequences:
        raise ConfigError("this method needs calibration data", hint="pass sequences of tokens")
    if any(isinstance(module, QuantizedModule) for module in decoder.modules()):
        raise ConfigError("the model is quantized already", hint="use the original model")
    batches = list(_embed(decoder, sequences))
    sensitivities: list[LayerSensitivity] = []
    for index, block in enumerate(decoder.blocks):
        for name, module in _layers(block):
            hessian_DD = _hessian(block, module, batches) if batches else None
            measured = _MeasuredMethod(method, hessian_DD)
            quantize_(
                block,
                lambda layer, name=name: format if layer == name else None,
                measured.encode,
            )
            if batches:
                error = measured.relative_error
                sensitivities.append(LayerSensitivity(layer=index, kind=name, relative_error=error))
        batches = [(block(x_TD, layout), layout) for x_TD, layout in batches]
        if progress:
            progress.advance()
    return sensitivities


def _embed(decoder: Decoder, sequences: Sequence[Sequence[int]]) -> Iterator[Batch]:
    """Yield the inputs of the first block, in batches."""
    pending: list[Sequence[int]] = []
    for number, ids in enumerate(sequences, 1):
        pending.append(ids)
        if number == len(sequences) or sum(map(len, pending)) >= _BATCH_TOKENS:
            layout = BatchLayout.packed([len(ids) for ids in pending], decoder.device)
            tokens_T = torch.tensor([id for ids in pending for id in ids], device=decoder.device)
            yield decoder.embed(tokens_T, layout), layout
            pending = []


def _layers(block: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the linear layers in the order of the forward pass; of gate and up the MLP."""
    layers: list[tuple[str, nn.Module]] = []
    stacked: set[nn.Module | None] = set()
    for name, module in block.named_modules():  # a parent before its children
        if isinstance(module, SwiGLU):
            layers.append((f"{name}.gate_up", module))
            stacked |= {module.gate, module.up}
        elif isinstance(module, Linear) and module not in stacked:
            layers.append((name, module))
    return layers


def _hessian(block: nn.Module, module: nn.Module, batches: list[Batch]) -> Tensor:
    """Return the mean of x x^T over the inputs of a module, (D, D), in float32."""
    total: list[Tensor] = []

    def collect(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x_TD = inputs[0].float()
        product_DD = x_TD.T @ x_TD
        total[:] = [total[0] + product_DD if total else product_DD]
        raise _Stop

    handle = module.register_forward_pre_hook(collect)
    try:
        for x_TD, layout in batches:
            try:
                block(x_TD, layout)
            except _Stop:
                continue
    finally:
        handle.remove()
    return total[0] / sum(len(x_TD) for x_TD, _ in batches)
