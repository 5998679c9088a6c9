from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ingot import ops
from ingot.ops.sample import philox


def row(value: float, rows: int = 1) -> Tensor:
    return torch.full((rows,), value)


def truncated(
    logits: Tensor, temperature: float = 1.0, k: int = 99, p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    rows = len(logits)
    top_k = torch.full((rows,), k)
    return ops.sampling_logprobs(
        logits, row(temperature, rows), top_k, row(p, rows), row(min_p, rows)
    ).exp()


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000",
         "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
         "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
         "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)  # fmt: skip
def test_philox_returns_the_known_answers(counter: str, key: str, expected: str) -> None:
    """The known-answer tests of Random123, the library of the generator's authors."""

    def words(text: str) -> tuple[Tensor, ...]:
        return tuple(torch.tensor([int(word, 16)]) for word in text.split())

    first, second = words(key)
    assert philox(words(counter), (first, second)) == words(expected)


def test_uniform_is_uniform_over_positions_and_over_seeds() -> None:
    count, bins = 40_000, 50
    index, same = torch.arange(count), torch.full((count,), 7)
    for seeds, positions in ((same, index), (index, same)):
        drawn = ops.philox_uniform(seeds, positions)
        assert drawn.min() >= 0
        assert drawn.max() < 1
        observed = torch.histc(drawn, bins, 0, 1)
        chi_square = ((observed - count / bins) ** 2 / (count / bins)).sum()
        assert chi_square < 85  # 49 degrees of freedom: 0.1 % lie above


def test_high_bits_of_seed_and_position_matter() -> None:
    seeds = torch.tensor([5, 5 + 2**32, 5 + 2**62, 5])
    positions = torch.tensor([1, 1, 1, 1 + 2**32])
    assert ops.philox_uniform(seeds, positions).unique().numel() == 4


def test_samples_follow_the_probabilities() -> None:
    count = 40_000
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    tokens = ops.sample(
        p.log().expand(count, 4), row(1.0, count), torch.full((count,), 4), row(1.0, count),
        row(0.0, count), torch.full((count,), 3), torch.arange(count),
    )  # fmt: skip
    observed = tokens.bincount(minlength=4).double()
    chi_square = ((observed - count * p) ** 2 / (count * p)).sum()
    assert chi_square < 16.3  # 3 degrees of freedom: 0.1 % lie above


def test_temperature_zero_takes_the_first_maximum() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0]])
    assert torch.equal(truncated(logits, temperature=0.0), torch.tensor([[0.0, 1.0, 0.0, 0.0]]))


def test_each_option_alone() -> None:
    p = torch.tensor([[0.15, 0.5, 0.05, 0.3]])
    keep = {
        "k": truncated(p.log(), k=2),
        "p": truncated(p.log(), p=0.6),
        "min_p": truncated(p.log(), min_p=0.4),
    }
    for cut, result in keep.items():
        torch.testing.assert_close(result, torch.tensor([[0.0, 0.625, 0.0, 0.375]]), msg=cut)
    sharper = p**2 / (p**2).sum()
    torch.testing.assert_close(truncated(p.log(), temperature=0.5), sharper)


def test_top_p_of_zero_keeps_the_most_likely() -> None:
    assert torch.equal(truncated(torch.tensor([[1.0, 2.0]]), p=0.0), torch.tensor([[0.0, 1.0]]))


@pytest.mark.parametrize("options", [{"k": 0}, {"k": -1}, {"min_p": 1.5}, {"temperature": -1.0}])
def test_options_out_of_range_keep_the_most_likely(options: dict[str, Any]) -> None:
    logits = torch.tensor([[9.0, 0.0, 0.0, 0.0]])
    assert truncated(logits, **options)[0, 0] == 1


def test_penalties_depend_on_the_sign_of_the_logit() -> None:
    logits = torch.tensor([[2.0, -2.0, 2.0, 2.0]])
    prompt_mask = torch.tensor([[True, True, False, False]])
    output_counts = torch.tensor([[0, 0, 3, 0]], dtype=torch.int32)
    result = ops.apply_penalties(logits, prompt_mask, output_counts, row(2.0), row(0.5), row(0.1))
    torch.testing.assert_close(result, torch.tensor([[1.0, -4.0, 1.0 - 0.5 - 0.3, 2.0]]))


@given(
    rows=st.integers(1, 5),
    vocabulary=st.integers(1, 40),
    temperature=st.floats(0, 3),
    k=st.integers(1, 50),
    p=st.floats(0, 1),
    min_p=st.floats(0, 1),
    seed=st.integers(-(2**63), 2**63 - 1),
    numbers=st.randoms(use_true_random=False),
)
@settings(max_examples=200, deadline=None)
def test_sampled_token_is_possible_and_does_not_depend_on_the_batch(
    rows: int, vocabulary: int, temperature: float, k: int, p: float, min_p: float, seed: int,
    numbers: object,
) -> None:  # fmt: skip
    random = torch.Generator().manual_seed(numbers.randint(0, 2**31))  # pyright: ignore
    logits = torch.randn(rows, vocabulary, generator=random) * 5
    options = (
        row(temperature, rows), torch.full((rows,), k), row(p, rows), row(min_p, rows),
        torch.full((rows,), seed), torch.arange(rows),
    )  # fmt: skip
    tokens = ops.sample(logits, *options)
    allowed = truncated(logits, temperature, k, p, min_p)
    assert (allowed.gather(1, tokens[:, None]) > 0).all()
    torch.testing.assert_close(allowed.sum(-1), torch.ones(rows))
    assert ((allowed > 0).sum(-1) <= k).all()
    for index in range(rows):
        alone = ops.sample(logits[index : index + 1], *(o[index : index + 1] for o in options))
        assert alone == tokens[index]


def rows(dtype: torch.dtype, count: int = 40, vocab_size: int = 777) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(5)
    hidden = torch.randn(count, 96, generator=random).to(dtype)
    return hidden, (torch.randn(vocab_size, 96, generator=random) / 4).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_unchanged_distribution_is_bitwise_that_of_training(dtype: torch.dtype) -> None:
    """For every token of the vocabulary: of stored logits, and of the fused op of training."""
    hidden, weight = rows(dtype)
    vocab_size = len(weight)
    logits = ops.linear_logits(hidden, weight)
    one = torch.ones(len(hidden))
    found = ops.sampling_logprobs(logits, one, (one * vocab_size).long(), one, one * 0)
    every = torch.arange(vocab_size)
    for row in range(len(hidden)):
        repeated = hidden[row : row + 1].expand(vocab_size, -1)
        trained = ops.linear_token_logprobs(repeated, weight, every)
        assert torch.equal(found[row], trained)
        of_logits = ops.token_logprobs(logits[row : row + 1].expand(vocab_size, -1), every)
        assert torch.equal(of_logits, trained)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_draws_have_the_reported_probabilities(temperature: float, top_p: float) -> None:
    """A chi-square test of a million draws, which rounded logits do not pass."""
    hidden, weight = rows(torch.bfloat16, count=1, vocab_size=300)
    hidden[:, 0], weight[:, 0] = 8.0, 2.5  # logits near 20, as in real models
    logits = ops.linear_logits(hidden, weight)
    options = (
        torch.tensor([temperature]),
        torch.tensor([300]),
        torch.tensor([top_p]),
        torch.zeros(1),
    )
    probabilities = ops.sampling_logprobs(logits, *options)[0].double().exp()

    def statistic(logits: Tensor) -> tuple[float, float]:
        """Return chi-square and its bound, exceeded by one in a million sets of fair draws."""
        counts, chunk = torch.zeros(300, dtype=torch.int64), 50_000
        for start in range(0, 1_000_000, chunk):
            positions = torch.arange(start, start + chunk)
            t, k, p, m = (option.expand(chunk) for option in options)
            seeds = torch.full((chunk,), 11)
            drawn = ops.sample(logits.expand(chunk, -1), t, k, p, m, seeds, positions)
            counts += torch.bincount(drawn, minlength=300)
        expected = probabilities * counts.sum()
        common = expected > 20
        # What is rare is one cell, and there are none of what is excluded.
        observed = torch.cat([counts[common], counts[~common].sum()[None]]).double()
        expected = torch.cat([expected[common], expected[~common].sum()[None]])
        cells = expected > 0
        assert not counts[probabilities == 0].any()
        chi = float(((observed - expected)[cells].square() / expected[cells]).sum())
        freedom = int(cells.sum()) - 1
        return chi, freedom + 4.8 * (2 * freedom) ** 0.5 + 15

    chi, bound = statistic(logits)
    assert chi < bound
    if top_p == 1:  # otherwise it also draws excluded tokens
        rounded, bound = statistic(ops.linear(hidden, weight).float())
        assert rounded > bound
