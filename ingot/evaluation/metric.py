"""Metrics of a task: mean, perplexity, pass@k, each with its standard error.

Sums are taken in the order of the rows with Python's `sum`, as lm-eval does, so that both report
the same digits for the same rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec


class Estimate(msgspec.Struct, frozen=True):
    """A metric and its standard error; None for one row, which has none.

    >>> Estimate(0.5, 0.125).format()
    '0.5000 ± 0.1250'
    """

    value: float
    stderr: float | None = None

    def format(self) -> str:
        """Return the value with its error, in four digits."""
        spread = "" if self.stderr is None else f" ± {self.stderr:.4f}"
        return f"{self.value:.4f}{spread}"


class TextScore(msgspec.Struct, frozen=True):
    """The log-probability of a text, and what it is the log-probability of."""

    logprob: float
    num_tokens: int
    """Tokens that were scored: all, but the first, which has none before it."""
    num_bytes: int
    """Bytes of their text."""


def mean(values: Sequence[float]) -> Estimate:
    """Return the mean; its standard error is the sample deviation over the root of the count.

    >>> mean([0.0, 1.0, 1.0, 0.0]).value
    0.5
    """
    count = len(values)
    center = sum(values) / count
    if count < 2:
        return Estimate(center)
    variance = sum([(value - center) ** 2 for value in values]) / (count - 1)
    return Estimate(center, math.sqrt(variance) / math.sqrt(count))


def perplexity(scores: Sequence[TextScore]) -> dict[str, Estimate]:
    """Return perplexity per token, bits per byte and negative log-likelihood per token.

    Long texts count more: the sum of all log-probabilities is divided by the sum of all tokens (or
    bytes). The standard errors are those of a ratio of two sums over rows; that of the perplexity
    is propagated from the log-likelihood's (delta method).

    >>> one = TextScore(logprob=-2 * math.log(8), num_tokens=2, num_bytes=6)
    >>> {name: round(estimate.value, 6) for name, estimate in perplexity([one, one]).items()}
    {'perplexity': 8.0, 'bits_per_byte': 1.0, 'nll_per_token': 2.079442}
    """
    logprobs = [score.logprob for score in scores]
    nll = _ratio([-one for one in logprobs], [score.num_tokens for score in scores])
    per_byte = _ratio([-one for one in logprobs], [score.num_bytes for score in scores])
    value = math.exp(nll.value) if nll.value < 700 else math.inf
    stderr = None if nll.stderr is None else value * nll.stderr
    log2 = math.log(2)
    bits = None if per_byte.stderr is None else per_byte.stderr / log2
    return {
        "perplexity": Estimate(value, stderr),
        "bits_per_byte": Estimate(per_byte.value / log2, bits),
        "nll_per_token": nll,
    }


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the unbiased estimate of the probability that one of k samples is correct.

    1 - C(n - c, k) / C(n, k), of Chen et al. 2021 (Codex).

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 0, 4)
    (0.25, 0.5, 0.0)
    """
    missed = math.comb(num_samples - num_correct, k)
    total = math.comb(num_samples, k)
    return (total - missed) / total


def exact_match(correct: Mapping[int, Sequence[float]], num_samples: int) -> dict[str, Estimate]:
    """Return `exact_match`, or pass@k for k = 1, 2, 4, ... and the number of samples.

    `correct` has the scores (0 or 1) of the samples of each row; rows that lack a sample are left
    out.

    >>> list(exact_match({1: [0, 1, 1], 2: [0, 0, 0]}, 3))
    ['pass@1', 'pass@2', 'pass@3']
    """
    rows = [list(scores) for scores in correct.values() if len(scores) == num_samples]
    if not rows:
        return {}
    if num_samples == 1:
        return {"exact_match": mean([scores[0] for scores in rows])}
    counts = [round(sum(scores)) for scores in rows]
    return {
        f"pass@{k}": mean([pass_at_k(num_samples, count, k) for count in counts])
        for k in _powers_of_two(num_samples)
    }


def multiple_choice(
    rows: Iterable[tuple[Sequence[float], Sequence[str], int]],
) -> dict[str, Estimate]:
    """Return `acc` and `acc_norm` of rows of log-probabilities, choices and the correct index.

    The answer is the choice with the highest log-probability; for `acc_norm`, with the highest per
    character of the choice.

    >>> logprobs, choices = [-4.0, -6.0], ["no", "certainly"]
    >>> {k: v.value for k, v in multiple_choice([(logprobs, choices, 1)]).items()}
    {'acc': 0.0, 'acc_norm': 1.0}
    """
    plain: list[float] = []
    normed: list[float] = []
    for logprobs, choices, answer in rows:
        lengths = [len(choice) for choice in choices]
        per_char = [one / count for one, count in zip(logprobs, lengths, strict=True)]
        plain.append(float(argmax(logprobs) == answer))
        normed.append(float(argmax(per_char) == answer))
    return {"acc": mean(plain), "acc_norm": mean(normed)} if plain else {}


def argmax(values: Sequence[float]) -> int:
    """Return the index of the first highest value.

    >>> argmax([1.0, 3.0, 3.0])
    1
    """
    return max(range(len(values)), key=lambda index: values[index])


def _ratio(numerators: Sequence[float], denominators: Sequence[int]) -> Estimate:
    """Return the ratio of two sums; its standard error is that of the residuals a - ratio * b."""
    total, count = sum(denominators), len(numerators)
    ratio = sum(numerators) / total
    if count < 2:
        return Estimate(ratio)
    pairs = zip(numerators, denominators, strict=True)
    squares = sum([(a - ratio * b) ** 2 for a, b in pairs])
    return Estimate(ratio, math.sqrt(squares * count / (count - 1)) / total)


def _powers_of_two(count: int) -> list[int]:
    """Return 1, 2, 4, ... up to `count`, and `count` itself.

    >>> _powers_of_two(6), _powers_of_two(8)
    ([1, 2, 4, 6], [1, 2, 4, 8])
    """
    powers = [1 << exponent for exponent in range(count.bit_length())]
    return powers if powers[-1] == count else [*powers, count]
