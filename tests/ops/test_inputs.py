from __future__ import annotations

import torch

from ingot.ops.inputs import TensorMaker


def test_every_dtype_gets_the_same_values() -> None:
    wide, narrow = TensorMaker(torch.float64)(5, 7), TensorMaker(torch.bfloat16)(5, 7)
    assert torch.equal(wide.bfloat16(), narrow)


def test_seeds_give_different_values() -> None:
    one, other = TensorMaker(torch.float32, seed=0)(5), TensorMaker(torch.float32, seed=1)(5)
    assert not torch.equal(one, other)


def test_strided_is_not_contiguous() -> None:
    x = TensorMaker(torch.float32).strided(3, 5)
    assert x.shape == (3, 5)
    assert not x.is_contiguous()


def test_spread_covers_its_magnitudes() -> None:
    x = TensorMaker(torch.float32).spread(1000, low=-8, high=4).abs()
    assert x.min() < 2**-7
    assert x.max() > 2**3


def test_bools_are_mixed() -> None:
    assert TensorMaker(torch.float32).bools(100).float().mean().item() not in (0.0, 1.0)
