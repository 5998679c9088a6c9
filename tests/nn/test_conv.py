"""Image classifiers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ingot.core.errors import ConfigError
from ingot.nn.conv import CNN, CNNConfig, ConvNorm, ResNet, ResNetConfig

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
    assert torch.equal(model(x[:1]), model(x)[:1])  # one image alone


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


def trained(kind: Any, channels: int, dtype: torch.dtype) -> Any:
    """A model whose batch norms have seen images."""
    config_of = {CNN: CNNConfig, ResNet: ResNetConfig}[kind]
    config = config_of(in_channels=channels, widths=(5, 16), num_classes=11)
    model = kind.from_config(config, seed=1)
    for _ in range(3):
        model(torch.randn(8, channels, 9, 7) + 0.3)
    return model.to(dtype).eval()


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def bits_differ(model: Any, images: Tensor, chance: random.Random, count: int) -> bool:
    """Whether an image has other logits in one of `count` random batches than alone."""
    with torch.inference_mode():
        torch.set_num_threads(1)
        alone = torch.cat([model(image[None]) for image in images])
        for _ in range(count):
            torch.set_num_threads(chance.choice((1, 2)))
            rows = chance.choices(range(len(images)), k=chance.choice((1, 2, 3, 16, 33, 64)))
            if not torch.equal(model(images[rows]), alone[rows]):
                return True
    return False


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "channels"), [(CNN, 1), (ResNet, 3)])
def test_logits_do_not_depend_on_the_batch(kind: Any, channels: int, dtype: torch.dtype) -> None:
    model = trained(kind, channels, dtype)
    images = torch.randn(20, channels, 9, 7)
    assert not bits_differ(model, images, random.Random(0), 30)


@pytest.mark.slow
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("kind", [CNN, ResNet])
@pytest.mark.parametrize("size", [(1, 1), (8, 8), (28, 28), (31, 17), (64, 64)])
def test_logits_of_images_of_all_sizes_do_not_depend_on_the_batch(
    kind: Any, size: tuple[int, int]
) -> None:
    model, images = trained(kind, 3, torch.float32), torch.randn(40, 3, *size)
    assert not bits_differ(model, images, random.Random(str(size)), 100)


@pytest.mark.usefixtures("threads")
def test_convolutions_of_torch_are_not_batch_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that the test above would find."""
    model, images = trained(CNN, 1, torch.float32), torch.randn(20, 1, 9, 7)
    monkeypatch.setattr(ConvNorm, "forward", lambda self, x: self.norm(self.conv(x)))
    assert bits_differ(model, images, random.Random(0), 30)


@pytest.mark.parametrize("kind", [CNN, ResNet])
def test_evaluation_computes_what_torch_does(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = trained(kind, 3, torch.float64), torch.randn(4, 3, 9, 7, dtype=torch.float64)
    found = model(images)
    monkeypatch.setattr(ConvNorm, "forward", lambda self, x: self.norm(self.conv(x)))
    torch.testing.assert_close(found, model(images))


def test_names_of_weights_are_those_of_earlier_checkpoints() -> None:
    model = CNN.from_config(CNNConfig(widths=(4,), num_classes=5), seed=0)
    norm = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    layers = [[f"stages.{i}.conv.weight", *(f"stages.{i}.norm.{n}" for n in norm)] for i in (0, 2)]
    assert list(model.state_dict()) == [*layers[0], *layers[1], "head.weight", "head.bias"]


def test_bounds() -> None:
    for widths in ((), (0,), (2**17,)):
        with pytest.raises(ConfigError, match="widths"):
            CNNConfig(widths=widths, num_classes=2)
    with pytest.raises(ConfigError, match="blocks"):
        ResNetConfig(widths=(4,), blocks_per_stage=0, num_classes=2)
