"""The running mean of the weights, and that a model only borrows it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ingot.train.ema import EMA


def test_it_is_the_mean_of_the_formula() -> None:
    weights = {"a": torch.randn(3, 5, dtype=torch.float32), "b": torch.randn(7)}
    mean = EMA(weights, decay=0.8)
    wanted = {name: w.double().clone() for name, w in weights.items()}
    for step in range(50):
        for name, w in weights.items():
            w += torch.randn(w.shape)
            d = min(0.8, (1 + step) / (10 + step))
            wanted[name] = d * wanted[name] + (1 - d) * w.double()
        mean.update(step)
    for name, exact in wanted.items():
        torch.testing.assert_close(mean.weights[name].double(), exact, rtol=1e-5, atol=1e-5)


def test_a_model_borrows_it() -> None:
    model = nn.Linear(3, 2).bfloat16()
    masters = {name: p.detach().float() for name, p in model.named_parameters()}
    mean = EMA(masters, decay=0.5)
    before = model.weight.detach().clone()
    masters["weight"] += 1
    mean.update(1000)
    with mean.within(model):
        assert torch.equal(model.weight, mean.weights["weight"].bfloat16())
        assert not torch.equal(model.weight, before)
    assert torch.equal(model.weight, before)
    with pytest.raises(RuntimeError, match="inside"), mean.within(model):
        raise RuntimeError("inside")
    assert torch.equal(model.weight, before)


def test_a_saved_mean_goes_on() -> None:
    weights = {"a": torch.randn(4)}
    first, second = EMA(weights, decay=0.9), EMA({"a": torch.zeros(4)}, decay=0.9)
    second.load(first.weights)
    assert torch.equal(second.weights["a"], first.weights["a"])
