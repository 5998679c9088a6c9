"""Master weights keep what half precision would lose; the loss scale follows overflows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ingot.ops.adamw import join
from ingot.training.precision import MasterWeights, Precision


def half(model: nn.Module, precision: Precision, value: float) -> None:
    for parameter in model.parameters():
        nn.init.constant_(parameter, 1.0)
    x = torch.full((1, 3), value, dtype=precision.dtype)
    model(x).sum().backward()


def test_in_fp32_the_master_weights_are_the_parameters() -> None:
    model = nn.Linear(3, 2)
    masters = MasterWeights(model, Precision.FP32)
    half(model, Precision.FP32, 2.0)
    assert masters.weights["weight"] is model.weight
    assert torch.equal(masters.gradients.total()["weight"], torch.full((2, 3), 2.0))
    assert model.weight.grad is None
    assert masters.loss_scale == 1.0


@pytest.mark.parametrize("precision", list(Precision))
def test_gradients_are_added_up_in_float32_and_freed(precision: Precision) -> None:
    model = nn.Linear(3, 2)
    masters = MasterWeights(model, precision)
    for value in (256.0, 1.0):  # in bfloat16 256 + 1 is 256
        half(model, precision, value)
    assert model.weight.dtype == precision.dtype
    assert model.weight.grad is None
    grad = masters.gradients.total()["weight"]
    assert grad.dtype == torch.float32
    assert torch.equal(grad, torch.full((2, 3), 257.0))
    half(model, precision, 1.0)
    grads = masters.gradients.total()
    assert torch.equal(grads["weight"], torch.ones(2, 3, dtype=precision.dtype))


def test_small_steps_are_not_lost() -> None:
    model = nn.Linear(3, 2)
    nn.init.ones_(model.weight)
    masters = MasterWeights(model, Precision.BF16)
    for _ in range(100):
        with torch.no_grad():
            masters.weights["weight"] += 1e-4  # less than half of bfloat16's step at 1
        masters.copy_to_model()
    assert torch.equal(model.weight, torch.full((2, 3), 1.01).bfloat16())


def test_bits_beyond_bf16_stay_in_the_master_weight() -> None:
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    masters = MasterWeights(model, Precision.BF16)
    assert torch.equal(masters.weights["weight"], before)
    assert torch.equal(model.weight, before.bfloat16())


def test_a_split_master_weight_is_the_models_weight_and_the_low_bits() -> None:
    first, second = nn.Linear(3, 2), nn.Linear(3, 2)
    second.weight = first.weight  # tied
    model = nn.Sequential(first, second)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    masters = MasterWeights(model, Precision.BF16, split=True)
    assert masters.low_bits.keys() == masters.weights.keys() == before.keys()
    for name, parameter in model.named_parameters():
        assert masters.weights[name] is parameter
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(join(parameter.detach(), masters.low_bits[name]), before[name])
    assert second.weight is first.weight
    masters.copy_to_model()  # has nothing to do
    assert torch.equal(join(first.bias.detach(), masters.low_bits["0.bias"]), before["0.bias"])


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.FP16])
def test_only_bf16_is_split(precision: Precision) -> None:
    model = nn.Linear(3, 2)
    masters = MasterWeights(model, precision, split=True)
    assert not masters.low_bits
    assert masters.weights["weight"].dtype == torch.float32
    assert model.weight.dtype == precision.dtype


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16])
def test_a_model_of_any_dtype_is_split(given: torch.dtype) -> None:
    model = nn.Linear(3, 2).to(given)
    before = model.weight.detach().float()
    masters = MasterWeights(model, Precision.BF16, split=True)
    assert torch.equal(join(model.weight.detach(), masters.low_bits["weight"]), before)


@pytest.mark.parametrize("split", [True, False])
def test_master_weights_load_split_and_whole_states(split: bool) -> None:
    torch.manual_seed(0)
    given = nn.Linear(30, 20)
    before = given.weight.detach().clone()
    saved = MasterWeights(given, Precision.BF16, split=split)
    masters = MasterWeights(model := nn.Linear(30, 20), Precision.BF16, split=True)
    masters.load_state_dict(saved.state_dict())
    assert torch.equal(model.weight, given.weight)
    assert torch.equal(join(model.weight.detach(), masters.low_bits["weight"]), before)


def test_the_scale_halves_on_overflow_and_grows_again() -> None:
    masters = MasterWeights(nn.Linear(3, 2), Precision.FP16)
    assert masters.loss_scale == 2.0**16
    masters.update_loss_scale(finite=False)
    assert masters.loss_scale == 2.0**15
    for _ in range(2000):
        assert masters.loss_scale == 2.0**15
        masters.update_loss_scale(finite=True)
    assert masters.loss_scale == 2.0**16
    for _ in range(100):
        masters.update_loss_scale(finite=False)
    assert masters.loss_scale == 2.0**-14
    assert not masters.may_overflow  # and the next overflow is divergence


def test_bf16_has_no_scale() -> None:
    masters = MasterWeights(nn.Linear(3, 2), Precision.BF16)
    masters.update_loss_scale(finite=False)
    assert masters.loss_scale == 1.0
    assert not masters.may_overflow


def test_a_frozen_parameter_is_converted_and_has_no_master() -> None:
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    masters = MasterWeights(model, Precision.BF16)
    assert masters.weights.keys() == {"weight"}
    assert model.bias.dtype == torch.bfloat16


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("precision", list(Precision))
def test_a_saved_state_resumes(precision: Precision, split: bool) -> None:
    first = MasterWeights(nn.Linear(3, 2), precision, split)
    first.update_loss_scale(finite=False)
    first.update_loss_scale(finite=True)
    model = nn.Linear(3, 2)
    second = MasterWeights(model, precision, split)
    second.load_state_dict({name: tensor.clone() for name, tensor in first.state_dict().items()})
    assert second.state_dict().keys() == first.state_dict().keys()
    for name, tensor in first.state_dict().items():
        assert torch.equal(second.state_dict()[name], tensor), name
    assert torch.equal(model.weight, first.weights["weight"].to(precision.dtype))
