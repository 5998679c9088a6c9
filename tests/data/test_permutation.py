from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.core.errors import ConfigError
from ingot.data.permutation import MAX_SAMPLES, Permutation, shuffled_indices

SEEDS = st.integers(0, 2**64 - 1)


@given(n=st.integers(1, 3000), seed=SEEDS, epoch=st.integers(0, 2**40))
def test_each_sample_comes_once(n: int, seed: int, epoch: int) -> None:
    found = Permutation(n, seed=seed, epoch=epoch)(np.arange(n))
    assert sorted(found.tolist()) == list(range(n))


@given(n=st.integers(1, MAX_SAMPLES), seed=SEEDS, data=st.data())
def test_no_two_samples_meet_however_many_there_are(n: int, seed: int, data: st.DataObject) -> None:
    some = data.draw(st.lists(st.integers(0, n - 1), unique=True, min_size=1, max_size=50))
    found = Permutation(n, seed=seed)(np.array(some))
    assert len(set(found.tolist())) == len(some)
    assert found.min() >= 0
    assert found.max() < n


@pytest.mark.parametrize("n", [2, 3, 5, 16, 17, 64])
def test_no_place_is_favoured(n: int) -> None:
    """With three rounds instead of eight n = 5 fails."""
    seeds = 1000
    counts = np.zeros((n, n))
    for seed in range(seeds):
        counts[np.arange(n), Permutation(n, seed=seed)(np.arange(n))] += 1
    expected, freedom = seeds / n, (n - 1) ** 2
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    # Five standard deviations of the distribution above its mean, and a little for few degrees.
    assert chi_squared < freedom + 5 * (2 * freedom) ** 0.5 + 5


def test_neighbours_do_not_stay_neighbours() -> None:
    found = Permutation(10_000, seed=1)(np.arange(10_000))
    assert np.mean(np.abs(np.diff(found)) == 1) < 0.002


def test_every_epoch_and_seed_has_its_own_order() -> None:
    orders = {
        tuple(shuffled_indices(start, start + 50, 50, seed)) for start in (0, 50) for seed in (0, 1)
    }
    assert len(orders) == 4


@given(n=st.integers(1, 40), seed=SEEDS, start=st.integers(0, 90))
def test_a_part_of_the_order_equals_that_of_the_whole(n: int, seed: int, start: int) -> None:
    whole = shuffled_indices(0, 100, n, seed)
    assert shuffled_indices(start, 100, n, seed).tolist() == whole[start:].tolist()


def test_the_order_is_stable_between_versions() -> None:
    """Runs that were started with an older version resume with the same samples."""
    found = shuffled_indices(10**12, 10**12 + 6, 123_456_789, seed=2**64 - 1)
    assert found.tolist() == [80425218, 85004196, 41396210, 121590446, 83368795, 28763467]


@pytest.mark.parametrize("n", [0, -1, MAX_SAMPLES + 1])
def test_invalid_sizes_are_rejected(n: int) -> None:
    with pytest.raises(ConfigError, match="give 1 to"):
        Permutation(n, seed=0)
