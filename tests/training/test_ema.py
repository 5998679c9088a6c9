"""The running mean of the weights, and that a model only borrows it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ingot.ops.adamw import split
from ingot.training import ema
from ingot.training.ema import EMA, apply_weights


def test_the_average_follows_the_formula() -> None:
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


def test_weights_in_two_parts_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ema, "_CHUNK", 7)
    whole = {"a": torch.randn(3, 5), "b": torch.randn(40), "c": torch.randn(7)}
    parts = {name: split(w) for name, w in whole.items() if name != "c"}
    weights = {**{name: both[0] for name, both in parts.items()}, "c": whole["c"]}
    low = {name: both[1] for name, both in parts.items()}
    one, other = EMA(whole, decay=0.8), EMA(weights, decay=0.8, low_bits=low)
    for step in range(20):
        for name, w in whole.items():
            w += 1e-4 * torch.randn(w.shape)
            if name in parts:
                for half, now in zip(parts[name], split(w), strict=True):
                    half.copy_(now)
        one.update(step)
        other.update(step)
    for name, mean in one.weights.items():
        torch.testing.assert_close(other.weights[name], mean, rtol=1e-6, atol=1e-7)
        assert (mean - whole[name]).abs().max() > 1e-6


def test_a_model_borrows_it() -> None:
    model = nn.Linear(3, 2).bfloat16()
    masters = {name: p.detach().float() for name, p in model.named_parameters()}
    mean = EMA(masters, decay=0.5)
    before = model.weight.detach().clone()
    masters["weight"] += 1
    mean.update(1000)
    with apply_weights(mean.weights, model):
        assert torch.equal(model.weight, mean.weights["weight"].bfloat16())
        assert not torch.equal(model.weight, before)
    assert torch.equal(model.weight, before)
    with pytest.raises(RuntimeError, match="inside"), apply_weights(mean.weights, model):
        raise RuntimeError("inside")
    assert torch.equal(model.weight, before)


def test_a_saved_average_resumes() -> None:
    weights = {"a": torch.randn(4)}
    first, second = EMA(weights, decay=0.9), EMA({"a": torch.zeros(4)}, decay=0.9)
    second.load_state_dict(first.weights)
    assert torch.equal(second.weights["a"], first.weights["a"])
