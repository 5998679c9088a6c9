"""Inputs to try an op on: realistic ones and nasty ones.

A record's `samples` is a generator that takes a `TensorMaker` and yields `SampleInput`s.
`TensorMaker` fixes dtype, device and random stream, so that one generator serves every dtype and
the same sample has the same numbers in each of them (up to rounding).

Every record has at least the samples in `REQUIRED_SAMPLES`: the shapes at which kernels break.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

REQUIRED_SAMPLES = {
    "typical": "a shape from a real model, made small",
    "large": "several tiles of any kernel, and a rest",
    "odd": "sizes that are no multiple of any vector or tile",
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
    """Makes tensors of one dtype on one device from one random stream.

    >>> make = TensorMaker(torch.float32)
    >>> make(2, 3).shape, make.ints(10, 2, 3).dtype
    (torch.Size([2, 3]), torch.int64)
    """

    def __init__(self, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> None:
        self.dtype = dtype
        self.device = device
        self._random = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Normally distributed values, contiguous."""
        # Drawn in float32 whatever the dtype, so that every dtype sees the same numbers.
        values = torch.randn(shape, generator=self._random) * scale
        return values.to(self.device, self.dtype)

    def strided(self, *shape: int) -> Tensor:
        """As a call, but a view with gaps: every second column of a wider tensor."""
        return self(*shape[:-1], 2 * shape[-1])[..., ::2]

    def spread(self, *shape: int, low: int = -8, high: int = 4) -> Tensor:
        """Magnitudes from `2**low` to `2**high`, with signs."""
        exponents = torch.rand(shape, generator=self._random) * (high - low) + low
        return self(*shape) * exponents.exp2().to(self.device, self.dtype)

    def ints(self, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Integers from 0 to `high`, exclusive."""
        values = torch.randint(high, shape, generator=self._random)
        return values.to(self.device, dtype)

    def bools(self, *shape: int) -> Tensor:
        """True or false, evenly."""
        return self.ints(2, *shape).bool()

    def tensor(self, values: Sequence[Any], dtype: torch.dtype = torch.int64) -> Tensor:
        """The given values in the given dtype."""
        return torch.tensor(values, dtype=dtype, device=self.device)

    def floats(self, values: Sequence[float]) -> Tensor:
        """The given values in float32, whatever the dtype of the sample."""
        return self.tensor(values, torch.float32)
