"""Rotary position embedding (Su et al. 2021): rotate pairs of channels by position.

Channels (a, b) of pair i at position p become

    a' = a cos(p f_i) - b sin(p f_i)
    b' = a sin(p f_i) + b cos(p f_i)

so that the dot product of a query and a key depends on the distance between them. Which
channels make a pair is a convention of the weights: `rope` pairs i with i + F (Llama as
Hugging Face stores it, GPT-NeoX), with `interleaved` 2i with 2i + 1 (GPT-J, Meta's Llama).
With F frequencies the first 2F channels turn and the rest pass through (partial rotary).

The frequencies are data, made once by `rope_frequencies`. Models that stretch their context
change only them, and some scale the rotated result; each scaling is a class here.

Legend: T tokens, N heads, H channels of a head, F frequencies.
"""

# pyright: basic
from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ingot.core.errors import OpError
from ingot.ops.check import integral, same_dtype
from ingot.ops.inputs import Make, Sample
from ingot.ops.op import Cost, Tolerance, like, op, wide


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Positions divided by `factor` (Chen et al. 2023)."""

    factor: float


@dataclass(frozen=True, kw_only=True)
class NtkScaling:
    """The base raised so that the slowest pair is stretched by `factor` and the fastest not
    (bloc97 2023), at a fixed factor: one that grew with the sequence would change what
    earlier tokens computed."""

    factor: float


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Slow pairs divided by `factor`, fast ones left, a ramp in between (Llama 3.1)."""

    factor: float
    low: float
    high: float
    context: int


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """As Llama 3 with the ramp over pairs instead of wavelengths, and the result scaled
    (Peng et al. 2023)."""

    factor: float
    context: int
    fast: float = 32.0
    slow: float = 1.0


Scaling = LinearScaling | NtkScaling | Llama3Scaling | YarnScaling


def rope_frequencies(
    width: int, theta: float = 10000.0, scaling: Scaling | None = None
) -> tuple[Tensor, float]:
    """The frequencies for `width` rotated channels, and the scale of the result.

    >>> rope_frequencies(4, theta=100.0)
    (tensor([1.0000, 0.1000]), 1.0)
    """
    if width < 4 or width % 2:
        raise OpError(f"rope cannot turn {width} channels", remedy="give an even number, 4 or more")
    plain = _plain(width, theta)
    match scaling:
        case None:
            scaled, scale = plain, 1.0
        case LinearScaling():
            scaled, scale = plain / scaling.factor, 1.0
        case NtkScaling():
            scaled, scale = _plain(width, theta * scaling.factor ** (width / (width - 2))), 1.0
        case Llama3Scaling():
            scaled, scale = _llama3(plain, scaling), 1.0
        case YarnScaling():
            scaled = _yarn(plain, theta, scaling)
            scale = 0.1 * math.log(max(scaling.factor, 1.0)) + 1.0
    return scaled.float(), scale


def _plain(width: int, theta: float) -> Tensor:
    return theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)


def _llama3(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    turns = scaling.context * plain / (2 * math.pi)
    keep = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
    return keep * plain + (1 - keep) * plain / scaling.factor


def _yarn(plain: Tensor, theta: float, scaling: YarnScaling) -> Tensor:
    width = 2 * len(plain)

    def pair_that_turns(times: float) -> float:
        return width * math.log(scaling.context / (times * 2 * math.pi)) / (2 * math.log(theta))

    first = max(math.floor(pair_that_turns(scaling.fast)), 0)
    last = min(math.ceil(pair_that_turns(scaling.slow)), width - 1)
    pairs = torch.arange(len(plain), dtype=torch.float64)
    stretch = ((pairs - first) / max(last - first, 0.001)).clamp(0, 1)
    return (1 - stretch) * plain + stretch * plain / scaling.factor


def _samples(make: Make) -> Iterator[Sample]:
    def turned(width: int) -> Tensor:
        return rope_frequencies(width)[0].to(make.device)

    yield Sample("typical", (make(6, 4, 16), make.ints(100, 6), turned(16), False, 1.0))
    yield Sample("large", (make(67, 5, 66), make.ints(4096, 67), turned(66), False, 1.0))
    yield Sample("int32", (make(4, 2, 8), make.ints(9, 4, dtype=torch.int32), turned(8)))
    yield Sample("odd", (make(5, 3, 14), make.ints(7, 5), turned(14), False, 1.0))
    yield Sample("one_row", (make(1, 2, 8), make.tensor([4095]), turned(8), False, 1.0))
    yield Sample("strided", (make(5, 4, 48)[..., ::3], make.ints(9, 5), turned(16), False, 1.0))
    yield Sample("extreme", (make.spread(4, 2, 8), make.tensor([0, 1, 131071, 7]), turned(8)))
    yield Sample("partial", (make(5, 2, 20), make.ints(50, 5), turned(8), False, 1.0))
    yield Sample("interleaved", (make(5, 2, 16), make.ints(50, 5), turned(16), True, 1.0))
    yield Sample("interleaved_partial", (make(3, 2, 11), make.ints(50, 3), turned(6), True, 1.2))


def _check(x: Tensor, positions: Tensor, freqs: Tensor, interleaved: bool, scale: float) -> None:
    same_dtype("rope", x=x)
    if x.dim() != 3:
        raise OpError(f"rope: x is {tuple(x.shape)}", remedy="give (tokens, heads, channels)")
    if positions.shape != x.shape[:1] or not integral(positions):
        raise OpError(
            f"rope: {x.shape[0]} tokens, but positions {positions.dtype} {tuple(positions.shape)}",
            remedy="give one integer for each token",
        )
    same_dtype("rope", freqs=freqs)
    if freqs.dtype != wide(freqs.dtype):
        raise OpError(
            f"rope: frequencies are {freqs.dtype}, too coarse for a position of hundreds",
            remedy="keep them in float32, out of the reach of `module.to(torch.bfloat16)`",
        )
    if not (freqs.dim() == 1 and 2 * freqs.shape[0] <= x.shape[-1]):
        raise OpError(
            f"rope: {tuple(freqs.shape)} frequencies for {x.shape[-1]} channels",
            remedy="give one frequency for each pair of channels that turns",
        )


def _cost(
    x: Tensor,
    positions: Tensor,
    freqs: Tensor,
    interleaved: bool = False,
    scale: float = 1.0,
) -> Cost:
    turned = x[..., 0].numel() * 2 * freqs.numel()
    return Cost(bytes=2 * x.nbytes + positions.nbytes + freqs.nbytes, flops=3 * turned)


@op(
    check=_check,
    fake=like,
    samples=_samples,
    tolerance=Tolerance(),
    cost=_cost,
    rows=("x", "positions"),
)
def rope(
    x: Tensor, positions: Tensor, freqs: Tensor, interleaved: bool = False, scale: float = 1.0
) -> Tensor:
    """Turn `x` (T, N, H) by its tokens' positions (T) at the given frequencies (F).

    >>> freqs, scale = rope_frequencies(4)
    >>> rope(torch.tensor([[[1.0, 1.0, 0.0, 0.0]]]), torch.tensor([1]), freqs, scale=scale)
    tensor([[[0.5403, 0.9999, 0.8415, 0.0100]]])
    """
    turned = 2 * freqs.numel()
    angles_TF = positions[:, None].to(freqs.dtype) * freqs
    cos_T1F = (angles_TF.cos() * scale).to(x.dtype)[:, None]
    sin_T1F = (angles_TF.sin() * scale).to(x.dtype)[:, None]
    pairs = x[..., :turned].unflatten(-1, (-1, 2) if interleaved else (2, -1))
    a_TNF, b_TNF = pairs.unbind(-1 if interleaved else -2)
    rotated = torch.stack(
        (a_TNF * cos_T1F - b_TNF * sin_T1F, a_TNF * sin_T1F + b_TNF * cos_T1F),
        dim=-1 if interleaved else -2,
    )
    return torch.cat((rotated.flatten(-2), x[..., turned:]), dim=-1)
