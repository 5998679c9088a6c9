"""Image classifiers: a stack of convolutions, and a residual network.

A layer is a convolution, a batch norm and a ReLU. They are torch's: not batch-invariant, and in
training a batch norm depends on the batch. An image is (channels, height, width) or, with one
channel, (height, width).
"""

# pyright: basic
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from ingot.core.config import check_bounds
from ingot.core.errors import ConfigError
from ingot.nn.dense import kaiming_init_
from ingot.nn.dropout import Dropout


def _check(config: CNNConfig | ResNetConfig) -> None:
    check_bounds(config, in_channels=(1, 2**16), num_classes=(1, 2**22), dropout=(0.0, 0.99))
    if not (0 < len(config.widths) <= 64 and all(1 <= w <= 2**16 for w in config.widths)):
        raise ConfigError(
            f"widths must be 1 to 64 numbers of channels, got {config.widths}"[:200],
            hint="give the channels of each stage",
        )


@dataclass(frozen=True, kw_only=True)
class CNNConfig:
    """Stages of two convolutions; each stage halves the resolution.

    >>> CNNConfig(widths=(16, 32), num_classes=10).in_channels
    1
    """

    kind: Literal["cnn"] = "cnn"
    in_channels: int = 1
    """Number of input channels."""
    widths: tuple[int, ...]
    """Number of channels of each stage."""
    num_classes: int
    """Number of classes."""
    dropout: float = 0.0
    """Dropout probability in training."""

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, kw_only=True)
class ResNetConfig:
    """Stages of residual blocks; each stage halves the resolution.

    >>> ResNetConfig(widths=(16, 32), num_classes=10).blocks_per_stage
    2
    """

    kind: Literal["resnet"] = "resnet"
    in_channels: int = 1
    """Number of input channels."""
    widths: tuple[int, ...]
    """Number of channels of each stage."""
    blocks_per_stage: int = 2
    """Number of residual blocks of each stage."""
    num_classes: int
    """Number of classes."""
    dropout: float = 0.0
    """Dropout probability in training."""

    def __post_init__(self) -> None:
        _check(self)
        check_bounds(self, blocks_per_stage=(1, 2**10))


class ConvNorm(nn.Module):
    """A 3 x 3 (or 1 x 1) convolution and a batch norm.

    >>> ConvNorm(1, 4)(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 4, 8, 8])
    """

    def __init__(self, inputs: int, outputs: int, size: int = 3, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve and normalize."""
        return self.norm(self.conv(x))


class ResidualBlock(nn.Module):
    """Two convolutions and a shortcut (He et al. 2015)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = ConvNorm(inputs, outputs, stride=stride)
        self.second = ConvNorm(outputs, outputs)
        same_shape = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same_shape else ConvNorm(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return `relu(shortcut(x) + second(relu(first(x))))`."""
        return torch.relu(self.second(torch.relu(self.first(x))) + self.shortcut(x))


class _ImageClassifier(nn.Module):
    """Stages, then global average pooling, then a dense layer."""

    stages: nn.Sequential

    def _add_head(self, width: int, num_classes: int, dropout: float) -> None:
        self.dropout = Dropout(dropout, 0)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of each image, (B, num_classes)."""
        x = (x if x.dim() == 4 else x[:, None]).to(self.head.weight.dtype)
        return self.head(self.dropout(self.stages(x).mean((2, 3))))


class CNN(_ImageClassifier):
    """A stack of convolutions.

    >>> CNN.from_config(CNNConfig(widths=(4, 8), num_classes=10), seed=0)(torch.ones(3, 8, 8)).shape
    torch.Size([3, 10])
    """

    def __init__(self, config: CNNConfig) -> None:
        super().__init__()
        self.config, inputs = config, config.in_channels
        layers: list[nn.Module] = []
        for index, width in enumerate(config.widths):
            if index:
                layers.append(nn.MaxPool2d(2, ceil_mode=True))
            for _ in range(2):
                layers += [ConvNorm(inputs, width), nn.ReLU()]
                inputs = width
        self.stages = nn.Sequential(*layers)
        self._add_head(inputs, config.num_classes, config.dropout)

    @staticmethod
    def from_config(config: CNNConfig, *, seed: int) -> CNN:
        """Build a model with randomly initialized weights."""
        return kaiming_init_(CNN(config), seed)


class ResNet(_ImageClassifier):
    """A residual network for small images: no pooling after the first convolution.

    >>> model = ResNet.from_config(ResNetConfig(widths=(4, 8), num_classes=10), seed=0)
    >>> model(torch.ones(3, 8, 8)).shape
    torch.Size([3, 10])
    """

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.config, inputs = config, config.widths[0]
        layers: list[nn.Module] = [ConvNorm(config.in_channels, inputs), nn.ReLU()]
        for index, width in enumerate(config.widths):
            for block in range(config.blocks_per_stage):
                layers.append(ResidualBlock(inputs, width, 2 if index and not block else 1))
                inputs = width
        self.stages = nn.Sequential(*layers)
        self._add_head(inputs, config.num_classes, config.dropout)

    @staticmethod
    def from_config(config: ResNetConfig, *, seed: int) -> ResNet:
        """Build a model with randomly initialized weights."""
        return kaiming_init_(ResNet(config), seed)
