from __future__ import annotations

from typing import Any

import gguf as package
import numpy as np
import pytest
import torch

from ingot.interop.compressed_tensors import tensor_shapes, unpack
from ingot.interop.gguf_blocks import FORMATS, common_format, convert_rows
from tests.interop.conftest import random_blocks

each_type = pytest.mark.parametrize("name", FORMATS)


@each_type
def test_blocks_decode_as_in_the_gguf_package(name: str) -> None:
    format, raw = FORMATS[name], random_blocks(name, 24, 512)
    stored = {key: torch.from_numpy(array) for key, array in convert_rows(name, raw).items()}
    shapes = tensor_shapes(format, 24, 512)
    stored |= {"weight_shape": torch.tensor([24, 512])} if "weight_shape" in shapes else {}
    assert {key: (tuple(t.shape), t.dtype) for key, t in stored.items()} == {
        key: (shape, dtype or torch.float16) for key, (shape, dtype) in shapes.items()
    }
    found = format.decode(unpack(format, stored, "layer")).numpy()
    expected = package.quants.dequantize(raw, package.GGMLQuantizationType[name])
    if name.endswith("_K"):  # scales are rounded to float16
        bound = 2.0**-11 * (np.abs(expected) + np.abs(_offsets(stored))) + 32 * 2.0**-24
        assert (np.abs(found - expected) <= bound).all()
        assert not np.array_equal(found, expected)
    else:
        assert np.array_equal(found, expected)


def _offsets(stored: dict[str, torch.Tensor]) -> Any:
    """Return twice the minimum of each weight, the error of which may cancel with the value."""
    if "weight_minimum" not in stored:
        return 0.0
    return 2 * stored["weight_minimum"].float().numpy().repeat(32, 1)


def test_layers_that_are_computed_together_need_one_format() -> None:
    assert common_format(["Q4_0", "Q4_0", "Q4_0"]) == FORMATS["Q4_0"]
    assert common_format(["Q4_0", "Q4_1"]) is None
    assert common_format(["F16"]) is None
