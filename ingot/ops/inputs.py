"""Sample inputs of ops for tests: realistic ones and edge cases.

A record's `samples` is a generator that takes a `TensorMaker` and yields `SampleInput`s. The
`TensorMaker` has the dtype, device and random stream, so that one generator is used for every dtype
and a sample has the same values in each of them, up to rounding.

Every record has at least the samples in `REQUIRED_SAMPLES`: the shapes at which kernels break.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

REQUIRED_SAMPLES = {
    "typical": "a shape as in a real model, but smaller",
    "large": "several tiles of any kernel, and a remainder",
    "odd": "sizes that are not multiples of any vector or tile",
    "one_row": "a single token",
    "strided": "inputs that are not contiguous",
    "extreme": "large and tiny magnitudes, near the dtype's limits where the op allows it",
}


@dataclass(frozen=True)
class SampleInput:
    """One call of an op: a name and its positional arguments.

    >>> SampleInput("one_row", (torch.ones(1, 4),)).name
    'one_row'
    """

    name: str
    args: tuple[Any, ...]


class TensorMaker:
    """Creates tensors of one dtype on one device from one random stream.

    >>> make = TensorMaker(torch.float32)
    >>> make(2, 3).shape, make.ints(10, 2, 3).dtype
    (torch.Size([2, 3]), torch.int64)
    """

    def __init__(self, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> None:
        self.dtype = dtype
        self.device = device
        self._random = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Return normally distributed values, contiguous."""
        # Generated in float32 for every dtype, so that all dtypes have the same values.
        values = torch.randn(shape, generator=self._random) * scale
        return values.to(self.device, self.dtype)

    def strided(self, *shape: int) -> Tensor:
        """Return a strided view: every second column of a wider tensor."""
        return self(*shape[:-1], 2 * shape[-1])[..., ::2]

    def spread(self, *shape: int, low: int = -8, high: int = 4) -> Tensor:
        """Return values with magnitudes from `2**low` to `2**high` and random signs."""
        exponents = torch.rand(shape, generator=self._random) * (high - low) + low
        return self(*shape) * exponents.exp2().to(self.device, self.dtype)

    def ints(self, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Return random integers from 0 to `high`, exclusive."""
        values = torch.randint(high, shape, generator=self._random)
        return values.to(self.device, dtype)

    def bools(self, *shape: int) -> Tensor:
        """Return random bools, equally likely."""
        return self.ints(2, *shape).bool()

    def tensor(self, values: Sequence[Any], dtype: torch.dtype = torch.int64) -> Tensor:
        """Return these values in this dtype."""
        return torch.tensor(values, dtype=dtype, device=self.device)

    def floats(self, values: Sequence[float]) -> Tensor:
        """Return these values in float32, for every dtype of the sample."""
        return self.tensor(values, torch.float32)
