"""Compares the weights of replicas: a wrong bit in one of them is found, and its rank is named.

Replicas compute the same update of the same weights, so that their bits are equal after every step.
A processor or memory that makes an error breaks this for one of them. An error in a gradient before
the sum over the ranks reaches all replicas alike and is not found.
"""

# pyright: basic, reportPrivateImportUsage=false
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ingot.core.errors import IngotError
from ingot.parallel.mesh import Mesh

_Row = Sequence[float]


class ReplicaError(IngotError):
    """Replicas whose weights are not bitwise equal."""


def check_replicas(mesh: Mesh, tensors: Iterable[Tensor], step: int) -> None:
    """Raise a `ReplicaError` on every rank if a rank's tensors differ from its replicas'."""
    if mesh.dp.size == 1:
        return
    high, low = divmod(checksum(tensors), 2**32)
    shard = (mesh.pp.rank, mesh.fsdp.rank, mesh.tp.rank)
    differing = find_differing(mesh.world.gather([*shard, high, low]))
    if differing:
        names = ", ".join(map(str, differing))
        raise ReplicaError(
            f"step {step}: the weights of rank {names} differ from those of other replicas",
            hint="its processor or memory has made an error: replace the machine, then continue "
            "with --resume from the checkpoint before",
        )


def checksum(tensors: Iterable[Tensor]) -> int:
    """Return a sum of all bits, which every changed bit changes.

    >>> checksum([torch.zeros(3)]), checksum([torch.tensor([0.0, -0.0, 0.0])]) == 2**64 - 2**31
    (0, True)
    """
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    total = 0
    for tensor in tensors:
        bits = tensor.detach().contiguous().view(integers[tensor.element_size()])
        total += int(bits.sum(dtype=torch.int64))
    return total % 2**64


def find_differing(rows: Sequence[_Row]) -> list[int]:
    """Return the ranks whose checksum is not that of most ranks with the same shard.

    A row has the shard of a rank and its checksum. If no value has a majority, all are returned.

    >>> find_differing([(0, 0, 0, 7, 7), (0, 0, 0, 7, 8), (0, 0, 0, 7, 7)])
    [1]
    >>> find_differing([(0, 0, 0, 7, 7), (0, 0, 0, 7, 8)])
    [0, 1]
    """
    differing: list[int] = []
    for shard in sorted({tuple(row[:3]) for row in rows}):
        members = {rank: tuple(row[3:]) for rank, row in enumerate(rows) if tuple(row[:3]) == shard}
        ((value, count), *others) = Counter(members.values()).most_common()
        if others:
            majority = 2 * count > len(members)
            differing += [rank for rank, own in members.items() if not majority or own != value]
    return sorted(differing)
