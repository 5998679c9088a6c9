"""Rotary position embedding (Su et al. 2021): rotate pairs of channels by position.

Channels (a, b) of pair i at position p become

    a' = a cos(p f_i) - b sin(p f_i)
    b' = a sin(p f_i) + b cos(p f_i)

so that the dot product of a query and a key depends on the distance between them. Which
channels make a pair is a convention of the weights: `rope` pairs i with i + F (Llama as
Hugging Face stores it, GPT-NeoX), with `interleaved` 2i with 2i + 1 (GPT-J, Meta's Llama).
With F frequencies, the first 2F channels are rotated and the rest is copied (partial rotary).

The frequencies are an input, computed once by `rope_frequencies`. Methods that extend the context
of a model change the frequencies, and some scale the rotated result; each is a class here.

In serving, keys and values are stored in a KV cache of blocks. `rope_and_cache` rotates queries and
keys and writes keys and values to the cache in one pass. The cached keys are bitwise equal to the
result of `rope`; a cache in int8, (B, S, G, H + 4), gets their `ingot.ops.codec.quantize_kv`.

Legend: T tokens, N heads, G key-value heads, H channels of a head, F frequencies, B blocks of S
slots.
"""

# pyright: basic
from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ingot.core.errors import OpError
from ingot.ops.arguments import accum_dtype, fake_like
from ingot.ops.check import check_keys_values, check_same_dtype, check_same_shape, is_integral
from ingot.ops.codec import KV_SCALE_BYTES, dequantize_kv, quantize_kv
from ingot.ops.gradient import Backward, differentiate
from ingot.ops.inputs import SampleInput, TensorMaker
from ingot.ops.op import op
from ingot.ops.record import Cost, Tolerance


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Divide positions by `factor` (Chen et al. 2023)."""

    factor: float
    """Factor by which positions are divided."""


@dataclass(frozen=True, kw_only=True)
class NtkScaling:
    """Increase the base so that the lowest frequency is divided by `factor` and the highest is
    unchanged (bloc97 2023).

    The factor is fixed: if it grew with the sequence, cached keys would become invalid.
    """

    factor: float
    """Factor by which the lowest frequency is divided."""


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Divide low frequencies by `factor`, keep high ones, interpolate in between (Llama 3.1)."""

    factor: float
    """Factor by which the low frequencies are divided."""
    low_freq_factor: float
    """Frequencies with fewer rotations than this over the original context are scaled fully."""
    high_freq_factor: float
    """Frequencies with more rotations than this over the original context are unchanged."""
    original_max_position_embeddings: int
    """Context length that the model was trained with before the extension."""


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """Scale like Llama 3, but interpolate over pairs instead of wavelengths, and scale the result
    (Peng et al. 2023)."""

    factor: float
    """Factor by which the low frequencies are divided."""
    original_max_position_embeddings: int
    """Context length that the model was trained with before the extension."""
    beta_fast: float = 32.0
    """Frequencies with more rotations than this over the original context are unchanged."""
    beta_slow: float = 1.0
    """Frequencies with fewer rotations than this over the original context are scaled fully."""


RopeScaling = LinearScaling | NtkScaling | Llama3Scaling | YarnScaling


def rope_frequencies(
    width: int, theta: float = 10000.0, scaling: RopeScaling | None = None
) -> tuple[Tensor, float]:
    """Return the frequencies for `width` rotated channels, and the scale of the result.

    >>> rope_frequencies(4, theta=100.0)
    (tensor([1.0000, 0.1000]), 1.0)
    """
    if width < 4 or width % 2:
        raise OpError(
            f"rope: cannot rotate {width} channels", hint="pass an even number, 4 or more"
        )
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
    turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)
    keep = (
        (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    ).clamp(0, 1)
    return keep * plain + (1 - keep) * plain / scaling.factor


def _yarn(plain: Tensor, theta: float, scaling: YarnScaling) -> Tensor:
    width = 2 * len(plain)

    def pair_with_rotations(times: float) -> float:
        return (
            width
            * math.log(scaling.original_max_position_embeddings / (times * 2 * math.pi))
            / (2 * math.log(theta))
        )

    first = max(math.floor(pair_with_rotations(scaling.beta_fast)), 0)
    last = min(math.ceil(pair_with_rotations(scaling.beta_slow)), width - 1)
    pairs = torch.arange(len(plain), dtype=torch.float64)
    stretch = ((pairs - first) / max(last - first, 0.001)).clamp(0, 1)
    return (1 - stretch) * plain + stretch * plain / scaling.factor


def _samples(make: TensorMaker) -> Iterator[SampleInput]:
    def frequencies(width: int) -> Tensor:
        return rope_frequencies(width)[0].to(make.device)

    yield SampleInput("typical", (make(6, 4, 16), make.ints(100, 6), frequencies(16), False, 1.0))
    yield SampleInput("large", (make(67, 5, 66), make.ints(4096, 67), frequencies(66), False, 1.0))
    yield SampleInput("int32", (make(4, 2, 8), make.ints(9, 4, dtype=torch.int32), frequencies(8)))
    yield SampleInput("odd", (make(5, 3, 14), make.ints(7, 5), frequencies(14), False, 1.0))
    yield SampleInput("one_row", (make(1, 2, 8), make.tensor([4095]), frequencies(8), False, 1.0))
    yield SampleInput(
        "strided", (make(5, 4, 48)[..., ::3], make.ints(9, 5), frequencies(16), False, 1.0)
    )
    yield SampleInput(
        "extreme", (make.spread(4, 2, 8), make.tensor([0, 1, 131071, 7]), frequencies(8))
    )
    yield SampleInput("partial", (make(5, 2, 20), make.ints(50, 5), frequencies(8), False, 1.0))
    yield SampleInput("interleaved", (make(5, 2, 16), make.ints(50, 5), frequencies(16), True, 1.0))
    yield SampleInput("no_rotation", (make(3, 2, 7), make.ints(50, 3), make.floats([])))
    yield SampleInput(
        "interleaved_partial", (make(3, 2, 11), make.ints(50, 3), frequencies(6), True, 1.2)
    )


def _check(x: Tensor, positions: Tensor, freqs: Tensor, interleaved: bool, scale: float) -> None:
    check_same_dtype("rope", x=x)
    if x.dim() != 3:
        raise OpError(f"rope: x is {tuple(x.shape)}", hint="pass (tokens, heads, channels)")
    if positions.shape != x.shape[:1] or not is_integral(positions):
        raise OpError(
            f"rope: {x.shape[0]} tokens, but positions {positions.dtype} {tuple(positions.shape)}",
            hint="pass one integer for each token",
        )
    check_same_dtype("rope", freqs=freqs)
    if freqs.dtype != accum_dtype(freqs.dtype):
        raise OpError(
            f"rope: frequencies are {freqs.dtype}, too coarse for positions above 100",
            hint="keep them in float32, also in `module.to(torch.bfloat16)`",
        )
    if not (freqs.dim() == 1 and 2 * freqs.shape[0] <= x.shape[-1]):
        raise OpError(
            f"rope: {tuple(freqs.shape)} frequencies for {x.shape[-1]} channels",
            hint="pass one frequency per rotated pair of channels",
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


def _by_rotation(forward: Callable[..., Tensor]) -> Backward:
    """Return the backward: the rotation by the negated angles.

    Autograd through the reference took 10 ms instead of 0.5 for 512 tokens of SmolLM2 on one core,
    5 % of a training step.
    """
    derived = differentiate(forward)

    def backward(
        needs: list[bool],
        grads: list[Tensor],
        x: Tensor,
        positions: Tensor,
        freqs: Tensor,
        interleaved: bool = False,
        scale: float = 1.0,
    ) -> list[Tensor | None]:
        args = x, positions, freqs, interleaved, scale
        gradients: list[Tensor | None] = [None] * len(args)
        if needs[0]:
            gradients[0] = rope.overload(grads[0], positions, -freqs, interleaved, scale)
        if needs[2]:  # rare: frequencies are usually not trained
            gradients[2] = derived([False, False, True, False, False], grads, *args)[2]
        return gradients

    return backward


@op(
    check=_check,
    fake=fake_like,
    samples=_samples,
    tolerance=Tolerance(),
    cost=_cost,
    row_args=("x", "positions"),
    gradient=_by_rotation,
)
def rope(
    x: Tensor, positions: Tensor, freqs: Tensor, interleaved: bool = False, scale: float = 1.0
) -> Tensor:
    """Rotate `x` (T, N, H) by its tokens' positions (T) at the frequencies `freqs` (F).

    >>> freqs, scale = rope_frequencies(4)
    >>> rope(torch.tensor([[[1.0, 1.0, 0.0, 0.0]]]), torch.tensor([1]), freqs, scale=scale)
    tensor([[[0.5403, 0.9999, 0.8415, 0.0100]]])
    """
    turned = 2 * freqs.numel()
    if turned == 0:
        return x.clone()
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


def _write_samples(make: TensorMaker) -> Iterator[SampleInput]:
    def sample(
        name: str, t: int, n: int, g: int, h: int, turned: int, block_size: int, *rest: object
    ) -> SampleInput:
        freqs = rope_frequencies(turned)[0].to(make.device) if turned else make.floats([])
        num_blocks = -(-t // block_size) + 2
        q, k, v = make(t, n + 2 * g, h).split([n, g, g], dim=1)
        caches = [make(num_blocks, block_size, g, h) for _ in range(2)]
        slot_mapping = make.tensor(list(range(num_blocks * block_size))[::-1][:t])
        return SampleInput(name, (q, k, v, make.ints(100, t), freqs, *caches, slot_mapping, *rest))

    yield sample("typical", 6, 4, 2, 16, 16, 4, False, 1.0)
    yield sample("large", 67, 5, 5, 66, 66, 16, False, 1.0)
    yield sample("odd", 5, 3, 1, 14, 14, 3, False, 1.0)
    yield sample("one_row", 1, 2, 1, 8, 8, 1, False, 1.0)
    yield sample("interleaved", 5, 2, 2, 12, 8, 4, True, 1.2)
    yield sample("no_rotation", 3, 2, 2, 7, 0, 2)
    for name, shape in (("int8", (6, 4, 2, 16, 16, 4)), ("int8_no_rotation", (5, 2, 3, 21, 0, 2))):
        *args, k_cache, v_cache, slot_mapping = sample(name, *shape).args
        yield SampleInput(name, (*args, quantize_kv(k_cache), quantize_kv(v_cache), slot_mapping))
    freqs = rope_frequencies(8)[0].to(make.device)
    q, k, v = make(5, 4, 24)[..., ::3], make(5, 2, 16)[..., ::2], make(2, 5, 8).transpose(0, 1)
    caches = make(3, 2, 4, 8).transpose(1, 2), make(3, 4, 2, 16)[..., 3:11]
    slot_mapping = make.tensor([11, 0, 4, 5, 1], torch.int32)
    yield SampleInput("strided", (q, k, v, make.ints(9, 5), freqs, *caches, slot_mapping))
    q, k, v = make.spread(4, 2, 8), make.spread(4, 2, 8), make.spread(4, 2, 8)
    caches, slot_mapping = (make(1, 4, 2, 8), make(1, 4, 2, 8)), make.tensor([3, 2, 1, 0])
    yield SampleInput(
        "extreme", (q, k, v, make.tensor([0, 1, 131071, 7]), freqs, *caches, slot_mapping)
    )


def _write_check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    freqs: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    interleaved: bool,
    scale: float,
) -> None:
    _check(q, positions, freqs, interleaved, scale)
    check_same_dtype("rope_and_cache", q=q, k=k, v=v)
    check_same_shape("rope_and_cache", k=k, v=v)
    check_keys_values("rope_and_cache", q, k_cache, v_cache, paged=True)
    if k.dim() != 3 or (k.shape[0], k.shape[2]) != (q.shape[0], q.shape[2]):
        raise OpError(
            f"rope_and_cache: q is {tuple(q.shape)}, k {tuple(k.shape)}",
            hint="pass (tokens, heads, channels) with the same tokens and channels for both",
        )
    width = k.shape[2] + (KV_SCALE_BYTES if k_cache.dtype == torch.int8 else 0)
    fits = k_cache.dim() == 4 and k_cache.shape[2:] == (k.shape[1], width)
    if not fits or k_cache.stride(3) != 1 or v_cache.stride(3) != 1:
        raise OpError(
            f"rope_and_cache: k is {tuple(k.shape)}, k_cache {tuple(k_cache.shape)}",
            hint="pass caches of (blocks, block size, key-value heads, channels), "
            "contiguous in the channels",
        )
    if slot_mapping.shape != positions.shape or not is_integral(slot_mapping):
        raise OpError(
            f"rope_and_cache: {q.shape[0]} tokens, but slot_mapping is {slot_mapping.dtype} "
            f"{tuple(slot_mapping.shape)}",
            hint="pass one integer per token: block * block size + offset in the block",
        )


def _write_cost(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    freqs: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    interleaved: bool = False,
    scale: float = 1.0,
) -> Cost:
    turned = (q[..., 0].numel() + k[..., 0].numel()) * 2 * freqs.numel()
    moved = 2 * (q.nbytes + k.nbytes + v.nbytes)
    return Cost(
        bytes=moved + positions.nbytes + slot_mapping.nbytes + freqs.nbytes, flops=3 * turned
    )


def _decode_caches(*args: Any) -> tuple[Tensor, ...]:
    q, caches = args[0], args[5:7]
    return tuple(dequantize_kv(c, q.dtype) if c.dtype == torch.int8 else c for c in caches)


@op(
    check=_write_check,
    fake=fake_like,
    samples=_write_samples,
    tolerance=Tolerance(),
    cost=_write_cost,
    row_args=(),
    mutates=("k_cache", "v_cache"),
    decode_outputs=_decode_caches,
)
def rope_and_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    freqs: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    interleaved: bool = False,
    scale: float = 1.0,
) -> Tensor:
    """Rotate `q` (T, N, H) and `k` (T, G, H), write `k` and `v` to the slots `slot_mapping` (T) of
    their caches (B, S, G, H), or (B, S, G, H + 4) in int8, and return the rotated `q`.

    >>> freqs, _ = rope_frequencies(4)
    >>> q = k = v = torch.ones(1, 1, 4)
    >>> k_cache, v_cache = torch.zeros(2, 2, 1, 4), torch.zeros(2, 2, 1, 4)
    >>> slot_mapping = torch.tensor([3])
    >>> rope_and_cache(q, k, v, torch.tensor([0]), freqs, k_cache, v_cache, slot_mapping).shape
    torch.Size([1, 1, 4])
    >>> k_cache[1, 1]
    tensor([[1., 1., 1., 1.]])
    """
    num_blocks, block_size = k_cache.shape[:2]
    num_slots = num_blocks * block_size
    if len(slot_mapping):
        first, last = int(slot_mapping.min()), int(slot_mapping.max())
        if first < 0 or last >= num_slots:
            raise OpError(
                f"rope_and_cache: slot_mapping has slots from {first} to {last}",
                hint=f"pass slots of the cache: 0 to {num_slots - 1}",
            )
    slots = (slot_mapping // block_size).long(), (slot_mapping % block_size).long()
    rotated_k = rope.reference(k, positions, freqs, interleaved, scale)
    int8 = k_cache.dtype == torch.int8
    k_cache[slots] = quantize_kv(rotated_k) if int8 else rotated_k
    v_cache[slots] = quantize_kv(v) if int8 else v
    return rope.reference(q, positions, freqs, interleaved, scale)
