"""Datasets that fit into memory: a sample is a row of x and its y.

Legend: N samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ingot.core.errors import DataError
from ingot.data.permutation import shuffled_indices
from ingot.data.transfer import copy_to_device

_SPLIT = 0x5EED  # the split does not depend on the seed of a run


@dataclass(frozen=True)
class ArrayBatch:
    """Samples: rows of `x` and `y`, and their indices in the dataset."""

    x: Tensor
    y: Tensor
    sample_ids: list[int]

    def to(self, device: torch.device) -> ArrayBatch:
        """Return the batch on a device."""
        x, y = copy_to_device(device, self.x, self.y)
        return replace(self, x=x, y=y)


@dataclass(frozen=True)
class ArrayDataset:
    """Arrays of samples; `y` is the class or value of each.

    >>> ArrayDataset(torch.zeros(3, 2), torch.arange(3)).batch([2, 0]).y
    tensor([2, 0])
    """

    x: Tensor
    y: Tensor

    def __post_init__(self) -> None:
        if not self.x.dim() or not self.y.dim() or len(self.x) != len(self.y):
            raise DataError(
                f"x and y must have the same number of rows, got shapes {tuple(self.x.shape)} and "
                f"{tuple(self.y.shape)}",
                hint="give one row of each for every sample",
            )

    def __len__(self) -> int:
        return len(self.x)

    def batch(self, indices: Sequence[int]) -> ArrayBatch:
        """Return the samples of these indices, in this order."""
        ids = list(indices)
        rows = torch.tensor(ids, dtype=torch.int64)
        return ArrayBatch(self.x[rows], self.y[rows], ids)

    def split(self, fraction: float) -> tuple[ArrayDataset, ArrayDataset]:
        """Split into training samples and this fraction for validation.

        Which ones depends on how many there are and on nothing else.

        >>> [len(part) for part in ArrayDataset(torch.zeros(10, 2), torch.arange(10)).split(0.2)]
        [8, 2]
        """
        held = round(len(self) * fraction)
        if not 0 < held < len(self):
            raise DataError(
                f"fraction: neither split may be empty, got {fraction} of {len(self)} samples",
                hint="give a fraction between 0 and 1 that selects at least one sample",
            )
        rows = torch.from_numpy(shuffled_indices(0, len(self), len(self), _SPLIT))  # pyright: ignore
        kept, out = rows[held:].sort().values, rows[:held].sort().values
        return ArrayDataset(self.x[kept], self.y[kept]), ArrayDataset(self.x[out], self.y[out])


def xor() -> ArrayDataset:
    """Return the four cases of exclusive or, which a linear model cannot learn.

    >>> xor().x.shape, xor().y
    (torch.Size([4, 2]), tensor([0, 1, 1, 0]))
    """
    return ArrayDataset(
        torch.tensor([[0.0, 0], [0, 1], [1, 0], [1, 1]]), torch.tensor([0, 1, 1, 0])
    )
