"""LARS: momentum with the update of each layer scaled to the norm of its weights (You et al. 2017,
Large Batch Training of Convolutional Networks).

With g the gradient, d the weight decay, q the trust coefficient and |.| the norm of a tensor:

    r = q |w| / (|g| + d |w|)
    v = b v + lr r (g + d w)
    w = w - v

Where |w| or |g| is 0, r is 1. Groups with `use_trust_ratio=False` (biases, norms) use r = 1.
"""

# pyright: basic, reportPrivateImportUsage=false
# torch's own optimizers are written with `torch._foreach_*`; it has no public names for them.
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ingot.training.chunked import ChunkedOptimizer


class LARS(ChunkedOptimizer):
    """LARS for parameter groups, each with its `lr`, `weight_decay` and `use_trust_ratio`.

    >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> optimizer = LARS([weight], lr=1.0, trust_coefficient=0.1)
    >>> weight.grad = torch.tensor([0.0, 2.0])
    >>> optimizer.step()
    >>> weight.detach()
    tensor([3.0000, 3.5000])
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1.0,
        momentum: float = 0.9,
        trust_coefficient: float = 1e-3,
        weight_decay: float = 0.0,
        use_trust_ratio: bool = True,
    ) -> None:
        options = {"lr": lr, "momentum": momentum, "trust_coefficient": trust_coefficient}
        super().__init__(
            params, {**options, "weight_decay": weight_decay, "use_trust_ratio": use_trust_ratio}
        )

    def apply_update(self, group: dict[str, Any], weights: list[Tensor], grads: list[Any]) -> None:
        """Update these weights of a group in place."""
        velocities = self.states(weights, "momentum_buffer")
        updates = torch._foreach_add(grads, weights, alpha=group["weight_decay"])
        if group["use_trust_ratio"]:
            torch._foreach_mul_(updates, _trust_ratios(group, weights, grads))
        torch._foreach_mul_(velocities, group["momentum"])
        torch._foreach_add_(velocities, updates, alpha=group["lr"])
        torch._foreach_sub_(weights, velocities)


def _trust_ratios(group: dict[str, Any], weights: list[Tensor], grads: list[Any]) -> list[Tensor]:
    w = torch.stack(list(torch._foreach_norm(weights)))
    g = torch.stack(list(torch._foreach_norm(grads)))
    ratios = group["trust_coefficient"] * w / (g + group["weight_decay"] * w)
    return list(torch.where((w > 0) & (g > 0), ratios, 1.0).unbind())
