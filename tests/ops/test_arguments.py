"""Tests of the helpers for arguments and outputs."""

from __future__ import annotations

import pytest
import torch

from ingot.ops.arguments import accum_dtype, copy_outputs, fake_like, map_tensors, tensors, widen


def test_tensors_in_lists_are_included() -> None:
    a, b, c = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    assert [len(t) for t in tensors((a, None, [b, 1], (c,), 2.0))] == [1, 2, 3]


def test_map_tensors_keeps_lists() -> None:
    assert map_tensors(lambda value: value + 1, [1, 2]) == [2, 3]
    assert map_tensors(lambda value: value + 1, 1) == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_only_half_precision_is_widened(dtype: torch.dtype) -> None:
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    assert accum_dtype(dtype) == expected
    assert widen(torch.zeros(1, dtype=dtype)).dtype == expected
    assert widen(torch.zeros(1, dtype=torch.int32)).dtype == torch.int32


def test_outputs_are_contiguous_and_rounded() -> None:
    x = torch.randn(3, 2).T.bfloat16()
    outputs = fake_like(x)
    assert outputs.is_contiguous()
    assert torch.equal(copy_outputs(outputs, x.float() * 3), (x.float() * 3).bfloat16())
    with pytest.raises(AssertionError, match="fake returns"):
        copy_outputs(outputs, torch.zeros(1))
