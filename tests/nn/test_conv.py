"""Image classifiers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ingot.core.errors import ConfigError
from ingot.nn.conv import CNN, CNNConfig, ResNet, ResNetConfig

MODELS = [
    (CNN, CNNConfig(widths=(4, 6, 8), num_classes=5)),
    (ResNet, ResNetConfig(widths=(4, 6, 8), num_classes=5)),
]


@pytest.mark.parametrize(("kind", "config"), MODELS)
@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 1, 7, 9)])
def test_logits_of_images_of_odd_sizes(kind: Any, config: Any, shape: tuple[int, ...]) -> None:
    model = kind.from_config(config, seed=0)
    assert model(torch.randn(shape)).shape == (shape[0], 5)
    model.eval()
    x = torch.randn(shape)
    torch.testing.assert_close(model(x[:1]), model(x)[:1])  # one image alone


@pytest.mark.parametrize(("kind", "config"), MODELS)
def test_same_seed_gives_same_weights(kind: Any, config: Any) -> None:
    a, b = kind.from_config(config, seed=3), kind.from_config(config, seed=3)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_residual_block_with_zero_branch_is_its_shortcut() -> None:
    model = ResNet.from_config(
        ResNetConfig(widths=(4,), blocks_per_stage=1, num_classes=2), seed=0
    ).eval()
    block: Any = model.stages[2]
    torch.nn.init.zeros_(block.second.norm.weight)
    x = torch.rand(2, 4, 5, 5)
    assert torch.equal(block(x), x)


@pytest.mark.parametrize(("kind", "config"), MODELS)
def test_every_parameter_gets_a_gradient(kind: Any, config: Any) -> None:
    model = kind.from_config(config, seed=0)
    model(torch.randn(4, 8, 8)).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_bounds() -> None:
    for widths in ((), (0,), (2**17,)):
        with pytest.raises(ConfigError, match="widths"):
            CNNConfig(widths=widths, num_classes=2)
    with pytest.raises(ConfigError, match="blocks"):
        ResNetConfig(widths=(4,), blocks_per_stage=0, num_classes=2)
