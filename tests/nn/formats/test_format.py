from __future__ import annotations

import pytest
import torch

from ingot.core.errors import ConfigError
from ingot.nn.formats import Int4, Int8, WeightFormat
from ingot.nn.formats.format import check_channels, check_group, empty_groups


def test_values_of_adjacent_rows_are_adjacent() -> None:
    values = empty_groups(3, 5, torch.float16, "cpu")
    assert values.shape == (5, 3)
    assert values.stride() == (1, 5)


def test_the_hint_names_a_group_size_that_fits() -> None:
    with pytest.raises(ConfigError) as error:
        check_channels("int4", 96, 64)
    assert "32" in str(error.value.hint)
    with pytest.raises(ConfigError) as error:
        check_channels("int4", 40, 32)
    assert "bfloat16" in str(error.value.hint)
    with pytest.raises(ConfigError, match="one of 16, 32, 64, 128"):
        check_group("int8", 0)


@pytest.mark.parametrize("format", [Int4(), Int8()], ids=str)
def test_formats_have_the_interface(format: WeightFormat) -> None:
    assert isinstance(format, WeightFormat)
    tensors = format.encode(torch.randn(4, 64))
    assert tensors.map(lambda t: t[:2]).weight.shape[0] == 2
