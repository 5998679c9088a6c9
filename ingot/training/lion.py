"""Lion: update by the sign of the momentum (Chen et al. 2023, Symbolic Discovery of Optimization
Algorithms).

With g the gradient, m the momentum (0 at first), lr the learning rate and d the weight decay:

    c = b1 m + (1 - b1) g
    w = w - lr (sign(c) + d w)
    m = b2 m + (1 - b2) g

It keeps one state per weight, half of Adam's. Every weight changes by lr, so choose lr 3 to 10
times smaller than for Adam, and the weight decay larger by the same factor.
"""

# pyright: basic, reportPrivateImportUsage=false
# torch's own optimizers are written with `torch._foreach_*`; it has no public names for them.
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ingot.training.chunked import ChunkedOptimizer


class Lion(ChunkedOptimizer):
    """Lion for parameter groups, each with its `lr` and `weight_decay`.

    >>> weight = torch.nn.Parameter(torch.tensor([1.0, -1.0]))
    >>> optimizer = Lion([weight], lr=0.1)
    >>> weight.grad = torch.tensor([5.0, 0.01])
    >>> optimizer.step()
    >>> weight.detach()
    tensor([ 0.9000, -1.1000])
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def apply_update(self, group: dict[str, Any], weights: list[Tensor], grads: list[Any]) -> None:
        """Update these weights of a group in place."""
        momenta, (b1, b2) = self.states(weights, "exp_avg"), group["betas"]
        updates = torch._foreach_lerp(momenta, grads, 1 - b1)
        torch._foreach_sign_(updates)
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(weights, updates, alpha=-group["lr"])
        torch._foreach_lerp_(momenta, grads, 1 - b2)
