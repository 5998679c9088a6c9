"""`sample` on GPUs: from logits to the next token, without sorting.

Top-k and top-p keep all scores above a cutoff, and the first few of those equal to it. The cutoff
is found by bisection over the bits of float32: 31 times, the scores above the middle are counted
(top-k) or their probabilities summed (top-p). This reads a row 31 times from L2, where a sort would
move it as often; rows without a cutoff skip it. Then the row is read in order, once for the sum of
the remaining probabilities and once for the result.

A score is at most 0, because the row's maximum is subtracted first. So without the sign bit, the
bits of a score are an integer that grows as the score falls: its `depth`.
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
from ingot.kernels.triton.kernel import elementwise_space, kernel
from ingot.kernels.triton.launch import KernelConfig
from ingot.kernels.triton.provider import ExampleInputs, as_rows, provide
from ingot.kernels.triton.target import TargetSpec
from ingot.ops.gradient import differentiate

_MAX_BLOCK_V = 4096


def _space(target: TargetSpec, BLOCK_V: int, **_: object) -> Iterator[KernelConfig]:
    # The prompt mask has one byte per token: 8 elements per thread would be 64-bit loads.
    yield from elementwise_space(target, BLOCK_V, min_per_thread=16)


def _sample_space(
    target: TargetSpec, SAMPLE: bool, BLOCK_V: int, **_: object
) -> Iterator[KernelConfig]:
    """Yield 8 and 16 elements per thread: more spill. On sm_80 one of the two spills as well."""
    spilling_per_thread = (8 if SAMPLE else 16) if target.arch == 80 else 0
    yielded = False
    for config in elementwise_space(target, BLOCK_V):
        per_thread = BLOCK_V // (config.num_warps * target.warp_size)
        if per_thread <= 16 and per_thread != spilling_per_thread:
            yielded = True
            yield config
    if not yielded:
        yield KernelConfig.of(1)


def _single_config(target: TargetSpec, **_: object) -> Iterator[KernelConfig]:
    yield KernelConfig.of(4)


@kernel(space=_space, bound_by="bandwidth", scalar_loads=3)
@triton.jit
def _apply_penalties(
    logits, prompt, counts, repetition, presence, frequency, y, vocab_size,
    stride_lm, stride_pm, stride_cm, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Apply the penalties to a block of a row."""
    row = tl.program_id(0).to(tl.int64)
    offs_v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask = offs_v < vocab_size
    z = tl.load(logits + row * stride_lm + offs_v, mask, other=0.0).to(tl.float32)
    in_prompt = tl.load(prompt + row * stride_pm + offs_v, mask, other=0) != 0
    count = tl.load(counts + row * stride_cm + offs_v, mask, other=0)
    factor = tl.load(repetition + row).to(tl.float32)
    penalized = tl.where(z > 0, z / factor, z * factor)
    z = tl.where(in_prompt | (count > 0), penalized, z)
    presence_penalty = tl.where(count > 0, tl.load(presence + row).to(tl.float32), 0.0)
    frequency_penalty = tl.load(frequency + row).to(tl.float32) * count.to(tl.float32)
    z -= presence_penalty + frequency_penalty
    tl.store(y + row * vocab_size + offs_v, z.to(y.dtype.element_ty), mask)


@triton.jit
def philox_uniform_at(seed, position, index):
    """Return a random number in [0, 1) with 24 bits from Philox, for the third word `index`."""
    low, high = position.to(tl.int32), (position >> 32).to(tl.int32)
    word, _, _, _ = tl.philox(seed, low, high, index, low * 0, 10)
    return (word.to(tl.uint32, bitcast=True) >> 8).to(tl.int32).to(
        tl.float32
    ) * 5.9604644775390625e-08


@kernel(space=_single_config, bound_by="latency")
@triton.jit
def _philox_uniform(seeds, positions, y, size, BLOCK: tl.constexpr):
    """Compute a block of random numbers."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < size
    seed = tl.load(seeds + offs, mask, other=0).to(tl.int64)
    position = tl.load(positions + offs, mask, other=0).to(tl.int64)
    tl.store(y + offs, philox_uniform_at(seed, position, position.to(tl.int32) * 0), mask)


@triton.jit
def _row_max(logits, vocab_size, BLOCK_V: tl.constexpr):
    row_max = float("-inf")
    for start_v in range(0, vocab_size, BLOCK_V):
        offs_v = start_v + tl.arange(0, BLOCK_V)
        z = tl.load(logits + offs_v, offs_v < vocab_size, other=float("-inf")).to(tl.float32)
        row_max = tl.maximum(row_max, tl.max(z, 0))
    return row_max


@triton.jit
def _scores(logits, offs_v, vocab_size, row_max, temperature):
    """Return the scores of a block (at most 0) and their depths; maximum depth out of bounds."""
    mask = offs_v < vocab_size
    z = tl.load(logits + offs_v, mask, other=float("-inf")).to(tl.float32)
    score = (z - row_max) / temperature
    depth = score.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return score, tl.where(mask, depth, 0x7FFFFFFF)


@triton.jit
def _count_above(logits, vocab_size, row_max, temperature, limit, BLOCK_V: tl.constexpr):
    """Return how many scores have a depth below the limit, and the sum of their exponentials."""
    count = 0
    mass = 0.0
    for start_v in range(0, vocab_size, BLOCK_V):
        offs_v = start_v + tl.arange(0, BLOCK_V)
        score, depth = _scores(logits, offs_v, vocab_size, row_max, temperature)
        above = depth < limit
        count += tl.sum(above.to(tl.int32), 0)
        mass += tl.sum(tl.where(above, tl.exp(score), 0.0), 0)
    return count, mass


@triton.jit
def _exp_at_depth(depth):
    """Return the exponential of the score with this depth."""
    return tl.exp(-(depth.to(tl.float32, bitcast=True)))


@triton.jit
def _find_cutoff(logits, vocab_size, row_max, temperature, top_k, top_p, BLOCK_V: tl.constexpr):
    """Return the depth of the lowest score that is kept, and how many equal scores are kept."""
    cutoff = top_k * 0 + 0x7F800000
    num_ties = vocab_size
    mass = 0.0
    if top_k < vocab_size:
        low = top_k * 0
        high = top_k * 0 + 0x7F800000
        while low < high:  # find the smallest depth that keeps k scores
            middle = low + (high - low) // 2
            count, _ = _count_above(logits, vocab_size, row_max, temperature, middle + 1, BLOCK_V)
            if count >= top_k:
                high = middle
            else:
                low = middle + 1
        cutoff = low
        count, mass = _count_above(logits, vocab_size, row_max, temperature, cutoff, BLOCK_V)
        num_ties = top_k - count
        mass += num_ties * _exp_at_depth(cutoff)
    elif top_p < 1:
        _, mass = _count_above(logits, vocab_size, row_max, temperature, 0x7FFFFFFF, BLOCK_V)
    if top_p < 1:
        target_mass = top_p * mass
        low = cutoff * 0
        high = cutoff
        while low < high:  # find the largest depth with less than the target mass above it
            middle = low + (high - low + 1) // 2
            _, mass_above = _count_above(logits, vocab_size, row_max, temperature, middle, BLOCK_V)
            if mass_above < target_mass:
                low = middle
            else:
                high = middle - 1
        _, mass_above = _count_above(logits, vocab_size, row_max, temperature, low, BLOCK_V)
        tie_mass = _exp_at_depth(low)
        needed_ties = tl.ceil((target_mass - mass_above) / tl.maximum(tie_mass, 1e-38))
        needed_ties = tl.maximum(tl.minimum(needed_ties, 2.0e9).to(tl.int32), 1)
        num_ties = tl.where(low < cutoff, needed_ties, tl.minimum(num_ties, needed_ties))
        cutoff = low
    return cutoff, num_ties


@triton.jit
def _keep_mask(score, depth, cutoff, num_ties, ties_seen, min_p):
    """Return the mask of kept scores, and the scores at the cutoff seen so far (`ties_seen`)."""
    at_cutoff = (depth == cutoff).to(tl.int32)
    rank = ties_seen + tl.cumsum(at_cutoff, 0) - at_cutoff
    keep = (depth < cutoff) | ((at_cutoff == 1) & (rank < num_ties))
    return keep & ((tl.exp(score) >= min_p) | (depth == 0)), ties_seen + tl.sum(at_cutoff, 0)


@kernel(space=_sample_space, bound_by="latency", scalar_loads=6)
@triton.jit
def _sample(
    logits, temperatures, top_ks, top_ps, min_ps, seeds, positions, y, vocab_size, stride_lm,
    SAMPLE: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Sample a token from a row, or compute the log-probabilities to sample from."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride_lm
    temperature = tl.load(temperatures + row).to(tl.float32)
    top_k = tl.load(top_ks + row)
    top_k = tl.where(temperature > 0, tl.maximum(tl.minimum(top_k, vocab_size), 1), 1).to(tl.int32)
    top_p = tl.where(temperature > 0, tl.load(top_ps + row).to(tl.float32), 1.0)
    min_p = tl.load(min_ps + row).to(tl.float32)
    temperature = tl.where(temperature > 0, temperature, 1.0)
    row_max = _row_max(logits, vocab_size, BLOCK_V)
    cutoff, num_ties = _find_cutoff(logits, vocab_size, row_max, temperature, top_k, top_p, BLOCK_V)
    mass = 0.0
    ties_seen = cutoff * 0
    last_kept = cutoff * 0
    for start_v in range(0, vocab_size, BLOCK_V):
        offs_v = start_v + tl.arange(0, BLOCK_V)
        score, depth = _scores(logits, offs_v, vocab_size, row_max, temperature)
        keep, ties_seen = _keep_mask(score, depth, cutoff, num_ties, ties_seen, min_p)
        mass += tl.sum(tl.where(keep, tl.exp(score), 0.0), 0)
        last_kept = tl.maximum(last_kept, tl.max(tl.where(keep, offs_v, 0), 0))
    ties_seen = cutoff * 0
    if SAMPLE:
        seed = tl.load(seeds + row).to(tl.int64)
        position = tl.load(positions + row).to(tl.int64)
        threshold = philox_uniform_at(seed, position, position.to(tl.int32) * 0) * mass
        cumulative = 0.0
        sampled = cutoff * 0 + vocab_size
        for start_v in range(0, vocab_size, BLOCK_V):
            offs_v = start_v + tl.arange(0, BLOCK_V)
            score, depth = _scores(logits, offs_v, vocab_size, row_max, temperature)
            keep, ties_seen = _keep_mask(score, depth, cutoff, num_ties, ties_seen, min_p)
            p = tl.where(keep, tl.exp(score), 0.0)
            reached = keep & (cumulative + tl.cumsum(p, 0) > threshold)
            sampled = tl.minimum(sampled, tl.min(tl.where(reached, offs_v, vocab_size), 0))
            cumulative += tl.sum(p, 0)
        tl.store(y + row, tl.where(sampled < vocab_size, sampled, last_kept).to(tl.int64))
    else:
        for start_v in range(0, vocab_size, BLOCK_V):
            offs_v = start_v + tl.arange(0, BLOCK_V)
            score, depth = _scores(logits, offs_v, vocab_size, row_max, temperature)
            keep, ties_seen = _keep_mask(score, depth, cutoff, num_ties, ties_seen, min_p)
            values = tl.where(keep, score - tl.log(mass), float("-inf"))
            tl.store(y + row * vocab_size + offs_v, values, offs_v < vocab_size)


def apply_penalties(
    logits: Tensor,
    prompt_mask: Tensor,
    output_counts: Tensor,
    repetition_penalty: Tensor,
    presence_penalty: Tensor,
    frequency_penalty: Tensor,
) -> Tensor:
    """Launch one kernel."""
    y = logits.new_empty(logits.shape)
    logits, prompt_mask, output_counts = (
        as_rows(logits),
        as_rows(prompt_mask),
        as_rows(output_counts),
    )
    vocab_size = logits.shape[1]
    block_v = min(_MAX_BLOCK_V, triton.next_power_of_2(vocab_size))
    _apply_penalties.launch(
        (len(logits), triton.cdiv(vocab_size, block_v)),
        *(logits, prompt_mask, output_counts),
        *(
            option.contiguous()
            for option in (repetition_penalty, presence_penalty, frequency_penalty)
        ),
        *(y, vocab_size, logits.stride(0), prompt_mask.stride(0), output_counts.stride(0)),
        BLOCK_V=block_v,
    )
    return y


def philox_uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Launch one kernel."""
    y = seeds.new_empty(seeds.shape, dtype=torch.float32)
    block = 512
    _philox_uniform.launch(
        (triton.cdiv(seeds.numel(), block),),
        *(seeds.contiguous(), positions.contiguous(), y, seeds.numel()),
        BLOCK=block,
    )
    return y


def _launch(y: Tensor, logits: Tensor, *options: Tensor | None) -> Tensor:
    rows = as_rows(logits)
    option_args = [option if option is None else option.contiguous() for option in options]
    _sample.launch(
        (len(rows),),
        *(rows, *option_args, y, rows.shape[1], rows.stride(0)),
        SAMPLE=options[-1] is not None,
        BLOCK_V=min(_MAX_BLOCK_V, triton.next_power_of_2(rows.shape[1])),
    )
    return y


def sampling_logprobs(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Launch one kernel."""
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
    """Launch one kernel."""
    y = logits.new_empty(logits.shape[:1], dtype=torch.int64)
    return _launch(y, logits, temperature, top_k, top_p, min_p, seeds, positions)


def _supported(x: Tensor, *_: object) -> bool:
    return x.numel() > 0


def _penalties_example(make: ExampleInputs) -> tuple[Any, ...]:
    logits = make(256, 131072)
    prompt_mask, output_counts = (
        make.ints(256, 131072).bool(),
        make.ints(256, 131072, dtype=torch.int32),
    )
    option = make(256, dtype=torch.float32).sigmoid()
    return logits, prompt_mask, output_counts, option, option, option


def _logprobs_example(make: ExampleInputs) -> tuple[Any, ...]:
    option, top_k = make(256, dtype=torch.float32).sigmoid(), make.ints(256, below=50) + 1
    return make(256, 131072), option, top_k, option, option


def _sample_example(make: ExampleInputs) -> tuple[Any, ...]:
    return *_logprobs_example(make), make.ints(256), make.ints(256)


provide(
    ops.apply_penalties,
    apply_penalties,
    example=_penalties_example,
    supports=_supported,
    backward=differentiate(ops.apply_penalties.fallback),
)
provide(
    ops.philox_uniform,
    philox_uniform,
    example=lambda make: (make.ints(256), make.ints(256)),
    supports=_supported,
)
provide(ops.sampling_logprobs, sampling_logprobs, example=_logprobs_example, supports=_supported)
provide(ops.sample, sample, example=_sample_example, supports=_supported)
