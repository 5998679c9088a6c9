"""Optimizers that update the weights of a model a few megabytes at a time.

An update by `torch._foreach_*` allocates temporaries as large as its inputs. For a whole model
these are fresh memory in every step, which the operating system has to clear, and no pass finds in
the cache what the pass before it wrote. `ChunkedOptimizer` is the base class of optimizers that use
these functions.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

CHUNK_BYTES = 2**24


def chunk_by_bytes(weights: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield lists of weights of at most `CHUNK_BYTES` in total; a larger weight is alone.

    >>> import torch
    >>> [len(chunk) for chunk in chunk_by_bytes(torch.zeros(5, 2**21))]
    [2, 2, 1]
    """
    chunk: list[Tensor] = []
    size = 0
    for weight in weights:
        if chunk and size + weight.nbytes > CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append(weight)
        size += weight.nbytes
    if chunk:
        yield chunk


class ChunkedOptimizer(Optimizer):
    """An optimizer that updates its weights chunk by chunk."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the weights by their gradients."""
        for group in self.param_groups:
            for weights in chunk_by_bytes(w for w in group["params"] if w.grad is not None):
                self.apply_update(group, weights, [weight.grad for weight in weights])

    def apply_update(self, group: dict[str, Any], weights: list[Tensor], grads: list[Any]) -> None:
        """Update these weights of a group in place."""
        raise NotImplementedError

    def states(self, weights: list[Tensor], key: str) -> list[Tensor]:
        """Return this state of each weight; it is initialized to zeros."""
        for weight in weights:
            if key not in self.state[weight]:
                self.state[weight][key] = torch.zeros_like(weight)
        return [self.state[weight][key] for weight in weights]
