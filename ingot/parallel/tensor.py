"""Tensor parallelism: ranks divide the layers of a decoder, with the bits of a single process.

A rank has some rows, that is output features, of every weight of the attention and the MLPs. No
sum is divided: Megatron's row-parallel layers add partial sums of the ranks, which rounds
differently for each number of ranks. A sublayer is two divided layers:

    qkv, or gate and up   whole input -> features of this rank: its heads, or hidden channels
    out, or down          features of this rank, gathered -> columns of the output, gathered

Backward of y = x W^T, for the rows W_r of this rank: dW_r = dy_r^T x needs only dy_r. A column of
dx is a sum over all rows of W. So an all-to-all gives each rank all rows of some columns of W, and
the rank computes these columns of dx from the gathered dy. Where x was gathered, they are all that
it needs of dx; otherwise, dx is gathered.

The usual scheme, `bitwise=False`, adds the partial sums of the ranks, in float32, and sends less:

    out, or down          columns of W for the features of this rank -> partial sums, added

An all-to-all turns this rank's rows of W into all rows of its columns, so that checkpoints and
optimizers see the same rows in both schemes. Backward adds the partial sums of dx of the first
layer.

Everything else is computed by every rank: embeddings, norms, the LM head and the loss.

Legend: T tokens, N output features, K input features.
"""

# pyright: basic, reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ingot import ops
from ingot.core.errors import ConfigError
from ingot.nn import Decoder, DecoderConfig
from ingot.nn.attention import Attention
from ingot.nn.linear import Linear
from ingot.nn.mlp import MLP, SwiGLU
from ingot.nn.quantized import QuantizedModule
from ingot.ops.epilogue import IDENTITY
from ingot.parallel.ranks import Ranks, all_gather, all_to_all, reduce_scatter

Rows = dict[str, list[slice]]


def divide_decoder(model: nn.Module, ranks: Ranks, *, bitwise: bool = True) -> Rows:
    """Divide the layers of a decoder's blocks; return which rows of each weight this rank has.

    The module itself is changed: divided weights become this rank's rows, with the same names.
    Without `bitwise`, ranks add partial sums.

    >>> from ingot.nn import preset
    >>> model = Decoder.from_config(preset("tiny"), seed=0)
    >>> divide_decoder(model, Ranks(1, 2))["blocks.0.attention.qkv.weight"]
    [slice(32, 64, None), slice(80, 96, None), slice(112, 128, None)]
    """
    check_divisible(getattr(model, "config", None), ranks.size)
    assert isinstance(model, Decoder)
    if any(isinstance(module, QuantizedModule) for module in model.modules()):
        raise ConfigError("tp: quantized weights cannot be divided", hint="set tp to 1")
    rows: Rows = {}
    for name, module in model.blocks.named_modules(prefix="blocks"):
        if isinstance(module, Attention):
            heads = (module.heads, module.kv_heads, module.kv_heads)
            widths = [number * module.head_dim for number in heads]
            rows |= _divide_first(name, module.qkv, {"qkv": module.qkv}, widths, ranks, bitwise)
            rows |= _divide_second(f"{name}.out", module.out, ranks, bitwise)
            module.heads //= ranks.size
            module.kv_heads //= ranks.size
        elif isinstance(module, MLP | SwiGLU):
            site = module if isinstance(module, SwiGLU) else module.up
            first = {key: layer for key, layer in module.named_children() if key in ("gate", "up")}
            rows |= _divide_first(name, site, first, [module.down.in_features], ranks, bitwise)
            rows |= _divide_second(f"{name}.down", module.down, ranks, bitwise)
    return rows


def check_divisible(config: Any, size: int) -> None:
    """Raise a `ConfigError` unless this number of ranks can divide the layers of a model.

    >>> from ingot.nn import preset
    >>> check_divisible(preset("tiny"), 2)
    """
    if not isinstance(config, DecoderConfig):
        raise ConfigError("tp: only decoders can be divided", hint="set tp to 1")
    for name in ("moe", "qk_norm"):
        if getattr(config, name):
            raise ConfigError(
                f"tp: models with {name} cannot be divided",
                hint="set tp to 1; in training, ranks then shard the weights (FSDP)",
            )
    for name in ("heads", "kv_heads", "dim", "ffn_dim"):
        if getattr(config, name) % size:
            raise ConfigError(
                f"tp: must divide the model's {name}, {getattr(config, name)}, got {size}",
                hint="lower tp; in training, other ranks shard the weights (FSDP)",
            )


def _divide(name: str, layer: Linear, widths: Sequence[int], ranks: Ranks) -> Rows:
    """Keep this rank's rows of a layer whose rows are ranges of these widths, each divided."""
    starts = [0, *accumulate(widths)]
    rows: list[slice] = []
    for start, width in zip(starts, widths, strict=False):
        part = width // ranks.size
        rows.append(slice(start + ranks.rank * part, start + (ranks.rank + 1) * part))
    layer.out_features //= ranks.size
    found: Rows = {}
    for key, parameter in list(layer.named_parameters()):
        own = take_rows(parameter.detach(), rows)
        setattr(layer, key, nn.Parameter(own, requires_grad=parameter.requires_grad))
        found[f"{name}.{key}"] = rows
    return found


def _divide_first(
    name: str,
    site: Any,
    layers: Mapping[str, Any],
    widths: Sequence[int],
    ranks: Ranks,
    bitwise: bool,
) -> Rows:
    """Divide the layers of one input, which `site` computes together."""
    own = [width // ranks.size for width in widths]
    site.compute = partial(_first_layer, ranks, own, bitwise)
    rows: Rows = {}
    for key, layer in layers.items():
        rows |= _divide(f"{name}.{key}", layer, widths, ranks)
    return rows


def _divide_second(name: str, layer: Linear, ranks: Ranks, bitwise: bool) -> Rows:
    layer.compute = partial(_second_layer, ranks, bitwise)
    return _divide(name, layer, [layer.out_features], ranks)


def take_rows(tensor: Tensor, rows: Sequence[slice]) -> Tensor:
    """Return a copy of some rows.

    >>> take_rows(torch.arange(8), [slice(1, 3), slice(6, 7)])
    tensor([1, 2, 6])
    """
    return torch.cat([tensor[:0], *(tensor[some] for some in rows)])


def _first_layer(
    ranks: Ranks,
    widths: Sequence[int],
    bitwise: bool,
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None = None,
    activation: int = IDENTITY,
    residual: Tensor | None = None,
) -> Tensor:
    """Compute this rank's output features; `widths` are those of its ranges of rows."""
    assert residual is None
    return _FirstLayer.apply(ranks, widths, bitwise, activation, x, bias, *weights)  # pyright: ignore


def _second_layer(
    ranks: Ranks,
    bitwise: bool,
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None = None,
    activation: int = IDENTITY,
    residual: Tensor | None = None,
) -> Tensor:
    """Compute all output features from this rank's input features."""
    assert activation == IDENTITY
    layer = _SecondLayer if bitwise else _SummedLayer
    return layer.apply(ranks, x, weights[0], bias, residual)  # pyright: ignore


class _FirstLayer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ranks: Ranks,
        widths: Sequence[int],
        bitwise: bool,
        activation: int,
        x: Tensor,
        bias: Tensor | None,
        *weights: Tensor,
    ) -> Tensor:
        ctx.ranks, ctx.widths, ctx.bitwise, ctx.activation = ranks, widths, bitwise, activation
        ctx.save_for_backward(x, bias, *weights)
        if len(weights) == 2:
            return ops.gated_linear(x, *weights, activation)  # pyright: ignore
        return ops.linear(x, weights[0], bias, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        x, bias, *weights = ctx.saved_tensors
        grads = [grad.contiguous()]
        if len(weights) == 2:
            gate, up = weights
            grads = [*ops.gated_linear_preact_grad(grads[0], x, gate, up, ctx.activation)]
        elif ctx.activation != IDENTITY:
            grads = [ops.linear_preact_grad(grads[0], x, weights[0], bias, ctx.activation)]
        of_weights, of_bias = [], None
        for own, weight in zip(grads, weights, strict=True):
            of_weight, of_bias = _parameter_grads(own, x, weight, bias)
            of_weights.append(of_weight)
        if ctx.bitwise:
            whole = [_gather(own, ctx.ranks, ctx.widths) for own in grads]
            like = _own_columns(x, ctx.ranks)
            own_of_x = _input_grad(ctx.ranks, ctx.widths, whole, weights, like)
        else:
            own_of_x = _sum_columns(_linear_input_grad(grads, x, weights), ctx.ranks).to(x.dtype)
        return None, None, None, None, _gather(own_of_x, ctx.ranks), of_bias, *of_weights


class _SecondLayer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ranks: Ranks,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
    ) -> Tensor:
        ctx.ranks, ctx.has_residual = ranks, residual is not None
        ctx.save_for_backward(x, weight, bias)  # of x this rank's features: gathered again
        added = None if residual is None else _own_columns(residual, ranks)
        return _gather(ops.linear(_gather(x, ranks), weight, bias, IDENTITY, added), ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        x, weight, bias = ctx.saved_tensors
        grad = grad.contiguous()
        own = _own_columns(grad, ctx.ranks).contiguous()
        of_weight, of_bias = _parameter_grads(own, _gather(x, ctx.ranks), weight, bias)
        of_x = _input_grad(ctx.ranks, [len(weight)], [grad], [weight], x)
        return None, of_x, of_weight, of_bias, grad if ctx.has_residual else None


class _SummedLayer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ranks: Ranks,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
    ) -> Tensor:
        ctx.ranks, ctx.has_residual = ranks, residual is not None
        ctx.save_for_backward(x, weight, bias)
        columns = _exchange(weight, ranks, [len(weight)])
        own = _sum_columns(ops.linear(x, columns), ranks)
        for added in (bias, None if residual is None else _own_columns(residual, ranks)):
            if added is not None:
                own += added
        return _gather(own.to(x.dtype), ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        x, weight, bias = ctx.saved_tensors
        ranks, grad = ctx.ranks, grad.contiguous()
        columns = _exchange(weight, ranks, [len(weight)])
        of_x = _linear_input_grad([grad], x, [columns])
        whole_bias = None if bias is None else grad.new_empty(len(columns))
        of_columns, of_bias = _parameter_grads(grad, x, columns, whole_bias)
        if of_bias is not None:
            of_bias = of_bias.chunk(ranks.size)[ranks.rank]
        rows = all_to_all(of_columns.unflatten(0, (ranks.size, -1)), ranks.group)
        of_weight = rows.transpose(0, 1).flatten(1)
        return None, of_x, of_weight, of_bias, grad if ctx.has_residual else None


def _sum_columns(partial_sums: Tensor, ranks: Ranks) -> Tensor:
    """Return this rank's columns of the sum over the ranks, in float32."""
    assert ranks.group is not None
    columns = partial_sums.unflatten(1, (ranks.size, -1)).transpose(0, 1).contiguous()
    return reduce_scatter(columns, ranks.group).view(columns.shape[1:])


def _own_columns(whole: Tensor, ranks: Ranks) -> Tensor:
    return whole.chunk(ranks.size, dim=1)[ranks.rank]


def _gather(own: Tensor, ranks: Ranks, widths: Sequence[int] | None = None) -> Tensor:
    """Return the columns of all ranks, (T, N), in the order of the undivided ranges."""
    parts = all_gather(own[None], ranks.group)
    return _join(parts.transpose(0, 1), 1, widths or [own.shape[1]])


def _exchange(weight: Tensor, ranks: Ranks, widths: Sequence[int]) -> Tensor:
    """Return all rows of this rank's columns of a weight, (N, K / size), given its rows."""
    sent = weight.unflatten(1, (ranks.size, -1)).transpose(0, 1)
    return _join(all_to_all(sent, ranks.group), 0, widths)


def _join(parts: Tensor, dim: int, widths: Sequence[int]) -> Tensor:
    """Join ranges: `dim` of `parts` is the rank that has them, the next one their elements."""
    joined = [some.flatten(dim, dim + 1) for some in parts.split(list(widths), dim + 1)]
    return joined[0] if len(joined) == 1 else torch.cat(joined, dim)


def _input_grad(
    ranks: Ranks,
    widths: Sequence[int],
    grads: Sequence[Tensor],
    weights: Sequence[Tensor],
    like: Tensor,
) -> Tensor:
    """Return this rank's columns of dx, which look like `like`.

    `grads` are the gradients of all output features, (T, N), `weights` this rank's rows.
    """
    columns = [_exchange(weight, ranks, widths) for weight in weights]
    return _linear_input_grad(grads, like, columns)


def _linear_input_grad(grads: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Return dx, which looks like `x`, of a linear layer or of two with a gate."""
    if len(weights) == 2:
        return ops.gated_linear_input_grad(*grads, *weights)
    (found,) = _linear_backward(["x"], grads[0], x, weights[0], None)
    return found


def _parameter_grads(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of a weight and a bias for that of `x @ weight.T + bias`."""
    if bias is None:
        (of_weight,) = _linear_backward(["weight"], grad, x, weight, None)
        return of_weight, None
    of_weight, of_bias = _linear_backward(["weight", "bias"], grad, x, weight, bias)
    return of_weight, of_bias


def _linear_backward(
    of: Sequence[str], grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None
) -> list[Tensor]:
    """Return the gradients of these arguments of `ops.linear`."""
    args = ops.linear.with_defaults((x, weight, bias))
    needs = [name in of for name in ops.linear.signature.parameters]
    return ops.linear.backward_overload(needs, [grad], *args)
