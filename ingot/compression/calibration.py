"""What the linear layers of a block get as input, over calibration data.

The error of a layer's output is tr(E H E^T) for the difference E of the weights and the mean H of
x x^T, so that methods need no inputs but H, and for each channel the largest magnitude.

Legend: T tokens, N rows (output channels), D channels.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ingot.core.errors import IngotError
from ingot.nn import BatchLayout, Decoder
from ingot.nn.linear import Linear
from ingot.nn.mlp import SwiGLU

Batch = tuple[Tensor, BatchLayout]
"""Hidden states, (T, D), and the sequences they belong to."""

_BATCH_TOKENS = 1024


class _Stop(Exception):
    """Ends a forward pass once the input of a layer is known."""


class LinearLayer(NamedTuple):
    """Weights that have one input and become one quantized layer."""

    name: str
    """Within a block: `attention.qkv`, `attention.out`, `mlp.gate_up`, `mlp.down`."""
    module: nn.Module
    """Gets the input: of gate and up the MLP."""
    linears: tuple[Linear, ...]

    @property
    def weight_ND(self) -> Tensor:
        """All weights, in float32."""
        return torch.cat([linear.weight.float() for linear in self.linears])


class LayerInputs(NamedTuple):
    """Statistics of the inputs of a layer, in float32."""

    hessian_DD: Tensor
    """Mean of x x^T."""
    max_D: Tensor
    """Largest magnitude of each channel."""
    drift_DD: Tensor | None = None
    """Mean of (o - x) x^T, where o are the inputs in the original model."""


def embed(decoder: Decoder, sequences: Sequence[Sequence[int]]) -> Iterator[Batch]:
    """Yield the inputs of the first block, in batches."""
    pending: list[Sequence[int]] = []
    for number, ids in enumerate(sequences, 1):
        pending.append(ids)
        if number == len(sequences) or sum(map(len, pending)) >= _BATCH_TOKENS:
            layout = BatchLayout.packed([len(ids) for ids in pending], decoder.device)
            tokens_T = torch.tensor([id for ids in pending for id in ids], device=decoder.device)
            yield decoder.embed(tokens_T, layout), layout
            pending = []


def linear_layers(block: nn.Module) -> list[LinearLayer]:
    """Return the linear layers of a block in the order of the forward pass."""
    layers: list[LinearLayer] = []
    stacked: set[nn.Module] = set()
    for name, module in block.named_modules():  # a parent before its children
        if isinstance(module, SwiGLU):
            assert module.gate is not None
            assert module.up is not None
            layers.append(LinearLayer(f"{name}.gate_up", module, (module.gate, module.up)))
            stacked |= {module.gate, module.up}
        elif isinstance(module, Linear) and module not in stacked:
            layers.append(LinearLayer(name, module, (module,)))
    return layers


def collect_inputs(
    block: nn.Module,
    module: nn.Module,
    batches: Sequence[Batch],
    originals: Sequence[Tensor] | None = None,
) -> LayerInputs:
    """Run a block up to a module of it, and return the statistics of the module's inputs.

    Args:
        block: The block.
        module: The module of it whose inputs to collect.
        batches: Inputs of the block.
        originals: For each batch, inputs that the module has in the original model.
    """
    total: list[LayerInputs] = []
    expected = iter(originals or ())

    def collect(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x_TD = inputs[0].float()
        if not total:
            channels = x_TD.shape[1]
            hessian_DD = x_TD.new_zeros(channels, channels)
            drift_DD = torch.zeros_like(hessian_DD) if originals else None
            total.append(LayerInputs(hessian_DD, x_TD.new_zeros(channels), drift_DD))
        sum_DD, max_D, drift_DD = total[0]
        sum_DD.addmm_(x_TD.T, x_TD)
        torch.maximum(max_D, x_TD.abs().amax(0), out=max_D)
        if drift_DD is not None:
            drift_DD.addmm_((next(expected) - x_TD).T, x_TD)
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
    sum_DD, max_D, drift_DD = total[0]
    tokens = sum(len(x_TD) for x_TD, _ in batches)
    if drift_DD is not None:
        drift_DD /= tokens
    return LayerInputs(sum_DD.div_(tokens), max_D, drift_DD)


def damp(hessian_DD: Tensor, damping: float) -> Tensor:
    """Return H plus a multiple of its mean diagonal.

    >>> damp(torch.ones(2, 2), 3.0)
    tensor([[4., 1.],
            [1., 4.]])
    """
    damped_DD = hessian_DD.clone()
    damped_DD.diagonal().add_(damping * (float(hessian_DD.diagonal().mean()) or 1.0))
    return damped_DD


def damped_cholesky(hessian_DD: Tensor, damping: float) -> Tensor:
    """Return the lower Cholesky factor of H plus a multiple of its mean diagonal.

    The damping grows until there is a factor.

    >>> damped_cholesky(torch.ones(2, 2), 3.0).round(decimals=2)
    tensor([[2.0000, 0.0000],
            [0.5000, 1.9400]])
    """
    for factor in (1, 10, 100):
        lower_DD, info = torch.linalg.cholesky_ex(damp(hessian_DD, factor * damping))
        if int(info) == 0:
            return lower_DD
    raise IngotError(
        "the inputs of a layer are not finite",
        hint="calibrate with other data, or use --method rtn",
    )


def squared_norm(weight_ND: Tensor, hessian_DD: Tensor) -> float:
    """Return tr(W H W^T), the mean of ||W x||^2.

    >>> squared_norm(torch.ones(3, 2), torch.eye(2))
    6.0
    """
    return max(0.0, float(((weight_ND @ hessian_DD) * weight_ND).sum(dtype=torch.float64)))
