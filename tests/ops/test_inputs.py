from __future__ import annotations

import torch

from ingot.ops.inputs import TensorMaker


def test_every_dtype_sees_the_same_numbers() -> None:
    wide, narrow = TensorMaker(torch.float64)(5, 7), TensorMaker(torch.bfloat16)(5, 7)
    assert torch.equal(wide.bfloat16(), narrow)


def test_another_seed_gives_other_numbers() -> None:
    one, other = TensorMaker(torch.float32, seed=0)(5), TensorMaker(torch.float32, seed=1)(5)
    assert not torch.equal(one, other)


def test_strided_is_not_contiguous() -> None:
    x = TensorMaker(torch.float32).strided(3, 5)
    assert x.shape == (3, 5)
    assert not x.is_contiguous()


def test_spread_covers_the_magnitudes_it_names() -> None:
    x = TensorMaker(torch.float32).spread(1000, low=-8, high=4).abs()
    assert x.min() < 2**-7
    assert x.max() > 2**3


def test_bools_are_mixed() -> None:
    assert TensorMaker(torch.float32).bools(100).float().mean().item() not in (0.0, 1.0)
