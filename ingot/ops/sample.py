"""Sampling: from logits to the next token.

A sampled token must not depend on the other requests of the batch or on restarts of the engine.
Therefore its random number is a pure function of the request's seed and the token's position:
Philox4x32-10 (Salmon et al. 2011), the counter-based generator that CUDA, Triton and PyTorch use,
with the seed as its key and the position as its counter.

    apply_penalties    lower the logits of tokens that occurred before
    sampling_logprobs  apply temperature, top-k, top-p and min-p; -inf for excluded tokens
    philox_uniform     compute the random number of a (seed, position)
    sample             choose the first token whose cumulative probability exceeds that number

Options are per token (T), since a batch mixes requests. Options that have no effect: temperature 1,
top_k of at least the vocabulary size, top_p 1, min_p 0. At temperature 0, the largest logit has
probability 1, the first if there are several.

Legend: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ingot.core.errors import OpError
from ingot.ops.arguments import accum_dtype, fake_like
from ingot.ops.check import check_same_dtype, is_integral
from ingot.ops.inputs import SampleInput, TensorMaker
from ingot.ops.op import op
from ingot.ops.record import Cost, Tolerance
from ingot.ops.softmax import log_softmax

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Return four random 32-bit words for a four-word counter and a two-word key, all as int64.

    >>> zero = torch.tensor([0])
    >>> [f"{int(word):08x}" for word in philox((zero,) * 4, (zero, zero))]
    ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    a, b, c, d = counter
    key_0, key_1 = key
    for _ in range(_ROUNDS):
        high_0, low_0 = _multiply(a, _MULTIPLIERS[0])
        high_1, low_1 = _multiply(c, _MULTIPLIERS[1])
        a, b, c, d = high_1 ^ b ^ key_0, low_1, high_0 ^ d ^ key_1, low_0
        key_0, key_1 = (key_0 + _KEY_STEPS[0]) & _WORD, (key_1 + _KEY_STEPS[1]) & _WORD
    return a, b, c, d


def _multiply(word: Tensor, by: int) -> tuple[Tensor, Tensor]:
    """Multiply 32-bit words in int64 without overflow; return the high and the low word."""
    low = (word & 0xFFFF) * by
    high = (word >> 16) * by + (low >> 16)
    return (high >> 16) & _WORD, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def _logits(make: TensorMaker) -> Iterator[tuple[str, Tensor]]:
    yield "typical", make(6, 64, scale=3.0)
    yield "large", make(67, 1031)
    yield "odd", make(5, 37)
    yield "one_row", make(1, 48)
    yield "strided", make.strided(4, 24)
    yield "extreme", make.spread(4, 33, high=6)
    yield "ties", (make.ints(3, 4, 16) + 1).to(make.dtype)


def _options(
    make: TensorMaker, rows: int, vocabulary: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return options that differ by row: none, each alone, all, greedy."""

    def cycle(*values: float) -> list[float]:
        return [values[row % len(values)] for row in range(rows)]

    return (
        make.floats(cycle(1.0, 0.7, 1.5, 1.0, 0.8, 0.0)),
        make.tensor([int(k) for k in cycle(vocabulary, 5, vocabulary, vocabulary, 7, 3)]),
        make.floats(cycle(1.0, 1.0, 0.8, 1.0, 0.9, 0.5)),
        make.floats(cycle(0.0, 0.0, 0.0, 0.1, 0.05, 0.2)),
    )


def _penalties_samples(make: TensorMaker) -> Iterator[SampleInput]:
    for name, logits in _logits(make):
        rows = len(logits)
        prompt_mask = make.bools(*logits.shape)
        output_counts = make.ints(3, *logits.shape, dtype=torch.int32)
        options = (make.floats([value] * rows) for value in (1.3, 0.5, 0.2))
        yield SampleInput(name, (logits, prompt_mask, output_counts, *options))


def _logprobs_samples(make: TensorMaker) -> Iterator[SampleInput]:
    for name, logits in _logits(make):
        yield SampleInput(name, (logits, *_options(make, *logits.shape)))


def _uniform_samples(make: TensorMaker) -> Iterator[SampleInput]:
    for name, rows in (("typical", 6), ("large", 1031), ("odd", 37), ("one_row", 1)):
        yield SampleInput(name, (make.ints(1 << 40, rows), make.ints(1 << 20, rows)))
    yield SampleInput("strided", (make.ints(99, 8)[::2], make.ints(99, 8)[::2]))
    yield SampleInput("int32", tuple(make.ints(99, 8, dtype=torch.int32) for _ in range(2)))
    yield SampleInput(
        "extreme", (make.tensor([0, 2**63 - 1, -(2**63)]), make.tensor([0, 2**40, 1]))
    )


def _sample_samples(make: TensorMaker) -> Iterator[SampleInput]:
    for name, logits in _logits(make):
        rows = len(logits)
        options = _options(make, *logits.shape)
        seeds, positions = make.ints(1 << 40, rows), make.ints(1 << 20, rows)
        yield SampleInput(name, (logits, *options, seeds, positions))


def _check(logits: Tensor, *options: Tensor) -> None:
    check_same_dtype("sampling", logits=logits)
    if logits.dim() != 2:
        raise OpError(f"sampling: logits are {tuple(logits.shape)}", hint="pass (T, V)")
    for option in options:
        if not (option.shape == logits.shape[:1]):
            raise OpError(
                f"sampling: {logits.shape[0]} rows of logits, an option is {tuple(option.shape)}",
                hint="pass one value of each option per row",
            )


def _check_penalties(
    logits: Tensor, prompt_mask: Tensor, output_counts: Tensor, *options: Tensor
) -> None:
    _check(logits, *options)
    fits = prompt_mask.shape == output_counts.shape == logits.shape
    if not fits or prompt_mask.dtype != torch.bool or output_counts.is_complex():
        raise OpError(
            f"apply_penalties: logits are {tuple(logits.shape)}, prompt_mask {prompt_mask.dtype} "
            f"{tuple(prompt_mask.shape)}, output_counts {output_counts.dtype} "
            f"{tuple(output_counts.shape)}",
            hint="pass a bool prompt_mask and integer output_counts in the shape of the logits",
        )


def _check_sample(logits: Tensor, *options: Tensor) -> None:
    _check(logits, *options)
    _check_uniform(*options[-2:])


def _check_uniform(seeds: Tensor, positions: Tensor) -> None:
    if not (is_integral(seeds) and is_integral(positions)) or seeds.shape != positions.shape:
        raise OpError(
            f"philox_uniform: seeds are {seeds.dtype} {tuple(seeds.shape)}, "
            f"positions {positions.dtype} {tuple(positions.shape)}",
            hint="pass an integer seed and an integer position per number",
        )


def _uniform_fake(seeds: Tensor, positions: Tensor) -> Tensor:
    return seeds.new_empty(seeds.shape, dtype=torch.float32)


def _logprobs_fake(logits: Tensor, *_: object) -> Tensor:
    return logits.new_empty(logits.shape, dtype=accum_dtype(logits.dtype))


def _sample_fake(logits: Tensor, *_: object) -> Tensor:
    return logits.new_empty(logits.shape[:1], dtype=torch.int64)


def _penalties_cost(logits: Tensor, prompt_mask: Tensor, output_counts: Tensor, *_: object) -> Cost:
    return Cost(
        bytes=2 * logits.nbytes + prompt_mask.nbytes + output_counts.nbytes,
        flops=4 * logits.numel(),
    )


def _uniform_cost(seeds: Tensor, positions: Tensor) -> Cost:
    return Cost(bytes=seeds.nbytes + positions.nbytes + 4 * seeds.numel(), flops=0)


def _logprobs_cost(logits: Tensor, *_: object) -> Cost:
    return Cost(bytes=logits.nbytes + 4 * logits.numel(), flops=8 * logits.numel())


def _sample_cost(logits: Tensor, *_: object) -> Cost:
    return Cost(bytes=logits.nbytes, flops=8 * logits.numel())


@op(
    check=_check_penalties,
    fake=fake_like,
    samples=_penalties_samples,
    tolerance=Tolerance(),
    cost=_penalties_cost,
    row_args=(
        "logits",
        "prompt_mask",
        "output_counts",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    ),
)
def apply_penalties(
    logits: Tensor,
    prompt_mask: Tensor,
    output_counts: Tensor,
    repetition_penalty: Tensor,
    presence_penalty: Tensor,
    frequency_penalty: Tensor,
) -> Tensor:
    """Lower the logits (T, V) of tokens that are in the prompt or were generated before.

    `prompt_mask` (T, V) is True for tokens of the prompt, `output_counts` (T, V) is how often each
    token was generated. `repetition_penalty` divides positive and multiplies negative logits of
    both; `presence_penalty` is subtracted once for each generated token, `frequency_penalty` once
    per occurrence.

    >>> one = torch.ones(1)
    >>> seen = torch.tensor([[2, 0]], dtype=torch.int32)
    >>> apply_penalties(torch.zeros(1, 2), seen > 9, seen, one, one * 0.5, one * 0.1)
    tensor([[-0.7000,  0.0000]])
    """
    generated = output_counts > 0
    factor = repetition_penalty[:, None].to(logits.dtype)
    repeated = torch.where(logits > 0, logits / factor, logits * factor)
    logits = torch.where(prompt_mask | generated, repeated, logits)
    penalty = presence_penalty[:, None] * generated + frequency_penalty[:, None] * output_counts
    return logits - penalty.to(logits.dtype)


@op(
    check=_check,
    fake=_logprobs_fake,
    samples=_logprobs_samples,
    tolerance=Tolerance(
        backward=6.0,
        reason="where few tokens are kept, the gradient is a difference of nearly equal numbers",
    ),
    cost=_logprobs_cost,
    row_args=("logits", "temperature", "top_k", "top_p", "min_p"),
)
def sampling_logprobs(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Return the log-probabilities (T, V) that tokens are sampled from; -inf for excluded tokens.

    top-k keeps the k most likely tokens; top-p the fewest of these whose total probability reaches
    p; min-p those at least p times as likely as the most likely one. Ties keep the first token.

    The gradient takes the set of kept tokens as constant: with p the probabilities and g the
    gradient of the result, that of a kept logit is (g - p * sum(g)) / temperature, summed over the
    kept tokens; that of an excluded one is 0. A trainer thus recomputes and differentiates the
    distribution that was sampled from.

    >>> one, zero = torch.ones(1), torch.zeros(1)
    >>> sampling_logprobs(torch.tensor([[2.0, 1.0, 0.0]]), one, torch.tensor([2]), one, zero).exp()
    tensor([[0.7311, 0.2689, 0.0000]])
    """
    greedy = (temperature <= 0)[:, None]
    # Subtract the maximum first, so that no temperature causes an overflow.
    relative = logits - logits.amax(-1, keepdim=True).detach()
    scaled = relative / temperature.where(temperature > 0, 1)[:, None].to(logits.dtype)
    ranked, order = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    keep = rank < top_k[:, None].where(~greedy, 1)
    p = log_softmax.reference(ranked, 1.0, keep).exp().detach()
    before = p.cumsum(-1) - p
    # The sum may round to 1 before the last token: a top_p of 1 keeps all.
    keep &= (before < top_p[:, None]) | (top_p[:, None] >= 1)
    keep &= p >= min_p[:, None] * p[:, :1]
    keep |= rank == 0  # keep at least one token, whatever the options
    keep = torch.zeros_like(keep).scatter(-1, order, keep)
    return log_softmax.reference(scaled, 1.0, keep)


@op(
    check=_check_uniform,
    fake=_uniform_fake,
    samples=_uniform_samples,
    tolerance=Tolerance(),
    cost=_uniform_cost,
    row_args=("seeds", "positions"),
    gradient=None,
)
def philox_uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return a random number in [0, 1) per seed and position, with 24 bits: a float32.

    >>> philox_uniform(torch.tensor([7, 7, 8]), torch.tensor([0, 1, 0]))
    tensor([0.9546, 0.4070, 0.5105])
    """
    seeds, positions = seeds.long(), positions.long()
    zero = torch.zeros_like(seeds)
    counter = positions & _WORD, (positions >> 32) & _WORD, zero, zero
    word, *_ = philox(counter, (seeds & _WORD, (seeds >> 32) & _WORD))
    return (word >> 8).double() * 2.0**-24


@op(
    check=_check_sample,
    fake=_sample_fake,
    samples=_sample_samples,
    tolerance=Tolerance(),
    cost=_sample_cost,
    row_args=("logits", "temperature", "top_k", "top_p", "min_p", "seeds", "positions"),
    gradient=None,
)
def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """Sample a token (T) from each row of logits (T, V).

    >>> one, zero = torch.ones(1), torch.zeros(1)
    >>> seed, position, top_k = torch.tensor([7]), torch.tensor([0]), torch.tensor([3])
    >>> sample(torch.zeros(1, 3), one, top_k, one, zero, seed, position)
    tensor([2])
    """
    p = sampling_logprobs.reference(logits, temperature, top_k, top_p, min_p).exp()
    cumulative = p.cumsum(-1)
    threshold = philox_uniform.reference(seeds, positions).to(p.dtype) * cumulative[:, -1]
    reached = cumulative > threshold[:, None]
    # Due to rounding, no sum may exceed the threshold: then choose the last possible token.
    last = p.shape[-1] - 1 - (p > 0).int().flip(-1).argmax(-1)
    return torch.where(reached.any(-1), reached.int().argmax(-1), last)
