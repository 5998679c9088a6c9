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
from torch import Tensor, fx

from ingot import ops
from ingot.fuse.builder import Builder
from ingot.fuse.graph import same_shape, tensor_of
from ingot.fuse.mask import AttentionMask
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


def _tensors(match: Match, *names: str) -> list[Tensor]:
    found = (tensor_of(match.get(name)) for name in names)
    return [tensor for tensor in found if tensor is not None]


def _one_dtype(match: Match, *names: str) -> bool:
    """Return whether the tensors that are there have one floating dtype."""
    dtypes = {tensor.dtype for tensor in _tensors(match, *names)}
    return len(dtypes) == 1 and next(iter(dtypes)).is_floating_point


def _is_vector(match: Match, name: str, of: str) -> bool:
    """Return whether an argument is None or has one value per channel of another."""
    vector, (tensor,) = tensor_of(match.get(name)), _tensors(match, of)
    return vector is None or same_shape(vector.shape, tensor.shape[-1:])


# Linear layers


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
    if not _one_dtype(match, "x", "weight", "weight_t", "bias", "residual"):
        return False
    (x,) = _tensors(match, "x")
    weight = tensor_of(match.get("weight"))
    if weight is None:
        (transposed,) = _tensors(match, "weight_t")
        weight = transposed.t() if transposed.dim() == 2 else transposed
    if weight.dim() != 2 or x.dim() < 2 or not same_shape(x.shape[-1:], weight.shape[1:]):
        return False
    (root,) = _tensors(match, "root")
    shape = (*x.shape[:-1], weight.shape[0])
    bias, residual = tensor_of(match.get("bias")), tensor_of(match.get("residual"))
    return (
        same_shape(root.shape, shape)
        and (bias is None or same_shape(bias.shape, shape[-1:]))
        and (residual is None or same_shape(residual.shape, shape))
    )


def _weight(b: Builder, match: Match) -> fx.Node:
    transposed = match.get("weight_t")
    return match["weight"] if transposed is None else b.method("t", transposed)


def _build_linear(b: Builder, match: Match) -> tuple[fx.Node, ...]:
    activation, residual = match.get("activation") or 0, match.get("residual")
    call = b.op(ops.linear, match["x"], _weight(b, match), match.get("bias"), activation, residual)
    return (call,)


def _gate_fits(match: Match) -> bool:
    x, gate, up = _tensors(match, "x", "gate_weight", "up_weight")
    same = same_shape(gate.shape, up.shape) and gate.dim() == 2 and x.dim() >= 2
    return same and _one_dtype(match, "x", "gate_weight", "up_weight")


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
    value, count = match[name], _tensors(match, "weight")[0].dim() - 2
    if isinstance(value, int):
        return (value,) * count
    numbers = isinstance(value, tuple | list) and all(isinstance(v, int) for v in value)
    return tuple(value) * (count if len(value) == 1 else 1) if numbers else None


def _conv_fits(match: Match) -> bool:
    x, weight = _tensors(match, "x", "weight")
    inputs = _tensors(match, "x", "weight", "bias")
    # The backward pass of the patches would be slower than that of the convolution.
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        return False
    known = all(_sizes(match, name) for name in ("stride", "padding", "dilation"))
    if not (known and x.dim() == weight.dim() and _one_dtype(match, "x", "weight", "bias", "root")):
        return False
    return all(isinstance(size, int) for size in weight.shape)


def _patches(b: Builder, match: Match) -> fx.Node:
    """Return what each position of the result reads, channels last: (B, *positions, K * C)."""
    kernel = _tensors(match, "weight")[0].shape[2:]
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
    count = _tensors(match, "weight")[0].dim() - 2
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
    if not _one_dtype(match, "x", "residual", "weight", "bias", "root"):
        return False
    (x,), residual = _tensors(match, "x"), tensor_of(match.get("residual"))
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


# Attention

_HEADS = (slice(None), slice(None), None, slice(None), slice(None))


def _repeated(name: str) -> Pattern:
    """Return keys or values, also those whose heads transformers repeats for GQA."""
    expanded = Call("expand", Call("getitem", Arg(name), Constant(_HEADS)), Anything())
    return Either(Call("reshape", expanded, Anything()), Arg(name))


_SDPA = Call(
    "sdpa",
    Arg("q"),
    _repeated("k"),
    _repeated("v"),
    AttentionMask(),
    Constant(0.0),
    Anything("is_causal"),
    Either(Constant(None), Number("scale")),
    Anything("enable_gqa"),
)


def _heads_fit(match: Match) -> bool:
    """Return whether there are as many queries as keys, and their heads are in groups."""
    q, k, v = _tensors(match, "q", "k", "v")
    if not (q.dim() == k.dim() == v.dim() == 4 and _one_dtype(match, "q", "k", "v")):
        return False
    aligned = same_shape(k.shape, v.shape) and same_shape(q.shape[2:], k.shape[2:])
    same_batch = same_shape(q.shape[:1], k.shape[:1])
    heads = isinstance(q.shape[1], int) and isinstance(k.shape[1], int)
    return aligned and same_batch and heads and q.shape[1] % k.shape[1] == 0


def _attention_fits(match: Match) -> bool:
    return _mask_fits(match) and match.get("tokens") is None


def _padded_attention_fits(match: Match) -> bool:
    tokens = tensor_of(match.get("tokens"))
    if tokens is None or not _mask_fits(match):
        return False
    (q,) = _tensors(match, "q")
    # The mask's sizes may be symbols of their own: this guards that they are those of the batch.
    return tuple(tokens.shape) == (q.shape[0], q.shape[2])


def _mask_fits(match: Match) -> bool:
    mask = tensor_of(match["mask"])
    if mask is None:
        return _heads_fit(match) and isinstance(match["is_causal"], bool)
    (q,) = _tensors(match, "q")
    fits = _heads_fit(match) and same_shape(mask.shape[-1:], q.shape[2:3])
    return fits and match["is_causal"] is False


def _is_causal(match: Match) -> bool:
    return match["is_causal"] or match["causal"]


def _build_attention(b: Builder, match: Match) -> tuple[fx.Node, ...]:
    q, k, v = match["q"], match["k"], match["v"]
    batch, length = b.size(q, 0), b.size(q, 2)
    packed = [b.packed(tensor) for tensor in (q, k, v)]
    starts, scale = b.cu_seqlens(batch, length), match.get("scale")
    out = b.op(ops.attention, *packed, starts, None, None, _is_causal(match), None, scale)
    return (b.unpacked(out, batch, length),)


def _build_padded_attention(b: Builder, match: Match) -> tuple[fx.Node, ...]:
    q, k, v = (b.method("transpose", match[name], 1, 2) for name in "qkv")
    args = q, k, v, match["tokens"], _is_causal(match), match.get("scale")
    return (b.method("transpose", b.op(ops.padded_attention, *args), 1, 2),)


# Embedding and loss

_EMBEDDING = Call("embedding", Arg("tokens"), Arg("weight"), Anything("padding_idx"))


def _embedding_fits(match: Match) -> bool:
    (weight,) = _tensors(match, "weight")
    # The row of padding_idx gets no gradient, which the op does not know.
    frozen = not (torch.is_grad_enabled() and weight.requires_grad)
    return weight.is_floating_point() and (match["padding_idx"] is None or frozen)


def _build_embedding(b: Builder, match: Match) -> tuple[fx.Node, ...]:
    return (b.op(ops.embedding, match["tokens"], match["weight"]),)


_CROSS_ENTROPY = Call(
    "cross_entropy",
    Reshaped(Cast(Arg("logits"))),
    Arg("targets"),
    Constant(None),
    Constant(None),
    Number("ignore_index"),
    Constant(None),
    Anything("reduction"),
    Number("label_smoothing"),
)


def _cross_entropy_fits(match: Match) -> bool:
    logits, targets = _tensors(match, "logits", "targets")
    if not (logits.is_floating_point() and logits.dim() in (2, 3) and targets.dim() == 1):
        return False
    rows = logits.shape[0] if logits.dim() == 2 else logits.shape[0] * logits.shape[1]
    integers = not targets.is_floating_point() and targets.dtype != torch.bool
    known = match["reduction"] in ("mean", "sum", "none")
    return known and integers and same_shape([rows], targets.shape)


def _build_cross_entropy(b: Builder, match: Match) -> tuple[fx.Node, ...]:
    logits, targets = match["logits"], match["targets"]
    (value,) = _tensors(match, "logits")
    rows = b.method("flatten", logits, 0, 1) if value.dim() == 3 else logits
    options = match["ignore_index"], match["label_smoothing"]
    loss = b.op(ops.cross_entropy, rows, targets, *options)
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
        pattern=_SDPA,
        condition=_attention_fits,
        build=_build_attention,
    ),
    Rewrite(
        name="padded_attention",
        op=ops.padded_attention,
        pattern=_SDPA,
        condition=_padded_attention_fits,
        build=_build_padded_attention,
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
        pattern=_CROSS_ENTROPY,
        condition=_cross_entropy_fits,
        build=_build_cross_entropy,
    ),
)
