"""The patterns of attention: PyTorch's function, and models that write it out.

Written out, it is a matmul of queries and keys, a scale, perhaps a causal mask, a softmax, perhaps
in float32, and a matmul with the values.
"""

# pyright: basic
from __future__ import annotations

from torch import fx

from ingot import ops
from ingot.fuse.builder import Builder
from ingot.fuse.graph import same_shape, tensor_of
from ingot.fuse.mask import AttentionMask, classify_added, classify_hidden, hides
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
)

_HEADS = (slice(None), slice(None), None, slice(None), slice(None))


def _repeated(name: str) -> Pattern:
    """Return keys or values, also those whose heads transformers repeats for GQA."""
    expanded = Call("expand", Call("getitem", Arg(name), Constant(_HEADS)), Anything())
    return Either(Call("reshape", expanded, Anything()), Arg(name))


SDPA = Call(
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


def _scaled(x: Pattern) -> Pattern:
    return Either(Call("mul", x, Number("scale")), Call("div", x, Number("divisor")))


def _masked(scores: Pattern) -> Pattern:
    return Either(
        Call("masked_fill", scores, AttentionMask(classify_hidden), Number("fill")),
        Call("where", AttentionMask(), scores, Number("fill")),
        Call("add", scores, AttentionMask(classify_added)),
        Given(Given(scores, "mask", None), "causal", False),
    )


def _written_out() -> Pattern:
    dims = [(-2, -1), (-1, -2), (2, 3), (3, 2)]
    transposed = [Call("transpose", _repeated("k"), Constant(a), Constant(b)) for a, b in dims]
    keys = Either(*transposed)
    product = Call("matmul", Arg("q"), keys)
    scores = Either(
        _masked(_scaled(product)),
        _scaled(_masked(product)),
        _masked(Call("matmul", _scaled(Arg("q")), keys)),
        Given(_masked(product), "scale", 1.0),
    )
    last, rest = Either(Constant(-1), Constant(3)), (Anything(), Anything())
    weights = Call("softmax", Cast(scores), last, *rest)
    return Given(Call("matmul", Cast(weights), _repeated("v")), "is_causal", False)


WRITTEN_OUT = _written_out()


def fits(match: Match) -> bool:
    """Return whether `attention` computes what was matched."""
    return _mask_fits(match) and match.get("tokens") is None


def written_out_fits(match: Match) -> bool:
    """Return whether `attention` computes what was written out."""
    fill, divisor, scale = (match.get(name) for name in ("fill", "divisor", "scale"))
    numbers = all(value is None or isinstance(value, int | float) for value in (divisor, scale))
    known = numbers and divisor != 0 and (fill is None or hides(fill))
    return known and match.one_dtype("q", "root") and fits(match)


def padded_fits(match: Match) -> bool:
    """Return whether `padded_attention` computes what was matched."""
    tokens = tensor_of(match.get("tokens"))
    if tokens is None or not _mask_fits(match):
        return False
    (q,) = match.tensors("q")
    # The mask's sizes may be symbols of their own: this guards that they are those of the batch.
    return tuple(tokens.shape) == (q.shape[0], q.shape[2])


def _mask_fits(match: Match) -> bool:
    mask = tensor_of(match["mask"])
    if mask is None:
        return _heads_fit(match) and isinstance(match["is_causal"], bool)
    (q,) = match.tensors("q")
    fits = _heads_fit(match) and same_shape(mask.shape[-1:], q.shape[2:3])
    return fits and match["is_causal"] is False


def _heads_fit(match: Match) -> bool:
    """Return whether there are as many queries as keys, and their heads are in groups."""
    q, k, v = match.tensors("q", "k", "v")
    if not (q.dim() == k.dim() == v.dim() == 4 and match.one_dtype("q", "k", "v")):
        return False
    aligned = same_shape(k.shape, v.shape) and same_shape(q.shape[2:], k.shape[2:])
    same_batch = same_shape(q.shape[:1], k.shape[:1])
    heads = isinstance(q.shape[1], int) and isinstance(k.shape[1], int)
    return aligned and same_batch and heads and q.shape[1] % k.shape[1] == 0


def is_causal(match: Match) -> bool:
    """Return whether a query sees only the keys up to its own position."""
    return match["is_causal"] or match["causal"]


def build(b: Builder, match: Match) -> tuple[fx.Node, ...]:
    """Add `attention` over the sequences of a batch."""
    q, k, v = match["q"], match["k"], match["v"]
    batch, length = b.size(q, 0), b.size(q, 2)
    packed = [b.packed(tensor) for tensor in (q, k, v)]
    starts, scale = b.cu_seqlens(batch, length), match.get("scale")
    if (divisor := match.get("divisor")) is not None:
        scale = 1 / divisor
    out = b.op(ops.attention, *packed, starts, None, None, is_causal(match), None, scale)
    return (b.unpacked(out, batch, length),)


def build_padded(b: Builder, match: Match) -> tuple[fx.Node, ...]:
    """Add `padded_attention`."""
    q, k, v = (b.method("transpose", match[name], 1, 2) for name in "qkv")
    args = q, k, v, match["tokens"], is_causal(match), match.get("scale")
    return (b.method("transpose", b.op(ops.padded_attention, *args), 1, 2),)
