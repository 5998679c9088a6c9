"""Predicts whether a rewrite pays, from rates that are measured once on this machine.

The FLOPs of a matmul or of attention are known from its shapes. How many of them a second computes
depends on the kernel, the dtype, the number of rows and the layout of the weight; so ingot's kernel
and PyTorch's function are timed for a few numbers of rows when a model first needs it, which takes
less than a second, and the rates in between are interpolated. What follows a matmul (an activation,
a residual) is a pass over its result for Inductor, and free in an epilogue. Norms are predicted
from their bytes and the time of a call; embeddings pay for the gradient of a large table.

The rates are cached for each machine, version of torch and number of threads.
"""

# pyright: basic
from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeAlias

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from ingot import ops
from ingot.core import paths
from ingot.core.device import detect
from ingot.core.errors import IngotError
from ingot.fuse.graph import tensor_of
from ingot.fuse.passes import Rewrite
from ingot.fuse.pattern import Match
from ingot.fuse.work import hint, size_hint

Rates: TypeAlias = dict[str, dict[int, float]]
"""Of each provider and kind of call: number of rows -> FLOPs per second."""

_VERSION = 3
_PROVIDERS = ("torch", "ingot")
_SECONDS = 0.05
"""How long the calls of one size are timed."""
_ROWS = (1, 8, 32, 128, 512)
_LENGTHS = (32, 128, 512)
_POSITIONS = (49, 196, 784)
_CHANNELS = 128
_WIDTH, _OUT, _HEADS, _HEAD_DIM = 768, 1536, 4, 64
BYTES_PER_SECOND = 10e9
"""Of a pass over memory: low, because the result of a matmul is usually still in a cache."""
_CALL_SECONDS = 50e-6
"""What a call of an op adds to its work, with Inductor around it."""
_NORM_TIME = 0.8
"""Time of ingot's norm over that of Inductor's in inference, for the same bytes."""
_LARGE_TABLE = 8_000_000
"""Values of an embedding whose gradient takes ingot less time (half to a sixth) than Inductor."""
MARGIN = 1.03
"""How much faster a rewrite must be predicted to be: the rates vary by as much."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Seconds of the calls that a rewrite replaces, and of the replacement."""

    before: float
    after: float

    @property
    def pays(self) -> bool:
        """Whether the replacement is predicted to be faster."""
        return self.after * MARGIN <= self.before


def predict(rewrite: Rewrite, match: Match, training: bool) -> Prediction | None:
    """Predict the time of a rewrite and of what it replaces; None if it always pays."""
    if rewrite.name in ("linear", "gated_linear", "grouped_linear", "linear_cross_entropy"):
        return _predict_linear(match, training)
    if rewrite.name.endswith("attention"):
        written_out = rewrite.name == "written_out_attention"
        return _predict_attention(match, training, written_out)
    if rewrite.name == "conv":
        return _predict_conv(match)
    if rewrite.name.endswith("_norm"):
        return _predict_norm(match, training)
    if rewrite.name == "embedding":
        return _predict_embedding(match, training)
    return None


def _predict_linear(match: Match, training: bool) -> Prediction:
    weight_t = match.get("weight_t")
    weights = [
        tensor
        for name in ("weight", "weight_t", "gate_weight", "up_weight")
        if (tensor := tensor_of(match.get(name))) is not None
    ]
    (x,) = match.tensors("x", "hidden")
    (root,) = match.tensors("root")
    groups = int(weights[0].shape[0]) if weights[0].dim() == 3 else 1
    rows = size_hint(x) // max(1, int(x.shape[-1]))
    flops = 2.0 * rows * sum(size_hint(weight) for weight in weights) / groups
    rows = max(1, rows // groups)
    layout = "contiguous" if weight_t is None else "transposed"
    kind = f"{_dtype(x)}/{'training' if training else 'forward'}/{layout}"
    extra = sum(match.get(name) is not None for name in ("residual", "activation"))
    passes = 2 * (extra + len(weights) - 1) * size_hint(root) * x.itemsize
    again = 1.0
    if match.get("hidden") is not None:  # logits are not stored: in training they are needed twice
        passes = 4 * rows * int(weights[0].shape[0]) * x.itemsize
        again = 4 / 3 if training else 1.0
    return Prediction(
        before=flops / rate(f"linear/torch/{kind}", rows) + passes / BYTES_PER_SECOND,
        after=flops * again / rate(f"linear/ingot/{kind}", rows),
    )


def _predict_attention(match: Match, training: bool, written_out: bool) -> Prediction:
    q = tensor_of(match["q"])
    assert q is not None
    batch, heads, length, width = (hint(size) for size in q.shape)
    flops = 4.0 * batch * heads * length * length * width
    causal = match["is_causal"] or match["causal"]
    kind = f"{_dtype(q)}/{'training' if training else 'forward'}/{'causal' if causal else 'full'}"
    # Written out, scores are written and read twice, by the mask and by the softmax.
    scores = 4 * batch * heads * length**2 * q.itemsize if written_out else 0
    return Prediction(
        before=flops / rate(f"attention/torch/{kind}", length) + scores / BYTES_PER_SECOND,
        after=flops / rate(f"attention/ingot/{kind}", length),
    )


def _predict_conv(match: Match) -> Prediction:
    x, weight, root = (tensor_of(match[name]) for name in ("x", "weight", "root"))
    assert x is not None
    assert weight is not None
    assert root is not None
    channels, width = int(weight.shape[0]), size_hint(weight) // int(weight.shape[0])
    rows = size_hint(root) // channels
    flops = 2.0 * rows * size_hint(weight)
    extra = match.get("activation") is not None
    kind = f"{_dtype(x)}/forward/contiguous"
    # The patches are written, and the weight in their order.
    copied = 2 * (rows * width + size_hint(weight)) if width > int(weight.shape[1]) else 0
    return Prediction(
        before=flops / rate(f"conv/torch/{kind}", rows)
        + 2 * extra * size_hint(root) * x.itemsize / BYTES_PER_SECOND,
        after=flops / rate(f"linear/ingot/{kind}", rows) + copied * x.itemsize / BYTES_PER_SECOND,
    )


def _predict_norm(match: Match, training: bool) -> Prediction:
    """Predict from bytes: Inductor writes what is normalized only where it is used elsewhere."""
    (root,) = match.tensors("root")
    node = match.get("total") or match["x"]
    written = node.op == "placeholder" or any(user not in match.inside for user in node.users)
    arrays = 2 + (match.get("residual") is not None)
    seconds = size_hint(root) * root.itemsize / BYTES_PER_SECOND
    relative = 1.0 if training else _NORM_TIME
    return Prediction(
        before=(arrays + written) * seconds,
        after=(arrays + 1) * seconds * relative + _CALL_SECONDS,
    )


def _predict_embedding(match: Match, training: bool) -> Prediction | None:
    """Only the gradient of a large table pays; otherwise Inductor fuses the call into its uses."""
    weight, root = match.tensors("weight", "root")
    if training and size_hint(weight) >= _LARGE_TABLE:
        return None
    seconds = 2 * size_hint(root) * root.itemsize / BYTES_PER_SECOND
    return Prediction(before=seconds, after=seconds + _CALL_SECONDS)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def rate(kind: str, rows: int) -> float:
    """Return FLOPs per second for a kind of call; measured if this machine has not measured it."""
    table = _measured(kind, torch.get_num_threads())
    return interpolate(table, rows)


def interpolate(table: dict[int, float], rows: int) -> float:
    """Interpolate in the logarithm of the rows, constant outside of what was measured.

    >>> interpolate({1: 1.0, 100: 3.0}, 10), interpolate({1: 1.0, 100: 3.0}, 1000)
    (2.0, 3.0)
    """
    known = sorted(table)
    if rows <= known[0] or rows >= known[-1]:
        return table[known[0] if rows <= known[0] else known[-1]]
    above = next(i for i, value in enumerate(known) if value >= rows)
    low, high = known[above - 1], known[above]
    part = math.log(rows / low) / math.log(high / low)
    return table[low] + part * (table[high] - table[low])


@cache
def _measured(kind: str, threads: int) -> dict[int, float]:
    path = _path(threads)
    rates = _load(path)
    if kind not in rates:
        family, _, variant = kind.split("/", 2)
        rates = _load(path) | _measure(family, variant)
        with suppress(IngotError):  # otherwise the next process measures again
            paths.write_atomic(path, msgspec.json.encode(rates))
    return rates[kind]


def _path(threads: int) -> Path:
    return paths.cache("fuse", f"{detect().fingerprint}-{threads}-{_VERSION}.json")


def _load(path: Path) -> Rates:
    try:
        rates = msgspec.json.decode(path.read_bytes(), type=Rates)
    except (OSError, msgspec.MsgspecError):
        return {}
    valid = (value > 0 and math.isfinite(value) for t in rates.values() for value in t.values())
    return rates if all(valid) and all(rates.values()) else {}


def _measure(family: str, variant: str) -> Rates:
    """Time both providers of a kind of call, interleaved."""
    dtype, mode, form = variant.split("/")
    make, sizes, providers = _FAMILIES[family]
    found: Rates = {f"{family}/{provider}/{variant}": {} for provider in providers}
    for rows in sizes:
        calls = [make(provider, getattr(torch, dtype), rows, form) for provider in providers]
        runs = [_runner(call, args, mode == "training") for call, args, _ in calls]
        for provider, (*_, flops), seconds in zip(providers, calls, shortest(runs), strict=True):
            found[f"{family}/{provider}/{variant}"][rows] = flops / seconds
    return found


def _linear_call(
    provider: str, dtype: torch.dtype, rows: int, layout: str
) -> tuple[Callable[..., Tensor], list[Tensor], float]:
    x, weight = torch.randn(rows, _WIDTH).to(dtype), torch.randn(_OUT, _WIDTH).to(dtype)
    flops = 2.0 * rows * _WIDTH * _OUT
    if layout == "contiguous":
        return (ops.linear if provider == "ingot" else F.linear), [x, weight], flops
    weight_t = weight.T.contiguous()
    if provider == "ingot":
        return (lambda x, w: ops.linear(x, w.t())), [x, weight_t], flops
    return torch.mm, [x, weight_t], flops


def _attention_call(
    provider: str, dtype: torch.dtype, length: int, variant: str
) -> tuple[Callable[..., Tensor], list[Tensor], float]:
    causal = variant == "causal"
    flops = 4.0 * _HEADS * length * length * _HEAD_DIM
    packed = [torch.randn(length, _HEADS, _HEAD_DIM).to(dtype) for _ in range(3)]
    if provider == "ingot":
        starts = torch.tensor([0, length], dtype=torch.int32)
        return (lambda q, k, v: ops.attention(q, k, v, starts, None, None, causal)), packed, flops

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return sdpa, [tensor.transpose(0, 1)[None] for tensor in packed], flops


def _conv_call(
    provider: str, dtype: torch.dtype, rows: int, layout: str
) -> tuple[Callable[..., Tensor], list[Tensor], float]:
    side = math.isqrt(rows)
    x, weight = torch.randn(1, _CHANNELS, side, side), torch.randn(_CHANNELS, _CHANNELS, 3, 3)
    flops = 2.0 * rows * weight.numel()
    return (lambda x, w: F.conv2d(x, w, padding=1)), [x.to(dtype), weight.to(dtype)], flops


_FAMILIES = {
    "linear": (_linear_call, _ROWS, _PROVIDERS),
    "attention": (_attention_call, _LENGTHS, _PROVIDERS),
    "conv": (_conv_call, _POSITIONS, _PROVIDERS[:1]),  # ingot's is `linear`
}


def _runner(
    call: Callable[..., Tensor], args: Sequence[Tensor], training: bool
) -> Callable[[], None]:
    """Return a call without arguments, with its backward pass in training."""
    leaves = [arg.detach().requires_grad_(training) for arg in args]

    def run() -> None:
        with torch.set_grad_enabled(training):
            out = call(*leaves)
            if training:
                torch.autograd.grad(out, leaves, torch.ones_like(out))

    return run


def clock() -> Callable[[], float]:
    """Return a clock in seconds; with one thread its CPU time, without that of other processes."""
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def shortest(runs: Sequence[Callable[[], object]]) -> list[float]:
    """Return the shortest of several times of each call, timed in turn."""
    now = clock()
    times: list[list[float]] = [[] for _ in runs]
    for run in runs:
        run()
    start = now()
    while len(times[0]) < 5 or now() - start < _SECONDS:
        for run, seconds in zip(runs, times, strict=True):
            before = now()
            run()
            seconds.append(now() - before)
    return [min(seconds) for seconds in times]
