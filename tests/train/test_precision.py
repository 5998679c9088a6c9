"""Masters hold what half precision would lose, and the scale of the loss follows overflows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ingot.train.precision import Masters, Precision


def half(model: nn.Module, precision: Precision, value: float) -> None:
    for parameter in model.parameters():
        nn.init.constant_(parameter, 1.0)
    x = torch.full((1, 3), value, dtype=precision.dtype)
    model(x).sum().backward()


def test_in_fp32_the_masters_are_the_parameters() -> None:
    model = nn.Linear(3, 2)
    masters = Masters(model, Precision.FP32)
    half(model, Precision.FP32, 2.0)
    assert masters.weights["weight"] is model.weight
    assert torch.equal(masters.grads["weight"], torch.full((2, 3), 2.0))
    assert model.weight.grad is None
    assert masters.scale == 1.0


@pytest.mark.parametrize("precision", list(Precision))
def test_gradients_are_added_up_in_float32_and_freed(precision: Precision) -> None:
    model = nn.Linear(3, 2)
    masters = Masters(model, precision)
    for value in (256.0, 1.0):  # in bfloat16 256 + 1 is 256
        half(model, precision, value)
    assert model.weight.dtype == precision.dtype
    assert model.weight.grad is None
    grad = masters.grads["weight"]
    assert grad.dtype == torch.float32
    assert torch.equal(grad, torch.full((2, 3), 257.0))
    masters.grads.clear()
    half(model, precision, 1.0)
    assert torch.equal(masters.grads["weight"], torch.ones(2, 3, dtype=precision.dtype))


@pytest.mark.parametrize("precision", list(Precision))
def test_every_weight_has_its_gradient_once(precision: Precision) -> None:
    model = nn.Sequential(*(nn.Linear(1, 2**21, bias=False) for _ in range(5)))  # 8 MiB each
    masters = Masters(model, precision)
    model[4](torch.ones(1, 1, dtype=precision.dtype)).sum().backward()
    for layer in (1, 2, 3):
        model[layer](torch.ones(1, 1, dtype=precision.dtype)).sum().backward()
    given: list[str] = []
    for _ in masters.moves(dict.fromkeys(masters.weights, 0.5)):
        now = [name for name, weight in masters.weights.items() if weight.grad is not None]
        assert len(now) == 2
        for name in now:
            assert torch.equal(masters.weights[name].grad, torch.full((2**21, 1), 0.5))  # pyright: ignore
        given += now
    assert given == ["1.weight", "2.weight", "3.weight", "4.weight"]
    assert not masters.grads
    assert all(weight.grad is None for weight in masters.weights.values())


def test_small_steps_are_not_lost() -> None:
    model = nn.Linear(3, 2)
    nn.init.ones_(model.weight)
    masters = Masters(model, Precision.BF16)
    for _ in range(100):
        with torch.no_grad():
            masters.weights["weight"] += 1e-4  # less than half of bfloat16's step at 1
        masters.publish()
    assert torch.equal(model.weight, torch.full((2, 3), 1.01).bfloat16())


def test_what_bf16_cannot_hold_stays_in_the_master() -> None:
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    masters = Masters(model, Precision.BF16)
    assert torch.equal(masters.weights["weight"], before)
    assert torch.equal(model.weight, before.bfloat16())


def test_the_scale_halves_on_overflow_and_grows_again() -> None:
    masters = Masters(nn.Linear(3, 2), Precision.FP16)
    assert masters.scale == 2.0**16
    masters.judge(finite=False)
    assert masters.scale == 2.0**15
    for _ in range(2000):
        assert masters.scale == 2.0**15
        masters.judge(finite=True)
    assert masters.scale == 2.0**16
    for _ in range(100):
        masters.judge(finite=False)
    assert masters.scale == 2.0**-14
    assert not masters.may_overflow  # and the next overflow is divergence


def test_bf16_has_no_scale() -> None:
    masters = Masters(nn.Linear(3, 2), Precision.BF16)
    masters.judge(finite=False)
    assert masters.scale == 1.0
    assert not masters.may_overflow


def test_a_frozen_parameter_is_converted_and_has_no_master() -> None:
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    masters = Masters(model, Precision.BF16)
    assert masters.weights.keys() == {"weight"}
    assert model.bias.dtype == torch.bfloat16


@pytest.mark.parametrize("precision", list(Precision))
def test_a_saved_state_goes_on(precision: Precision) -> None:
    first = Masters(nn.Linear(3, 2), precision)
    first.judge(finite=False)
    first.judge(finite=True)
    model = nn.Linear(3, 2)
    second = Masters(model, precision)
    second.load({name: tensor.clone() for name, tensor in first.state().items()})
    assert second.state().keys() == first.state().keys()
    for name, tensor in first.state().items():
        assert torch.equal(second.state()[name], tensor), name
    assert torch.equal(model.weight, first.weights["weight"].to(precision.dtype))
