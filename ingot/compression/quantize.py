"""Quantize the linear layers of a decoder, one after the other.

Layers are calibrated with the inputs that they have in the quantized model: those of a block are
quantized in the order of the forward pass, which is repeated up to the next one. Calibrated methods
round weights that are corrected for the errors of the layers before: see
`ingot.compression.correction`. At a time, one layer is in float32 and the activations of one block
are in memory.

The sensitivity of a layer is the relative error of its output over these inputs,

    ||W x - Q x|| / ||W x|| = sqrt(tr(E H E^T) / tr(W H W^T)),   E = W - Q,

where W is the weight that is rounded and H the mean of x x^T. That of gate and up is over both.

Legend: T tokens, N rows (output channels), D channels.
"""

# pyright: basic
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ingot.compression.calibration import (
    Batch,
    LayerInputs,
    collect_inputs,
    embed,
    linear_layers,
    squared_norm,
)
from ingot.compression.correction import correct, run_original
from ingot.compression.method import Method
from ingot.compression.resume import PartialRun
from ingot.compression.smoothing import Smoothing, folds
from ingot.core.errors import ConfigError
from ingot.core.log import Progress
from ingot.nn import Decoder
from ingot.nn.formats import QuantizedTensors, WeightFormat
from ingot.nn.quantized import is_quantized, quantize_
from ingot.nn.weights import hash_tensors


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

    def __init__(self, method: Method, inputs: LayerInputs | None) -> None:
        self._method, self._inputs = method, inputs
        self._output = self._error = 0.0

    def encode(self, format: WeightFormat, weight_ND: Tensor) -> QuantizedTensors:
        if self._inputs is None:
            return self._method.encode(format, weight_ND, None)
        hessian_DD = self._inputs.hessian_DD
        weight_ND = correct(weight_ND.float(), self._inputs)
        tensors = self._method.encode(format, weight_ND, hessian_DD)
        self._output += squared_norm(weight_ND, hessian_DD)
        self._error += squared_norm(weight_ND - format.decode(tensors), hessian_DD)
        return tensors

    @property
    def relative_error(self) -> float:
        return math.sqrt(self._error / self._output) if self._output else 0.0


@torch.no_grad()
def quantize(
    decoder: Decoder,
    format: WeightFormat | Mapping[str, WeightFormat],
    method: Method,
    sequences: Sequence[Sequence[int]] = (),
    progress: Progress | None = None,
    resume_dir: Path | None = None,
) -> list[LayerSensitivity]:
    """Quantize the linear layers of all blocks in place; return their sensitivities.

    Args:
        decoder: The model. Embeddings, LM head and norms stay as they are.
        format: The format of the weights; or that of each layer, by names such as
            `blocks.3.mlp.gate_up`.
        method: How to quantize them.
        sequences: Tokens to calibrate with. A method that is not calibrated needs none; there are
            no sensitivities then.
        progress: Advances by 1 for each block.
        resume_dir: Directory for the complete blocks. A run that finds those of the same model and
            settings continues after them: see `ingot.compression.resume`.
    """
    if method.calibrated and not sequences:
        raise ConfigError("this method needs calibration data", hint="pass sequences of tokens")
    if is_quantized(decoder):
        raise ConfigError("the model is quantized already", hint="use the original model")
    batches = list(embed(decoder, sequences))
    originals = batches if method.calibrated else []  # hidden states in the original model
    sensitivities: list[LayerSensitivity] = []
    partial, done = None, 0
    if resume_dir is not None:
        partial = PartialRun(
            resume_dir, hash_tensors(decoder.state_dict(), format, method, sequences)
        )
        if state := partial.read_state():
            done = state["blocks"]
            sensitivities = [LayerSensitivity(**facts) for facts in state["sensitivities"]]
            hidden = zip(partial.read_hidden(done - 1), batches + originals, strict=True)
            restored = [(x_TD.to(decoder.device), layout) for x_TD, (_, layout) in hidden]
            batches, originals = restored[: len(batches)], restored[len(batches) :]
    for index, block in enumerate(decoder.blocks):
        names = [layer.name for layer in linear_layers(block)]
        formats = {name: _format_of(format, f"blocks.{index}.{name}") for name in names}
        if partial and index < done:
            partial.read_block(index, block, formats.get)
        else:
            errors, originals = _quantize_block(block, formats, method, batches, originals)
            sensitivities += [
                LayerSensitivity(layer=index, kind=name, relative_error=error)
                for name, error in errors.items()
            ]
            batches = [(block(x_TD, layout), layout) for x_TD, layout in batches]
            if partial:
                facts = [asdict(one) for one in sensitivities]
                partial.save(index, block, [x_TD for x_TD, _ in batches + originals], facts)
        if progress:
            progress.advance()
    return sensitivities


def _quantize_block(
    block: Any,
    formats: Mapping[str, WeightFormat],
    method: Method,
    batches: list[Batch],
    originals: list[Batch],
) -> tuple[dict[str, float], list[Batch]]:
    """Quantize the linear layers of a block.

    Returns:
        Their relative errors, if there are inputs; and the outputs of the original block.
    """
    if isinstance(method, Smoothing):
        for fold in folds(block):
            inputs = collect_inputs(block, fold.layer.module, batches)
            fold.apply(method.scale(formats[fold.layer.name], fold, inputs))
    original = run_original(block, originals)  # after folding, which scales the inputs of layers
    errors: dict[str, float] = {}
    for name, module, _ in linear_layers(block):
        inputs = None
        if batches:
            inputs = collect_inputs(block, module, batches, original.inputs.pop(name, None))
        measured = _MeasuredMethod(method, inputs)
        quantize_(
            block,
            lambda layer, name=name: formats[name] if layer == name else None,
            measured.encode,
        )
        if batches:
            errors[name] = measured.relative_error
    return errors, original.outputs


def _format_of(format: WeightFormat | Mapping[str, WeightFormat], layer: str) -> WeightFormat:
    return format[layer] if isinstance(format, Mapping) else format
