"""Metrics against their definitions."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.evaluation import metric
from ingot.evaluation.metric import TextScore


@given(num_samples=st.integers(1, 8), data=st.data())
def test_pass_at_k_is_the_mean_over_all_choices_of_k_samples(
    num_samples: int, data: st.DataObject
) -> None:
    num_correct = data.draw(st.integers(0, num_samples))
    k = data.draw(st.integers(1, num_samples))
    samples = [True] * num_correct + [False] * (num_samples - num_correct)
    chosen = [any(some) for some in itertools.combinations(samples, k)]
    found = metric.pass_at_k(num_samples, num_correct, k)
    assert math.isclose(found, sum(chosen) / len(chosen), rel_tol=1e-12)


def test_pass_at_k_is_unbiased() -> None:
    """The mean of the estimates is 1 - (1 - p)^k; the plain one, 1 - (1 - c/n)^k, is not."""
    generator, p, n, k = random.Random(0), 0.3, 6, 4
    counts = [sum(generator.random() < p for _ in range(n)) for _ in range(20_000)]
    expected = 1 - (1 - p) ** k
    unbiased = statistics.mean(metric.pass_at_k(n, c, k) for c in counts)
    plain = statistics.mean(1 - (1 - c / n) ** k for c in counts)
    assert abs(unbiased - expected) < 0.01
    assert abs(plain - expected) > 0.03


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=40))
def test_mean_has_the_standard_error_of_statistics(values: list[float]) -> None:
    found = metric.mean(values)
    assert found.stderr is not None
    assert math.isclose(found.value, statistics.mean(values), abs_tol=1e-9)
    expected = statistics.stdev(values) / math.sqrt(len(values))
    assert math.isclose(found.stderr, expected, abs_tol=1e-9)


def test_one_row_has_no_standard_error() -> None:
    assert metric.mean([0.5]).stderr is None
    found = metric.perplexity([TextScore(-4.0, 2, 8)])
    assert found["perplexity"].value == math.exp(2.0)
    assert {estimate.stderr for estimate in found.values()} == {None}


def test_perplexity_weighs_rows_by_their_tokens() -> None:
    found = metric.perplexity([TextScore(-1.0, 1, 4), TextScore(-30.0, 10, 40)])
    assert found["nll_per_token"].value == 31 / 11
    assert found["perplexity"].value == math.exp(31 / 11)
    assert found["bits_per_byte"].value == 31 / 44 / math.log(2)


def test_standard_error_of_perplexity_is_the_spread_over_repeated_tasks() -> None:
    generator = random.Random(1)

    def texts(count: int) -> list[TextScore]:
        lengths = [generator.randint(5, 50) for _ in range(count)]
        return [TextScore(-n * generator.gauss(2.0, 0.3), n, 4 * n) for n in lengths]

    found = [metric.perplexity(texts(60)) for _ in range(400)]
    for name in ("perplexity", "bits_per_byte", "nll_per_token"):
        spread = statistics.stdev(one[name].value for one in found)
        reported = statistics.mean(one[name].stderr or 0.0 for one in found)
        assert reported == pytest.approx(spread, rel=0.15), name


def test_an_impossible_text_has_infinite_perplexity() -> None:
    assert metric.perplexity([TextScore(-1e6, 1, 1)])["perplexity"].value == math.inf


def test_exact_match_leaves_out_rows_that_lack_samples() -> None:
    assert metric.exact_match({1: [1], 2: [0]}, 1)["exact_match"].value == 0.5
    found = metric.exact_match({1: [1, 0, 0, 0], 2: [1, 1]}, 4)
    assert {name: one.value for name, one in found.items()} == {
        "pass@1": 0.25,
        "pass@2": 0.5,
        "pass@4": 1.0,
    }
    assert metric.exact_match({}, 1) == {}
    assert metric.multiple_choice([]) == {}
