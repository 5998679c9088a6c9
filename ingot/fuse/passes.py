"""The passes, in the order in which they run: a list of rewrites as data.

A rewrite is a pattern, a condition on what it matched, and a replacement: a call of an op record.
Each computes the same function as the calls it replaces, with other roundings, and brings the
record's kernels for forward and backward. Larger patterns come first.

Legend: T tokens, B batch, L length, N query heads, G key-value heads, H channels of a head.
"""

# pyright: basic
from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from ingot import ops
from ingot.fuse import attention
from ingot.fuse.builder import Builder
from ingot.fuse.graph import same_shape, tensor_of
from ingot.fuse.pattern import (
    Anything,
    Arg,
    Call,
    Cast,
    Constant,
    Either,
    Given,
    Match,
    Number,
    Pattern,
    Reshaped,
)
from ingot.ops.epilogue import ActivationFn


@dataclass(frozen=True, kw_only=True)
class Rewrite:
    """A named rewrite: where `pattern` matches and `condition` holds, `build` replaces it."""

    name: str
    op: ops.Op[..., Any]
    """The record whose tolerance bounds the error of the replacement."""
    pattern: Pattern
    condition: Callable[[Match], bool]
    """Whether the replacement computes the same function for these arguments."""
    build: Callable[[Builder, Match], tuple[fx.Node, ...]]
    """Adds the calls of the replacement; returns the root's new value, then other outputs."""
    outputs: tuple[str, ...] = ()
    """Names of inner values that the replacement computes too."""


def _is_vector(match: Match, name: str, of: str) -> bool:
    """Return whether an argument is None or has one value per channel of another."""
    vector, (tensor,) = tensor_of(match.get(name)), match.tensors(of)
    return vector is None or same_shape(vector.shape, tensor.shape[-1:])


def _in_training(match: Match, *names: str) -> bool:
    """Return whether one of these arguments gets a gradient."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in match.tensors(*names))


# Linear layers. In training, activations stay outside: the backward pass of the op would compute
# their inputs again, a third of the matmuls' time, where Inductor stores them.


def _linear(x: str = "x", weight: str = "weight", bias: str | None = "bias") -> Pattern:
    none = Constant(None)
    as_module = Call("linear", Arg(x), Arg(weight), Either(none, Arg(bias)) if bias else none)
    if bias is None:
        return as_module
    # transformers' Conv1D, whose weight is (in, out).
    conv1d = Call("addmm", Arg(bias), Reshaped(Arg(x)), Arg(f"{weight}_t"))
    return Either(as_module, Reshaped(conv1d))


def _gelu_tanh(x: Pattern) -> Pattern:
    cube = Call("mul", Constant(0.044715), Call("pow", x, Constant(3.0)))
    inner = Call("tanh", Call("mul", Constant(0.7978845608028654), Call("add", x, cube)))
    spelled = Call("mul", Call("mul", Constant(0.5), x), Call("add", Constant(1.0), inner))
    return Either(Call("gelu", x, Constant("tanh")), spelled)


def _activated(x: Pattern) -> Pattern:
    """Return the pattern of an activation of x that an epilogue has."""

    def given(pattern: Pattern, activation: ActivationFn) -> Pattern:
        return Given(pattern, "activation", int(activation))

    return Either(
        given(Call("gelu", x, Constant("none")), ActivationFn.GELU),
        given(_gelu_tanh(x), ActivationFn.GELU_TANH),
        given(Call("silu", x), ActivationFn.SILU),
        given(Call("relu", x), ActivationFn.RELU),
    )


def _linear_fits(match: Match) -> bool:
    if not match.one_dtype("x", "weight", "weight_t", "bias", "residual"):
        return False
    inputs = "x", "weight", "weight_t", "bias"
    if match.get("activation") is not None and _in_training(match, *inputs):
        return False
    (x,) = match.tensors("x")
    weight = tensor_of(match.get("weight"))
    if weight is None:
        (transposed,) = match.tensors("weight_t")
        weight = transposed.t() if transposed.dim() == 2 else transposed
    if weight.dim() != 2 or x.dim() < 2 or not same_shape(x.shape[-1:], weight.shape[1:]):
        return False
    (root,) = match.tensors("root")
    shape = (*x.shape[:-1], weight.shape[0])
    bias, residual = tensor_of(match.get("bias")), tensor_of(match.get("residual"))
    return (
        same_shape(root.shape, shape)
        and (bias is None or same_shape(bias.shape, shape[-1:]))
        and (residual is None or same_shape(residual.shape, shape))
    )


def _weight(b: Builder, match: Match) -> fx.Node:
    transposed = match.get("weight_t")
    if transposed is None:
        return match["weight"]
    return b.method("contiguous", b.method("t", transposed))  # Inductor copies faster than the op


def _build_linear(b: Builder, match: Match) -> tuple[fx.Node, ...]:
    activation, residual = match.get("activation") or 0, match.get("residual")
    call = b.op(ops.linear, match["x"], _weight(b, match), match.get("bias"), activation, residual)
    return (call,)


def _gate_fits(match: Match) -> bool:
    inputs = "x", "gate_weight", "up_weight"
    x, gate, up = match.tensors(*inputs)
    same = same_shape(gate.shape, up.shape) and gate.dim() == 2 and x.dim() >= 2
    return same and match.one_dtype(*inputs) and not _in_training(match, *inputs)


def _build_gated(b: Builder, match: Match) -> tuple[fx.Node, ...]:
    args = match["x"], match["gate_weight"], match["up_weight"], match["activation"]
    return (b.op(ops.gated_linear, *args),)


_GATED = Call(
    "mul", _activated(_linear(weight="gate_weight", bias=None)), _linear("x", "up_weight", None)
)
_WITH_EPILOGUE = Either(
    Call("add", Arg("residual"), _activated(_linear())),
    Call("add", Arg("residual"), _linear()),
    _activated(_linear()),
    _linear(),
)


# Mixtures of experts: rows that are sorted by expert, and the end of the rows of each.

_GROUPED = Call(
    "grouped_mm",
    Arg("x"),
    Call("transpose", Arg("weight"), Constant(-2), Constant(-1)),
    Arg("ends"),
)


def _grouped_fits(match: Match) -> bool:
    x, weight, ends = match.tensors("x", "weight", "ends")
    shapes = x.dim() == 2 and weight.dim() == 3 and ends.dim() == 1
    return shapes and ends.dtype == torch.int32 and match.one_dtype("x", "weight")


def _build_grouped(b: Builder, match: Match) -> tuple[fx.Node, ...]:
    # What is computed for rows after the last end is not defined: they go to the last expert.
    count = b.function(torch.full, (1,), b.size(match["x"], 0), dtype=torch.int32)
    ends = b.function(operator.getitem, match["ends"], slice(None, -1))
    starts = b.function(torch.cat, [b.function(F.pad, ends, (1, 0)), count])
    return (b.op(ops.grouped_linear, match["x"], match["weight"], starts),)


# Convolution: a linear layer of patches. Batch normalization is not folded into the weight: in
# bfloat16 that rounds the weight once more, which the proof does not pass.


def _conv(x: str = "x") -> Pattern:
    bias = Either(Constant(None), Arg("bias"))
    options = [Anything(name) for name in ("stride", "padding", "dilation")]
    args = Arg(x), Arg("weight"), bias, *options, Constant(1)
    return Either(Call("conv2d", *args), Call("conv1d", *args))


_CONVOLUTION = Either(_activated(_conv()), _conv())


def _sizes(match: Match, name: str) -> tuple[int, ...] | None:
    """Return an option of a convolution by dimension, None for "same" and "valid"."""
    value, count = match[name], match.tensors("weight")[0].dim() - 2
    if isinstance(value, int):
        return (value,) * count
    numbers = isinstance(value, tuple | list) and all(isinstance(v, int) for v in value)
    return tuple(value) * (count if len(value) == 1 else 1) if numbers else None


def _conv_fits(match: Match) -> bool:
    x, weight = match.tensors("x", "weight")
    # The backward pass of the patches would be slower than that of the convolution.
    if _in_training(match, "x", "weight", "bias"):
        return False
    known = all(_sizes(match, name) for name in ("stride", "padding", "dilation"))
    if not (known and x.dim() == weight.dim() and match.one_dtype("x", "weight", "bias", "root")):
        return False
    return all(isinstance(size, int) for size in weight.shape)


def _patches(b: Builder, match: Match) -> fx.Node:
    """Return what each position of the result reads, channels last: (B, *positions, K * C)."""
    kernel = match.tensors("weight")[0].shape[2:]
    stride, padding, dilation = (_sizes(match, n) or () for n in ("stride", "padding", "dilation"))
    count = len(kernel)
    spatial = range(2, 2 + count)
    x = b.method("permute", match["x"], 0, *spatial, 1)
    if any(padding):
        sides = [side for size in reversed(padding) for side in (size, size)]
        x = b.function(F.pad, x, (0, 0, *sides))
    for i in range(count):
        x = b.method("unfold", x, 1 + i, (kernel[i] - 1) * dilation[i] + 1, stride[i])
    if any(step > 1 for step in dilation):
        index = (Ellipsis, *(slice(None, None, step) for step in dilation))
        x = b.function(operator.getitem, x, index)
    offsets = range(2 + count, 2 + 2 * count)
    x = b.method("permute", x, *range(1 + count), *offsets, 1 + count)
    return b.method("flatten", x, 1 + count)


def _build_conv(b: Builder, match: Match) -> tuple[fx.Node, ...]:
    count = match.tensors("weight")[0].dim() - 2
    spatial = range(2, 2 + count)
    weight = b.method("flatten", b.method("permute", match["weight"], 0, *spatial, 1), 1)
    activation = match.get("activation") or 0
    rows = b.op(ops.linear, _patches(b, match), weight, match.get("bias"), activation)
    return (b.method("permute", rows, 0, 1 + count, *range(1, 1 + count)),)


# Normalization


def _rms(x: Pattern) -> Pattern:
    """Return RMSNorm as `torch.nn` has it and as transformers spells it."""
    square = Either(Call("pow", Cast(x), Constant(2)), Call("square", Cast(x)))
    last = Either(Constant(-1), Constant((-1,)), Constant([-1]))
    variance = Call("mean", square, last, Constant(True))
    scaled = Call("mul", Cast(x), Call("rsqrt", Call("add", variance, Number("eps"))))
    spelled = Call("mul", Arg("weight"), Cast(scaled))
    return Either(spelled, Call("rms_norm", x, Anything("shape"), Arg("weight"), Number("eps")))


def _layer(x: Pattern) -> Pattern:
    bias = Either(Constant(None), Arg("bias"))
    return Call("layer_norm", x, Anything("shape"), Arg("weight"), bias, Number("eps"))


_SUM = Call("add", Arg("x"), Arg("residual"), output="total")


def _norm_fits(match: Match) -> bool:
    shape = match.get("shape")
    if not (shape is None or len(shape) == 1):
        return False
    if not match.one_dtype("x", "residual", "weight", "bias", "root"):
        return False
    (x,), residual = match.tensors("x"), tensor_of(match.get("residual"))
    fits = _is_vector(match, "weight", "x") and _is_vector(match, "bias", "x")
    return fits and (residual is None or same_shape(residual.shape, x.shape))


def _build_rms(b: Builder, match: Match) -> tuple[fx.Node, ...]:
    return (b.op(ops.rms_norm, match["x"], match["weight"], match["eps"]),)


def _build_layer(b: Builder, match: Match) -> tuple[fx.Node, ...]:
    return (b.op(ops.layer_norm, match["x"], match["weight"], match.get("bias"), match["eps"]),)


def _build_add_rms(b: Builder, match: Match) -> tuple[fx.Node, ...]:
    args = match["x"], match["residual"], match["weight"], match["eps"]
    both = b.op(ops.add_rms_norm, *args)
    return b.item(both, 0), b.item(both, 1)


def _build_add_layer(b: Builder, match: Match) -> tuple[fx.Node, ...]:
    args = match["x"], match["residual"], match["weight"], match.get("bias"), match["eps"]
    both = b.op(ops.add_layer_norm, *args)
    return b.item(both, 0), b.item(both, 1)


# Embedding and loss

_EMBEDDING = Call("embedding", Arg("tokens"), Arg("weight"), Anything("padding_idx"))


def _embedding_fits(match: Match) -> bool:
    (weight,) = match.tensors("weight")
    padding = match["padding_idx"]
    known = padding is None or (isinstance(padding, int) and padding >= 0)
    return weight.is_floating_point() and known


def _build_embedding(b: Builder, match: Match) -> tuple[fx.Node, ...]:
    tokens, padding = match["tokens"], match["padding_idx"]
    rows = b.op(ops.embedding, tokens, match["weight"])
    # Gradients are off while a replacement is built, so `_in_training` does not know.
    if padding is None or not match.tensors("weight")[0].requires_grad:
        return (rows,)
    # Its row gets no gradient, which the op does not know.
    is_padding = b.method("unsqueeze", b.method("eq", tokens, padding), -1)
    return (b.function(torch.where, is_padding, b.method("detach", rows), rows),)


def _cross_entropy(logits: Pattern) -> Pattern:
    return Call(
        "cross_entropy",
        Reshaped(Cast(Reshaped(logits))),
        Arg("targets"),
        Constant(None),
        Constant(None),
        Number("ignore_index"),
        Constant(None),
        Anything("reduction"),
        Number("label_smoothing"),
    )


def _cross_entropy_fits(match: Match, rows: str = "logits") -> bool:
    values, targets = match.tensors(rows, "targets")
    if not (values.is_floating_point() and values.dim() in (2, 3) and targets.dim() == 1):
        return False
    count = values.shape[0] if values.dim() == 2 else values.shape[0] * values.shape[1]
    integers = not targets.is_floating_point() and targets.dtype != torch.bool
    known = match["reduction"] in ("mean", "sum", "none")
    return known and integers and same_shape([count], targets.shape)


def _head_fits(match: Match) -> bool:
    """Return whether the logits are those of a head that one op computes with the loss."""
    hidden, weight = match.tensors("hidden", "weight")
    known = weight.dim() == 2 and same_shape(hidden.shape[-1:], weight.shape[1:])
    return known and match.one_dtype("hidden", "weight") and _cross_entropy_fits(match, "hidden")


def _rows(b: Builder, match: Match, name: str) -> fx.Node:
    (value,) = match.tensors(name)
    return b.method("flatten", match[name], 0, 1) if value.dim() == 3 else match[name]


def _build_cross_entropy(b: Builder, match: Match) -> tuple[fx.Node, ...]:
    options = match["targets"], match["ignore_index"], match["label_smoothing"]
    return _reduced(b, match, b.op(ops.cross_entropy, _rows(b, match, "logits"), *options))


def _build_head(b: Builder, match: Match) -> tuple[fx.Node, ...]:
    options = match["targets"], match["ignore_index"], match["label_smoothing"]
    args = _rows(b, match, "hidden"), match["weight"], *options
    return _reduced(b, match, b.op(ops.linear_cross_entropy, *args))


def _reduced(b: Builder, match: Match, loss: fx.Node) -> tuple[fx.Node, ...]:
    targets = match["targets"]
    if match["reduction"] == "none":
        return (loss,)
    total = b.method("sum", loss)
    if match["reduction"] == "sum":
        return (total,)
    counted = b.method("sum", b.method("ne", targets, match["ignore_index"]))
    return (b.method("div", total, counted),)


PASSES: tuple[Rewrite, ...] = (
    Rewrite(
        name="attention",
        op=ops.attention,
        pattern=attention.SDPA,
        condition=attention.fits,
        build=attention.build,
    ),
    Rewrite(
        name="written_out_attention",
        op=ops.attention,
        pattern=attention.WRITTEN_OUT,
        condition=attention.written_out_fits,
        build=attention.build,
    ),
    Rewrite(
        name="padded_attention",
        op=ops.padded_attention,
        pattern=attention.SDPA,
        condition=attention.padded_fits,
        build=attention.build_padded,
    ),
    Rewrite(
        name="linear_cross_entropy",
        op=ops.linear_cross_entropy,
        pattern=_cross_entropy(_linear("hidden", bias=None)),
        condition=_head_fits,
        build=_build_head,
    ),
    Rewrite(
        name="grouped_linear",
        op=ops.grouped_linear,
        pattern=_GROUPED,
        condition=_grouped_fits,
        build=_build_grouped,
    ),
    Rewrite(
        name="gated_linear",
        op=ops.gated_linear,
        pattern=_GATED,
        condition=_gate_fits,
        build=_build_gated,
    ),
    Rewrite(
        name="linear",
        op=ops.linear,
        pattern=_WITH_EPILOGUE,
        condition=_linear_fits,
        build=_build_linear,
    ),
    Rewrite(
        name="conv",
        op=ops.linear,
        pattern=_CONVOLUTION,
        condition=_conv_fits,
        build=_build_conv,
    ),
    Rewrite(
        name="add_rms_norm",
        op=ops.add_rms_norm,
        pattern=_rms(_SUM),
        condition=_norm_fits,
        build=_build_add_rms,
        outputs=("total",),
    ),
    Rewrite(
        name="rms_norm",
        op=ops.rms_norm,
        pattern=_rms(Arg("x")),
        condition=_norm_fits,
        build=_build_rms,
    ),
    Rewrite(
        name="add_layer_norm",
        op=ops.add_layer_norm,
        pattern=_layer(_SUM),
        condition=_norm_fits,
        build=_build_add_layer,
        outputs=("total",),
    ),
    Rewrite(
        name="layer_norm",
        op=ops.layer_norm,
        pattern=_layer(Arg("x")),
        condition=_norm_fits,
        build=_build_layer,
    ),
    Rewrite(
        name="embedding",
        op=ops.embedding,
        pattern=_EMBEDDING,
        condition=_embedding_fits,
        build=_build_embedding,
    ),
    Rewrite(
        name="cross_entropy",
        op=ops.cross_entropy,
        pattern=_cross_entropy(Arg("logits")),
        condition=_cross_entropy_fits,
        build=_build_cross_entropy,
    ),
)
