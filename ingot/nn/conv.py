"""Image classifiers: a stack of convolutions, and a residual network.

A layer is a convolution, a batch norm and a ReLU. In evaluation an image has the same logits, bit
for bit, in any batch: a convolution is `ops.linear` of the image's patches (im2col), with the batch
norm folded into its weight, and the average of a channel is a linear layer, too. In training, where
a batch norm depends on the batch in any case, convolutions are torch's.

An image is (channels, height, width) or, with one channel, (height, width).

Legend: B images, C channels, H rows, W columns, K elements of a patch, L patches.
"""

# pyright: basic
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ingot import ops
from ingot.core.config import check_bounds
from ingot.core.errors import ConfigError
from ingot.nn.dense import kaiming_init_
from ingot.nn.dropout import Dropout
from ingot.nn.linear import Linear, init_normal_

_PATCH_ELEMENTS = 2**21


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


class _Conv2d(nn.Conv2d):
    def reset_parameters(self) -> None:
        init_normal_(self.weight)  # `kaiming_init_` follows, or a file is read


class ConvNorm(nn.Module):
    """A 3 x 3 (or 1 x 1) convolution and a batch norm; batch-invariant in evaluation.

    >>> ConvNorm(1, 4)(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 4, 8, 8])
    """

    def __init__(self, inputs: int, outputs: int, size: int = 3, stride: int = 1) -> None:
        super().__init__()
        self.conv = _Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve and normalize."""
        if self.training:
            return self.norm(self.conv(x))
        norm = self.norm
        mean, variance = norm.running_mean, norm.running_var
        scale = norm.weight / (variance + norm.eps).sqrt()  # pyright: ignore
        bias = norm.bias - mean * scale  # pyright: ignore
        return _convolve(x, self.conv, self.conv.weight * scale[:, None, None, None], bias)


def _convolve(x_BCHW: Tensor, conv: nn.Conv2d, weight: Tensor, bias: Tensor) -> Tensor:
    """Convolve with the stride and padding of a layer, by the matmul of all patches.

    Tensors are channels-last in memory: no layer transposes. Images are computed a few at a time,
    since their patches have 9 times their size.
    """
    size, stride, padding = conv.kernel_size[0], conv.stride[0], int(conv.padding[0])
    weight_CK = weight.permute(0, 2, 3, 1).flatten(1).contiguous()
    height, width = ((n + 2 * padding - size) // stride + 1 for n in x_BCHW.shape[2:])
    parts = list[Tensor]()
    count = max(1, _PATCH_ELEMENTS // (weight_CK.shape[1] * height * width))
    for part_BHWC in x_BCHW.permute(0, 2, 3, 1).split(count):
        padded = F.pad(part_BHWC, (0, 0, padding, padding, padding, padding))
        windows = padded.unfold(1, size, stride).unfold(2, size, stride)
        patches_BLK = windows.permute(0, 1, 2, 4, 5, 3).flatten(3).flatten(1, 2)
        parts.append(ops.linear(patches_BLK, weight_CK, bias))
    return torch.cat(parts).unflatten(1, (height, width)).permute(0, 3, 1, 2)


def _average(x_BCHW: Tensor) -> Tensor:
    """Return the average of each channel, (B, C), in one order (unlike `Tensor.mean`)."""
    x_BCL = x_BCHW.flatten(2)
    size = x_BCL.shape[2]
    return ops.linear(x_BCL.contiguous(), x_BCL.new_full((1, size), 1 / size)).squeeze(2)


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
        self.head = Linear(width, num_classes, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of each image, (B, num_classes)."""
        x = (x if x.dim() == 4 else x[:, None]).to(self.head.weight.dtype)
        return self.head(self.dropout(_average(self.stages(x))))


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
