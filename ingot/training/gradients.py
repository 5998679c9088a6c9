"""Gradients of a global batch, summed in an order that does not depend on the number of ranks.

The micro-batches of a global batch are divided into shards, `parallel.batch_shards` in the recipe:

    shard        the sum of its micro-batches, one after another
    global batch the sum of its shards, pairwise: ((s0 + s1) + (s2 + s3)) + ...

Rank r of w computes the shards r, r + w, r + 2 w, ... Those that the ranks compute at the same time
are a subtree, which they sum together (`ingot.parallel.ranks`); what follows is summed here. So the
sum has the same bits on any number of ranks that divides the number of shards.

A partial sum waits for its other half, so up to log2(shards) of them are stored at a time.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

MAX_DEFAULT_SHARDS = 8


class GradientSum:
    """Gradients by name, of as many shards as were ended.

    >>> import torch
    >>> grads = GradientSum()
    >>> for number in (1.0, 2.0, 3.0):
    ...     grads.add("w", torch.tensor([number]))
    ...     grads.end_shard()
    >>> grads.total()
    {'w': tensor([6.])}
    """

    def __init__(self) -> None:
        self._shard: dict[str, Tensor] = {}
        self._sums: list[tuple[int, dict[str, Tensor]]] = []

    def add(self, name: str, grad: Tensor) -> None:
        """Add the gradient of a micro-batch to the current shard."""
        _add(self._shard, name, grad)

    def end_shard(self, round: Callable[[str, Tensor], Tensor] | None = None) -> None:
        """Add the current shard, rounded first, to those before; sums of as many are joined."""
        if round is not None:
            self._shard = {name: round(name, grad) for name, grad in self._shard.items()}
        self._sums.append((1, self._shard))
        self._shard = {}
        while len(self._sums) > 1 and self._sums[-2][0] == self._sums[-1][0]:
            self._join()

    def total(self) -> dict[str, Tensor]:
        """Return the sum of all shards, and forget them."""
        if self._shard:
            self.end_shard()
        while len(self._sums) > 1:
            self._join()
        return self._sums.pop()[1] if self._sums else {}

    def clear(self) -> None:
        """Forget all gradients."""
        self._shard, self._sums = {}, []

    def _join(self) -> None:
        count, right = self._sums.pop()
        left_count, left = self._sums.pop()
        for name in list(right):
            _add(left, name, right.pop(name))
        self._sums.append((left_count + count, left))


def _add(grads: dict[str, Tensor], name: str, grad: Tensor) -> None:
    so_far = grads.get(name)
    grads[name] = grad if so_far is None else so_far.float().add_(grad)


def default_shards(micro_batches: int) -> int:
    """Return the number of shards of a batch: the largest power of two up to 8 that divides it.

    >>> [default_shards(count) for count in (1, 2, 3, 12, 64)]
    [1, 2, 1, 4, 8]
    """
    return min(MAX_DEFAULT_SHARDS, micro_batches & -micro_batches)
