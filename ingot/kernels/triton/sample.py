"""`sample` on GPUs: from logits to the next token, without sorting them.

What top-k and top-p keep is all above some value, and of those that have it the first few. That
value is found by bisection over the bits of float32: 31 times, the entries above the middle are
counted (top-k) or their probabilities added up (top-p). That reads a row 31 times, from L2, where a
sort would move it as often; rows that cut nothing skip it. Then the row is read in order, once for
the sum of what is left and once for the result.

A score is never above 0, the largest being subtracted first. So with the sign off, the bits of a
score are an integer that grows as the score falls: its `depth`.
"""

# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ingot import ops
from ingot.kernels.triton.kernel import Config, by_elements, kernel
from ingot.kernels.triton.provider import Meta, as_rows, provide
from ingot.kernels.triton.target import Target
from ingot.ops.gradient import differentiate

_WIDEST = 4096


def _space(target: Target, WIDTH: int, **_: object) -> Iterator[Config]:
    # What the prompt held is a byte each: 8 elements a thread were 64 bits at a time.
    yield from by_elements(target, WIDTH, least=16)


def _sample_space(target: Target, DRAW: bool, WIDTH: int, **_: object) -> Iterator[Config]:
    """8 or 16 elements a thread: more spill. On sm_80 one of the two spills, drawing or not."""
    spilling = (8 if DRAW else 16) if target.arch == 80 else 0
    found = False
    for config in by_elements(target, WIDTH):
        share = WIDTH // (config.warps * target.lanes)
        if share <= 16 and share != spilling:
            found = True
            yield config
    if not found:
        yield Config.of(1)


def _small_space(target: Target, **_: object) -> Iterator[Config]:
    yield Config.of(4)


@kernel(space=_space, bound="bandwidth", scalars=3)
@triton.jit
def _apply_penalties(
    logits, prompt, counts, repetition, presence, frequency, y, width,
    logits_row, prompt_row, counts_row, WIDTH: tl.constexpr,
):  # fmt: skip
    """Lower a piece of a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < width
    z = tl.load(logits + row * logits_row + column, inside, other=0.0).to(tl.float32)
    asked = tl.load(prompt + row * prompt_row + column, inside, other=0) != 0
    count = tl.load(counts + row * counts_row + column, inside, other=0)
    factor = tl.load(repetition + row).to(tl.float32)
    repeated = tl.where(z > 0, z / factor, z * factor)
    z = tl.where(asked | (count > 0), repeated, z)
    once = tl.where(count > 0, tl.load(presence + row).to(tl.float32), 0.0)
    often = tl.load(frequency + row).to(tl.float32) * count.to(tl.float32)
    tl.store(y + row * width + column, (z - (once + often)).to(y.dtype.element_ty), inside)


@triton.jit
def _draw(seed, position):
    """A random number in [0, 1) from Philox, 24 bits."""
    zero = position.to(tl.int32) * 0
    high = (position >> 32).to(tl.int32)
    word, _, _, _ = tl.philox(seed, position.to(tl.int32), high, zero, zero, 10)
    return (word.to(tl.uint32, bitcast=True) >> 8).to(tl.int32).to(
        tl.float32
    ) * 5.9604644775390625e-08


@kernel(space=_small_space, bound="latency")
@triton.jit
def _philox_uniform(seeds, positions, y, size, TILE: tl.constexpr):
    """Some random numbers."""
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = at < size
    seed = tl.load(seeds + at, inside, other=0).to(tl.int64)
    position = tl.load(positions + at, inside, other=0).to(tl.int64)
    tl.store(y + at, _draw(seed, position), inside)


@triton.jit
def _largest(logits, width, WIDTH: tl.constexpr):
    found = float("-inf")
    for first in range(0, width, WIDTH):
        column = first + tl.arange(0, WIDTH)
        z = tl.load(logits + column, column < width, other=float("-inf")).to(tl.float32)
        found = tl.maximum(found, tl.max(z, 0))
    return found


@triton.jit
def _scores(logits, column, width, highest, temperature):
    """Scores below 0, and their depths; beyond the row's end deeper than any."""
    inside = column < width
    z = tl.load(logits + column, inside, other=float("-inf")).to(tl.float32)
    score = (z - highest) / temperature
    depth = score.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return score, tl.where(inside, depth, 0x7FFFFFFF)


@triton.jit
def _above(logits, width, highest, temperature, limit, WIDTH: tl.constexpr):
    """How many scores are less deep than the limit, and the sum of their exponentials."""
    number = 0
    mass = 0.0
    for first in range(0, width, WIDTH):
        column = first + tl.arange(0, WIDTH)
        score, depth = _scores(logits, column, width, highest, temperature)
        counted = depth < limit
        number += tl.sum(counted.to(tl.int32), 0)
        mass += tl.sum(tl.where(counted, tl.exp(score), 0.0), 0)
    return number, mass


@triton.jit
def _exponential(depth):
    """Of the score that has this depth."""
    return tl.exp(-(depth.to(tl.float32, bitcast=True)))


@triton.jit
def _cut(logits, width, highest, temperature, top_k, top_p, WIDTH: tl.constexpr):
    """The depth of the deepest score that is kept, and how many that have it are."""
    cut = top_k * 0 + 0x7F800000
    ties = width
    mass = 0.0
    if top_k < width:
        low = top_k * 0
        high = top_k * 0 + 0x7F800000
        while low < high:  # the least depth that leaves k
            middle = low + (high - low) // 2
            number, _ = _above(logits, width, highest, temperature, middle + 1, WIDTH)
            if number >= top_k:
                high = middle
            else:
                low = middle + 1
        cut = low
        number, mass = _above(logits, width, highest, temperature, cut, WIDTH)
        ties = top_k - number
        mass += ties * _exponential(cut)
    elif top_p < 1:
        _, mass = _above(logits, width, highest, temperature, 0x7FFFFFFF, WIDTH)
    if top_p < 1:
        wanted = top_p * mass
        low = cut * 0
        high = cut
        while low < high:  # the greatest depth above which there is less than wanted
            middle = low + (high - low + 1) // 2
            _, found = _above(logits, width, highest, temperature, middle, WIDTH)
            if found < wanted:
                low = middle
            else:
                high = middle - 1
        _, found = _above(logits, width, highest, temperature, low, WIDTH)
        each = _exponential(low)
        more = tl.ceil((wanted - found) / tl.maximum(each, 1e-38))
        more = tl.maximum(tl.minimum(more, 2.0e9).to(tl.int32), 1)
        ties = tl.where(low < cut, more, tl.minimum(ties, more))
        cut = low
    return cut, ties


@triton.jit
def _kept(score, depth, cut, ties, seen, min_p):
    """Which are kept; `seen` is how many at the cut came before."""
    at_cut = (depth == cut).to(tl.int32)
    rank = seen + tl.cumsum(at_cut, 0) - at_cut
    kept = (depth < cut) | ((at_cut == 1) & (rank < ties))
    return kept & ((tl.exp(score) >= min_p) | (depth == 0)), seen + tl.sum(at_cut, 0)


@kernel(space=_sample_space, bound="latency", scalars=6)
@triton.jit
def _sample(
    logits, temperatures, top_ks, top_ps, min_ps, seeds, positions, y, width, logits_row,
    DRAW: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Draw from a row, or give the log-probabilities that would be drawn from."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_row
    temperature = tl.load(temperatures + row).to(tl.float32)
    top_k = tl.load(top_ks + row)
    top_k = tl.where(temperature > 0, tl.maximum(tl.minimum(top_k, width), 1), 1).to(tl.int32)
    top_p = tl.where(temperature > 0, tl.load(top_ps + row).to(tl.float32), 1.0)
    min_p = tl.load(min_ps + row).to(tl.float32)
    temperature = tl.where(temperature > 0, temperature, 1.0)
    highest = _largest(logits, width, WIDTH)
    cut, ties = _cut(logits, width, highest, temperature, top_k, top_p, WIDTH)
    mass = 0.0
    seen = cut * 0
    last = cut * 0
    for first in range(0, width, WIDTH):
        column = first + tl.arange(0, WIDTH)
        score, depth = _scores(logits, column, width, highest, temperature)
        kept, seen = _kept(score, depth, cut, ties, seen, min_p)
        mass += tl.sum(tl.where(kept, tl.exp(score), 0.0), 0)
        last = tl.maximum(last, tl.max(tl.where(kept, column, 0), 0))
    seen = cut * 0
    if DRAW:
        seed = tl.load(seeds + row).to(tl.int64)
        position = tl.load(positions + row).to(tl.int64)
        threshold = _draw(seed, position) * mass
        before = 0.0
        drawn = cut * 0 + width
        for first in range(0, width, WIDTH):
            column = first + tl.arange(0, WIDTH)
            score, depth = _scores(logits, column, width, highest, temperature)
            kept, seen = _kept(score, depth, cut, ties, seen, min_p)
            p = tl.where(kept, tl.exp(score), 0.0)
            reached = kept & (before + tl.cumsum(p, 0) > threshold)
            drawn = tl.minimum(drawn, tl.min(tl.where(reached, column, width), 0))
            before += tl.sum(p, 0)
        tl.store(y + row, tl.where(drawn < width, drawn, last).to(tl.int64))
    else:
        for first in range(0, width, WIDTH):
            column = first + tl.arange(0, WIDTH)
            score, depth = _scores(logits, column, width, highest, temperature)
            kept, seen = _kept(score, depth, cut, ties, seen, min_p)
            values = tl.where(kept, score - tl.log(mass), float("-inf"))
            tl.store(y + row * width + column, values, column < width)


def apply_penalties(
    logits: Tensor,
    prompt: Tensor,
    counts: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """One kernel."""
    y = logits.new_empty(logits.shape)
    logits, prompt, counts = as_rows(logits), as_rows(prompt), as_rows(counts)
    width = logits.shape[1]
    tile = min(_WIDEST, triton.next_power_of_2(width))
    _apply_penalties.launch(
        (len(logits), triton.cdiv(width, tile)),
        *(logits, prompt, counts),
        *(option.contiguous() for option in (repetition, presence, frequency)),
        *(y, width, logits.stride(0), prompt.stride(0), counts.stride(0)),
        WIDTH=tile,
    )
    return y


def philox_uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """One kernel."""
    y = seeds.new_empty(seeds.shape, dtype=torch.float32)
    tile = 512
    _philox_uniform.launch(
        (triton.cdiv(seeds.numel(), tile),),
        *(seeds.contiguous(), positions.contiguous(), y, seeds.numel()),
        TILE=tile,
    )
    return y


def _launch(y: Tensor, logits: Tensor, *options: Tensor | None) -> Tensor:
    rows = as_rows(logits)
    given = [option if option is None else option.contiguous() for option in options]
    _sample.launch(
        (len(rows),),
        *(rows, *given, y, rows.shape[1], rows.stride(0)),
        DRAW=options[-1] is not None,
        WIDTH=min(_WIDEST, triton.next_power_of_2(rows.shape[1])),
    )
    return y


def sampling_logprobs(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """One kernel."""
    y = logits.new_empty(logits.shape, dtype=torch.float32)
    return _launch(y, logits, temperature, top_k, top_p, min_p, None, None)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """One kernel."""
    y = logits.new_empty(logits.shape[:1], dtype=torch.int64)
    return _launch(y, logits, temperature, top_k, top_p, min_p, seeds, positions)


def _fits(x: Tensor, *_: object) -> bool:
    return x.numel() > 0


def _penalties_example(make: Meta) -> tuple[Any, ...]:
    logits = make(256, 131072)
    seen, counts = make.ints(256, 131072).bool(), make.ints(256, 131072, dtype=torch.int32)
    option = make(256, dtype=torch.float32).sigmoid()
    return logits, seen, counts, option, option, option


def _logprobs_example(make: Meta) -> tuple[Any, ...]:
    option, top_k = make(256, dtype=torch.float32).sigmoid(), make.ints(256, below=50) + 1
    return make(256, 131072), option, top_k, option, option


def _sample_example(make: Meta) -> tuple[Any, ...]:
    return *_logprobs_example(make), make.ints(256), make.ints(256)


provide(
    ops.apply_penalties,
    apply_penalties,
    example=_penalties_example,
    supports=_fits,
    backward=differentiate(ops.apply_penalties.fallback),
)
provide(
    ops.philox_uniform,
    philox_uniform,
    example=lambda make: (make.ints(256), make.ints(256)),
    supports=_fits,
)
provide(ops.sampling_logprobs, sampling_logprobs, example=_logprobs_example, supports=_fits)
provide(ops.sample, sample, example=_sample_example, supports=_fits)
