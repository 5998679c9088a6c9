"""Dropout masks depend on the seed, step, layer and row only."""

from __future__ import annotations

import pytest
import torch

from ingot.core.errors import ConfigError
from ingot.nn.dropout import Dropout, set_step


def mask(rate: float = 0.25, shape: tuple[int, ...] = (200, 33), **key: int) -> torch.Tensor:
    layer = Dropout(rate, key.pop("layer", 0))
    layer.set_step(seed=key.get("seed", 0), step=key.get("step", 0))
    return layer(torch.ones(shape))


@pytest.mark.parametrize("rate", [0.1, 0.25, 0.9])
def test_dropped_fraction_and_scale(rate: float) -> None:
    found = mask(rate, (1000, 67))
    assert (found == 0).float().mean().item() == pytest.approx(rate, abs=0.01)
    assert found.max().item() == pytest.approx(1 / (1 - rate), rel=1e-3)
    assert found.mean().item() == pytest.approx(1.0, abs=0.03)


def test_mask_depends_on_seed_step_and_layer() -> None:
    found = [mask(), mask(seed=1), mask(step=1), mask(layer=1)]
    for index, one in enumerate(found):
        for other in found[:index]:
            same = ((one == 0) == (other == 0)).float().mean().item()
            assert same == pytest.approx(0.25**2 + 0.75**2, abs=0.03)
    assert torch.equal(mask(), found[0])


@pytest.mark.parametrize("split", [1, 7, 199])
def test_mask_does_not_depend_on_the_micro_batch_split(split: int) -> None:
    layer = Dropout(0.25, 0)
    x = torch.ones(200, 33)
    first = layer(x[:split])
    assert torch.equal(first, layer(x[:split]))  # computed again for its backward
    layer.set_step(seed=0, step=0, row=split)
    assert torch.equal(torch.cat([first, layer(x[split:])]), mask())


def test_neighbouring_values_are_independent() -> None:
    dropped = (mask(0.5, (4000, 48)) == 0).float() - 0.5
    for shifted in (dropped.roll(1, 0), dropped.roll(1, 1), dropped.roll(16, 1)):
        assert abs((dropped * shifted).mean().item()) < 0.005


def test_gradient_uses_the_same_mask() -> None:
    layer, x = Dropout(0.5, 0), torch.ones(8, 5, requires_grad=True)
    found = layer(x)
    found.sum().backward()
    assert torch.equal(x.grad, found.detach())  # pyright: ignore


def test_mask_of_images_in_half_precision() -> None:
    layer, x = Dropout(0.5, 0), torch.ones(4, 3, 2, 2, dtype=torch.bfloat16)
    assert layer(x).dtype == torch.bfloat16
    assert layer(x).shape == x.shape


def test_dropout_is_the_identity_in_eval_or_with_p_0() -> None:
    x = torch.ones(4, 3)
    assert Dropout(0.5, 0).eval()(x) is x
    assert Dropout(0.0, 0)(x) is x


def test_set_step_reaches_every_dropout() -> None:
    model = torch.nn.Sequential(Dropout(0.5, 0), torch.nn.Sequential(Dropout(0.5, 1)))
    x = torch.ones(16, 16)
    first = model(x)
    set_step(model, seed=0, step=1)
    assert not torch.equal(model(x), first)
    set_step(model, seed=0, step=0, row=8)
    assert torch.equal(model(x[8:]), first[8:])


@pytest.mark.parametrize("rate", [-0.1, 1.0, 2.0])
def test_bounds(rate: float) -> None:
    with pytest.raises(ConfigError):
        Dropout(rate, 0)
