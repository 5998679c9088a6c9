from __future__ import annotations

import pytest

from ingot.core.errors import ConfigError
from ingot.parallel.config import ParallelConfig


@pytest.mark.parametrize("shards", [1, 2, 64, 2**20])
def test_a_power_of_two_is_accepted(shards: int) -> None:
    assert ParallelConfig(batch_shards=shards).batch_shards == shards


@pytest.mark.parametrize("shards", [0, -1, -4, 3, 12])
def test_another_number_of_shards_is_an_error(shards: int) -> None:
    with pytest.raises(ConfigError, match="power of two"):
        ParallelConfig(batch_shards=shards)


@pytest.mark.parametrize("dp", [0, -2, 2**21])
def test_replicas_are_bounded(dp: int) -> None:
    with pytest.raises(ConfigError, match="dp"):
        ParallelConfig(dp=dp)
