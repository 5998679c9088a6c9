from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ingot.compression import RoundToNearest
from ingot.compression.method import search_grid
from ingot.nn.formats import Int4, Int8, QuantizedTensors, WeightFormat

FORMATS: list[WeightFormat] = [
    Int8(),
    Int8(group=32),
    Int4(),
    Int4(zero_point=True),
    Int4(minimum=True),
]
each_format = pytest.mark.parametrize("format", FORMATS, ids=str)


def heavy_tailed(seed: int, rows: int = 8, channels: int = 64) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(rows, channels, generator=random) ** 3


@each_format
@given(seed=st.integers(0, 1000))
def test_searching_never_adds_error(format: WeightFormat, seed: int) -> None:
    weight = heavy_tailed(seed)

    def error(tensors: QuantizedTensors) -> torch.Tensor:
        return (format.decode(tensors) - weight).square().sum(-1)

    searched = RoundToNearest().encode(format, weight, None)
    assert (error(searched) <= error(format.encode(weight)) * 1.000001).all()


def test_important_channels_are_rounded_with_less_error() -> None:
    weight, format = heavy_tailed(0, 64, 32), Int4()
    importance = torch.ones(32)
    importance[:4] = 1000.0

    def error(importance: torch.Tensor | None) -> float:
        grid = search_grid(format, weight, importance)
        return float((grid.decode(grid.round(weight)) - weight)[:, :4].square().sum())

    assert error(importance) < 0.8 * error(None)
