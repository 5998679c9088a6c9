"""The weights of a model, a few megabytes at a time.

An update by `torch._foreach_*` makes temporaries as large as what it is given. For a whole model
these are new pages at every step, which the kernel has to clear, and nothing of one pass is in a
cache for the next. `ChunkedOptimizer` is what our optimizers that work so have in common.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

CHUNK_BYTES = 2**24  # bytes


def chunk_by_bytes(weights: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """The weights in lists of at most `CHUNK_BYTES` bytes; or one alone.

    >>> import torch
    >>> [len(chunk) for chunk in chunk_by_bytes(torch.zeros(5, 2**21))]
    [2, 2, 1]
    """
    held: list[Tensor] = []
    size = 0
    for weight in weights:
        if held and size + weight.nbytes > CHUNK_BYTES:
            yield held
            held, size = [], 0
        held.append(weight)
        size += weight.nbytes
    if held:
        yield held


class ChunkedOptimizer(Optimizer):
    """An optimizer that updates its weights chunk by chunk."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Move the weights by their gradients."""
        for group in self.param_groups:
            for weights in chunk_by_bytes(w for w in group["params"] if w.grad is not None):
                self.apply_update(group, weights, [weight.grad for weight in weights])

    def apply_update(self, group: dict[str, Any], weights: list[Tensor], grads: list[Any]) -> None:
        """Move these weights of a group."""
        raise NotImplementedError

    def states(self, weights: list[Tensor], key: str) -> list[Tensor]:
        """The state of this name of each weight, 0 at first."""
        for weight in weights:
            if key not in self.state[weight]:
                self.state[weight][key] = torch.zeros_like(weight)
        return [self.state[weight][key] for weight in weights]
