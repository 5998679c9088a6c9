from __future__ import annotations

import json

import pytest

from ingot.bench.peaks import Peak, Peaks
from tests.bench.row import PEAK, PEAKS


def test_spread_is_that_of_the_slices() -> None:
    expected = Peak(value=6.0, low=1.8, typical=3.0, high=4.2)
    assert Peak.from_slices(6.0, [1.0, 5.0, 3.0]) == expected


def test_json_round_trip() -> None:
    assert Peaks.from_json(PEAKS.to_json()) == PEAKS
    assert json.loads(PEAKS.to_json())["matmul"]["int8"] is None


def test_unknown_dtypes_are_rejected() -> None:
    with pytest.raises(ValueError, match="matmul: keys must be fp32, bf16, int8"):
        Peaks(
            method=1,
            measured=PEAKS.measured,
            read_bandwidth=PEAK,
            matmul={"fp8": PEAK},  # pyright: ignore[reportArgumentType]
        )
