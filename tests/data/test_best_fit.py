"""Best-fit packing: whole sequences, few samples, the same every time."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.data.best_fit import best_fit


@given(lengths=st.lists(st.integers(1, 64)), capacity=st.integers(64, 100))
def test_every_sequence_is_in_one_sample_that_is_not_too_long(
    lengths: list[int], capacity: int
) -> None:
    samples = best_fit(lengths, capacity)
    assert sorted(i for sample in samples for i in sample) == list(range(len(lengths)))
    totals = [sum(lengths[i] for i in sample) for sample in samples]
    assert all(0 < total <= capacity for total in totals)
    assert all(one + other > capacity for one, other in combinations(totals, 2))


@given(lengths=st.lists(st.integers(1, 64), max_size=30))
def test_each_sequence_goes_into_the_fullest_sample_in_which_it_fits(lengths: list[int]) -> None:
    samples: list[list[int]] = []
    free: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fits = [rest for rest in free if rest >= lengths[i]]
        if not fits:
            samples.append([])
            free.append(64)
            fits = [64]
        at = len(free) - 1 - free[::-1].index(min(fits))
        samples[at].append(i)
        free[at] -= lengths[i]
    # Equally full samples are interchangeable, so only their sizes are compared.
    sizes = sorted(sum(lengths[i] for i in sample) for sample in samples)
    assert sizes == sorted(sum(lengths[i] for i in s) for s in best_fit(lengths, 64))


@pytest.mark.parametrize("length", [0, 9])
def test_a_sequence_that_does_not_fit_is_an_error(length: int) -> None:
    with pytest.raises(ValueError, match="from 1 to 8"):
        best_fit([length], 8)


def test_many_sequences_are_packed_quickly() -> None:
    lengths = [(i * 2654435761) % 1000 + 1 for i in range(50_000)]
    samples = best_fit(lengths, 1024)
    assert sum(lengths) / (1024 * len(samples)) > 0.99
