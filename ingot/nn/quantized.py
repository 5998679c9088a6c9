"""Layers with quantized weights, in place of those with floating-point weights.

    quantize_(decoder, lambda name: Int4(group=64))     # rounds all linear layers and embeddings

The modules have the interface of those they replace. Weights are frozen; LoRA adapters can be added
as to any other layer.

Legend: N rows (output channels), D channels, T tokens, V vocabulary.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ingot import ops
from ingot.core.errors import IngotError
from ingot.nn.formats import LinearEpilogue, QuantizedTensors, WeightFormat
from ingot.nn.linear import Embedding, Linear
from ingot.nn.lora import LoraAdapter, LoraSlots
from ingot.nn.mlp import SwiGLU
from ingot.nn.recompute import run_by_rows
from ingot.ops.codec import PANEL_ROWS, fits_panels, to_panels, to_rows
from ingot.ops.epilogue import IDENTITY, SILU
from ingot.ops.loss import CHUNK

Model = TypeVar("Model", bound=nn.Module)
ChooseFormat = Callable[[str], WeightFormat | None]
"""Returns the format of a module by its name; None leaves it as it is."""

Encode = Callable[[WeightFormat, Tensor], QuantizedTensors]
"""Quantizes a weight, (N, D)."""


def round_to_nearest(format: WeightFormat, weight_ND: Tensor) -> QuantizedTensors:
    """Quantize a weight by rounding each value to the nearest one of the format."""
    return format.encode(weight_ND)


def arrange(tensors: QuantizedTensors, gated: bool = False) -> QuantizedTensors:
    """Return tensors in rows as they are, or in panels for CPUs, whose kernels would convert them
    at each call. Of a gated layer, gate and up have to begin with a panel."""
    weight = tensors.weight
    rows_fit = not (gated and len(weight) % (2 * PANEL_ROWS))
    if weight.device.type != "cpu" or not (rows_fit and fits_panels(*weight.shape)):
        return tensors
    return tensors.map(lambda tensor: to_panels(tensor) if tensor.dim() == 2 else tensor)


class QuantizedModule(nn.Module):
    """A module with a quantized weight, whose tensors keep their dtypes when it is converted."""

    gated = False

    def __init__(
        self, format: WeightFormat, rows: int, channels: int, dtype: torch.dtype, device: Any
    ) -> None:
        super().__init__()
        self.format, self.dtype = format, dtype
        self.rows, self.channels = rows, channels
        for name, tensor in format.empty(rows, channels, device)._asdict().items():
            self.register_buffer(name, tensor)

    @property
    def tensors(self) -> QuantizedTensors:
        """The tensors of the weight."""
        buffers = self._buffers
        return QuantizedTensors(*(buffers[name] for name in QuantizedTensors._fields))  # pyright: ignore

    def get(self, rows: slice = slice(None)) -> QuantizedTensors:
        """Return the tensors of the weight, or of some of its rows, without panels."""
        return self.tensors.map(lambda tensor: to_rows(tensor.detach())[rows])

    @torch.no_grad()
    def set(self, tensors: QuantizedTensors, rows: slice = slice(None)) -> None:
        """Copy the tensors of a weight, or of some of its rows."""
        all_rows = self.tensors.map(to_rows)
        for own, new in zip(all_rows, tensors, strict=True):
            if own is not None:
                assert new is not None
                own[rows].copy_(new)
        self._buffers |= arrange(all_rows, self.gated)._asdict()

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Return `hidden @ weight.T`, (T, V), in float32."""
        return self.format.linear(hidden_TD, self.tensors, LinearEpilogue(to_float32=True))

    def logprobs(self, hidden_TD: Tensor, tokens_T: Tensor) -> Tensor:
        """Return the log-probability of each token, (T,), in float32."""

        def logprobs(hidden_TD: Tensor, tokens_T: Tensor) -> Tensor:
            return ops.token_logprobs(self.logits(hidden_TD), tokens_T)

        return run_by_rows(logprobs, CHUNK, hidden_TD, tokens_T)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        result = fn(torch.empty(0, dtype=self.dtype, device=self.tensors.scale.device))
        self.dtype, device = result.dtype, result.device
        if device != self.tensors.scale.device:
            has_values = not self.tensors.weight.is_meta and device.type != "meta"
            moved = self.get().map(lambda tensor: _move(tensor, device))
            self._buffers |= (arrange(moved, self.gated) if has_values else moved)._asdict()
        own, self._buffers = self._buffers, {}
        try:
            return super()._apply(fn, recurse)
        finally:
            self._buffers = own


def _move(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to another device with the same strides; from `meta` only allocate."""
    shape, strides = tensor.shape, tensor.stride()
    moved = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=device)
    return moved if tensor.is_meta else moved.copy_(tensor)


class QuantizedLinear(QuantizedModule):
    """`Linear` with a quantized weight. With `gated`, the rows of gate and up, and SiLU.

    >>> from ingot.nn.formats import Int8
    >>> layer = QuantizedLinear.of(Linear(8, 4), Int8())
    >>> layer(torch.ones(2, 8), residual=torch.ones(2, 4)).shape
    torch.Size([2, 4])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        format: WeightFormat,
        *,
        bias: bool = False,
        gated: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(format, out_features, in_features, dtype, device)
        self.in_features, self.out_features, self.gated = in_features, out_features, gated
        zeros = torch.zeros(out_features, dtype=dtype, device=device) if bias else None
        self.bias = None if zeros is None else nn.Parameter(zeros, requires_grad=False)
        self.lora: LoraAdapter | LoraSlots | None = None

    @staticmethod
    def of(
        linear: Linear, format: WeightFormat, encode: Encode = round_to_nearest
    ) -> QuantizedLinear:
        """Quantize a layer; on `meta` only allocate it."""
        weight = linear.weight
        layer = QuantizedLinear(
            *(linear.in_features, linear.out_features, format),
            bias=linear.bias is not None,
            dtype=weight.dtype,
            device=weight.device,
        )
        if not weight.is_meta:
            layer.set(encode(format, weight.detach()))
            if layer.bias is not None:
                layer.bias.data.copy_(linear.bias.detach())
        return layer

    def forward(
        self,
        input: Tensor,
        residual: Tensor | None = None,
        activation: int = IDENTITY,
        adapters: Tensor | None = None,
    ) -> Tensor:
        """Compute `residual + activation(input @ weight.T + bias)`, or the gated form.

        `adapters` selects the LoRA adapter of each row, if the layer has any.
        """
        term = None if self.lora is None else self.lora(input, adapters)
        lora: tuple[Any, ...] = (None, None, None)
        if term is not None:
            h, bs, index = term
            lora = h, bs[0] if len(bs) == 1 else torch.cat(bs, -1), index
        activation = SILU if self.gated else activation
        epilogue = LinearEpilogue(self.bias, activation, residual, self.gated, *lora)
        return self.format.linear(input, self.tensors, epilogue)


class QuantizedEmbedding(QuantizedModule):
    """`Embedding` with a quantized table, which may also be the LM head.

    >>> from ingot.nn.formats import Int8
    >>> QuantizedEmbedding.of(Embedding(16, 4), Int8())(torch.tensor([3, 5])).shape
    torch.Size([2, 4])
    """

    def __init__(
        self,
        num_embeddings: int,
        dim: int,
        format: WeightFormat,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(format, num_embeddings, dim, dtype, device)

    @staticmethod
    def of(
        embedding: Embedding, format: WeightFormat, encode: Encode = round_to_nearest
    ) -> QuantizedEmbedding:
        """Quantize a table; on `meta` only allocate it."""
        weight = embedding.weight
        rows, channels = weight.shape
        options: Any = {"dtype": weight.dtype, "device": weight.device}
        table = QuantizedEmbedding(rows, channels, format, **options)
        if not weight.is_meta:
            table.set(encode(format, weight.detach()))
        return table

    def forward(self, indices: Tensor) -> Tensor:
        """Look up the rows of these indices."""
        return self.format.embedding(indices, self.tensors, self.dtype == torch.bfloat16)


def quantize_(model: nn.Module, choose: ChooseFormat, encode: Encode = round_to_nearest) -> None:
    """Replace the linear layers and embeddings of a model for which `choose` returns a format.

    Gate and up of a gated MLP become one layer, `gate_up`.

    >>> from ingot.nn import Decoder, preset
    >>> from ingot.nn.formats import Int8
    >>> model = Decoder.from_config(preset("tiny"), seed=0)
    >>> quantize_(model, lambda name: Int8() if ".mlp." in name else None)
    >>> type(model.blocks[0].mlp.gate_up).__name__
    'QuantizedLinear'
    """
    for path, parent in list(model.named_modules()):
        prefix = f"{path}." if path else ""
        children = dict(parent.named_children())
        if isinstance(parent, SwiGLU) and parent.gate is not None and parent.up is not None:
            del children["gate"], children["up"]
            if format := choose(f"{prefix}gate_up"):
                parent.gate_up = _stack(parent.gate, parent.up, format, encode)
                parent.gate = parent.up = None
        for attribute, module in children.items():
            name = prefix + attribute
            if isinstance(module, Linear | Embedding) and (format := choose(name)):
                kind = QuantizedLinear if isinstance(module, Linear) else QuantizedEmbedding
                setattr(parent, attribute, kind.of(module, format, encode))  # pyright: ignore
            elif isinstance(module, QuantizedModule) and choose(name):
                raise IngotError(f"{name} is quantized already", hint="use the original model")


def is_quantized(model: nn.Module) -> bool:
    """Return whether a model has a quantized weight."""
    return any(isinstance(module, QuantizedModule) for module in model.modules())


def quantized_copy(model: Model, choose: ChooseFormat) -> Model:
    """Return a copy with quantized layers: see `quantize_`. All other tensors are shared.

    >>> from ingot.nn import Decoder, preset
    >>> from ingot.nn.formats import Int8
    >>> model = Decoder.from_config(preset("tiny"), seed=0)
    >>> copied = quantized_copy(model, lambda name: Int8() if ".mlp." in name else None)
    >>> is_quantized(copied), is_quantized(model), copied.norm.weight is model.norm.weight
    (True, False, True)
    """
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    copied = deepcopy(model, shared)
    quantize_(copied, choose)
    return copied


def _stack(gate: Linear, up: Linear, format: WeightFormat, encode: Encode) -> QuantizedLinear:
    rows, dtype, device = gate.out_features, gate.weight.dtype, gate.weight.device
    options: Any = {"gated": True, "dtype": dtype, "device": device}
    layer = QuantizedLinear(gate.in_features, 2 * rows, format, **options)
    if not gate.weight.is_meta:
        layer.set(encode(format, gate.weight.detach()), slice(0, rows))
        layer.set(encode(format, up.weight.detach()), slice(rows, None))
    return layer
