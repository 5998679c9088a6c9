"""Context parallelism: the ranks of `cp` divide the tokens of a micro-batch.

Each rank computes the blocks for its part of the tokens, so that the activations of a long sequence
fit. The embedding, the last norm and the loss are computed for all tokens by every rank.

Attention needs all tokens: before it, the ranks exchange heads for tokens (all-to-all), compute
some heads of all tokens, and exchange them back (Ulysses; Jacobs et al. 2023).

The bits are those of a single process, since no sum is divided:

- A row of an activation, or of its gradient, depends on no other row.
- The gradient of a linear layer's weight is a sum over tokens. Each rank computes it for some rows
  of the weight, from the inputs and output gradients of all tokens. The gradient of a norm's
  weight is computed by the first rank.
- The other ranks add zeros to it.

Legend: T tokens, S tokens of a rank, D channels, N heads, H channels of a head.
"""

# pyright: basic, reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ingot import ops
from ingot.core.errors import ConfigError
from ingot.nn import Decoder, DecoderConfig
from ingot.nn.attention import Attention
from ingot.nn.layout import BatchLayout
from ingot.nn.linear import Linear
from ingot.nn.mlp import SwiGLU
from ingot.nn.norm import LayerNorm, RMSNorm
from ingot.ops.epilogue import IDENTITY
from ingot.parallel.ranks import Ranks, all_gather, all_to_all, row_slice

_NO_LORA = (None, None, None)


def split_context(model: nn.Module, ranks: Ranks) -> None:
    """Make these ranks compute the blocks of a decoder together; the module is changed."""
    check_context(getattr(model, "config", None), ranks.size)
    assert isinstance(model, Decoder)
    for module in model.blocks.modules():
        _split(module, ranks)
    model.forward = partial(_forward, model, ranks)


def check_context(config: Any, size: int) -> None:
    """Raise a `ConfigError` unless this number of ranks can divide the tokens of a model.

    >>> from ingot.nn import preset
    >>> check_context(preset("tiny"), 2)
    """
    if not isinstance(config, DecoderConfig):
        raise ConfigError("parallel.cp: only divides decoders", hint="set parallel.cp=1")
    if config.moe:
        raise ConfigError(
            "parallel.cp: does not divide models with model.moe", hint="use parallel.ep instead"
        )
    if config.kv_heads % size:
        raise ConfigError(
            f"parallel.cp: must divide model.kv_heads, {config.kv_heads}, got {size}",
            hint="lower parallel.cp: other ranks shard the weights (FSDP)",
        )


def _split(module: Any, ranks: Ranks) -> None:
    """Replace what a module computes by a function of this rank's tokens."""
    if isinstance(module, Linear | SwiGLU):
        module.compute = partial(_compute, ranks)
    elif isinstance(module, RMSNorm):
        module.forward = lambda x: _Rows.apply(ops.rms_norm, ranks, x, module.weight, module.eps)
    elif isinstance(module, LayerNorm):
        module.forward = lambda x: _Rows.apply(
            ops.layer_norm, ranks, x, module.weight, module.bias, module.eps
        )
    elif isinstance(module, Attention):
        module.attend = partial(_attend, module.attend, ranks)


def _forward(model: Decoder, ranks: Ranks, tokens_T: Tensor, layout: BatchLayout) -> Tensor:
    if len(tokens_T) % ranks.size:
        raise ConfigError(
            f"parallel.cp: must divide the tokens of a micro-batch, {len(tokens_T)}, "
            f"got {ranks.size}",
            hint="change data.seq_len or the number of samples of a micro-batch",
        )
    own = row_slice(len(tokens_T), ranks.rank, ranks.size)
    x_SD = _Divide.apply(model.embed(tokens_T, layout), ranks)
    own_layout = replace(layout, positions=layout.positions[own])
    for block in model.blocks:
        x_SD = block(x_SD, own_layout)
    return model.norm(_Join.apply(x_SD, ranks))


def _compute(
    ranks: Ranks,
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None = None,
    activation: int = IDENTITY,
    residual: Tensor | None = None,
) -> Tensor:
    """Compute a linear layer, or gate and up of a gated MLP."""
    if len(weights) == 2:
        return _Rows.apply(ops.gated_linear, ranks, x, *weights, activation, None, *_NO_LORA)
    args = (x, weights[0], bias, activation, residual, *_NO_LORA)
    return _Rows.apply(ops.linear, ranks, *args)


def _attend(
    attend: Any, ranks: Ranks, q_TNH: Tensor, k: Tensor, v: Tensor, layout: BatchLayout
) -> Tensor:
    exchanged = (_SwapHeads.apply(x, ranks, True) for x in (q_TNH, k, v))
    return _SwapHeads.apply(attend(*exchanged, layout), ranks, False)


class _Rows(torch.autograd.Function):
    """An op on this rank's rows; its weights get the gradients of all rows, or zeros.

    The weights are the tensors that are not among the op's `row_args`. Those of matrix
    multiplications are divided by rows, those of norms belong to the first rank.
    """

    @staticmethod
    def forward(ctx: Any, op: Any, ranks: Ranks, *args: Any) -> Tensor:
        ctx.op, ctx.ranks = op, ranks
        ctx.is_tensor = [isinstance(arg, Tensor) for arg in args]
        ctx.others = [None if isinstance(arg, Tensor) else arg for arg in args]
        ctx.save_for_backward(*(arg for arg in args if isinstance(arg, Tensor)))
        return op(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        saved = iter(ctx.saved_tensors)
        both = zip(ctx.is_tensor, ctx.others, strict=True)
        args = [next(saved) if is_tensor else other for is_tensor, other in both]
        (grad,) = grads
        needs = ctx.needs_input_grad[2:]
        is_row = [name in ctx.op.row_args for name in ctx.op.signature.parameters]
        of_rows = [need and row for need, row in zip(needs, is_row, strict=True)]
        of_weights = [need and not row for need, row in zip(needs, is_row, strict=True)]
        found = _gradients(ctx.op, of_rows, grad, args)
        if any(of_weights):
            found |= _weight_gradients(ctx.op, ctx.ranks, of_weights, grad, args)
        return None, None, *(found.get(index) for index in range(len(args)))


def _gradients(op: Any, needs: list[bool], grad: Tensor, args: list[Any]) -> dict[int, Tensor]:
    """Return the gradients of the arguments that need one, by their index."""
    found = iter(op.backward_overload(needs, [grad.contiguous()], *args))
    return {index: next(found) for index, needed in enumerate(needs) if needed}


def _weight_gradients(
    op: Any, ranks: Ranks, needs: list[bool], grad: Tensor, args: list[Any]
) -> dict[int, Tensor]:
    """Return this rank's part of the weights' gradients, zeros elsewhere."""
    whole = {index: torch.zeros_like(args[index]) for index, need in enumerate(needs) if need}
    x = all_gather(args[0], ranks.group)
    if op in (ops.linear, ops.gated_linear):
        rows = row_slice(grad.shape[-1], ranks.rank, ranks.size)
        grad = _swap_columns(grad, ranks)
    else:
        rows, grad = slice(None), all_gather(grad, ranks.group)
        if not ranks.is_main:
            return whole
    both = zip(args[1:], needs[1:], strict=True)
    rest = [arg[rows] if need else None if isinstance(arg, Tensor) else arg for arg, need in both]
    for index, found in _gradients(op, needs, grad, [x, *rest]).items():
        whole[index][rows] = found
    return whole


def _swap_columns(x_SN: Tensor, ranks: Ranks) -> Tensor:
    """Return this rank's part of the columns, for the rows of all ranks."""
    parts = [row_slice(x_SN.shape[1], rank, ranks.size) for rank in range(ranks.size)]
    sizes = [len(x_SN) * (part.stop - part.start) for part in parts]
    sent = torch.cat([x_SN[:, part].reshape(-1) for part in parts])
    own = [sizes[ranks.rank]] * ranks.size
    return all_to_all(sent, ranks.group, own, sizes).view(ranks.size * len(x_SN), -1)


class _Divide(torch.autograd.Function):
    """Keeps this rank's rows of a tensor that all ranks have; the gradient has all rows again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return x[row_slice(len(x), ranks.rank, ranks.size)].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return all_gather(grads[0], ctx.ranks.group), None


class _Join(torch.autograd.Function):
    """Gathers the rows of all ranks; the gradient, which all ranks have, is divided again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return all_gather(x, ranks.group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        return grad[row_slice(len(grad), ctx.ranks.rank, ctx.ranks.size)].contiguous(), None


class _SwapHeads(torch.autograd.Function):
    """Exchanges heads for tokens: (S, N, H) to (T, N / ranks, H), or back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, to_heads: bool) -> Tensor:
        ctx.ranks, ctx.to_heads = ranks, to_heads
        return _swap_heads(x, ranks, to_heads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _swap_heads(grads[0], ctx.ranks, not ctx.to_heads), None, None


def _swap_heads(x: Tensor, ranks: Ranks, to_heads: bool) -> Tensor:
    if to_heads:
        sent = x.unflatten(1, (ranks.size, -1)).transpose(0, 1)
        return all_to_all(sent, ranks.group).flatten(0, 1)
    received = all_to_all(x, ranks.group)
    return received.unflatten(0, (ranks.size, -1)).transpose(0, 1).flatten(1, 2)
