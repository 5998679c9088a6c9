from __future__ import annotations

from typing import Any

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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cp": 2, "tp": 2}, r"parallel\.cp and parallel\.tp cannot be combined"),
        ({"ep": 2, "pp": 2}, r"parallel\.ep and parallel\.pp cannot be combined"),
        ({"grad_compression": "int8", "ep": 2}, "grad_compression and parallel.ep cannot be"),
        ({"local_steps": 2, "dp": 2, "pp": 2}, "local_steps and parallel.pp cannot be"),
    ],
)
def test_what_cannot_be_combined_is_an_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ParallelConfig(**options)
