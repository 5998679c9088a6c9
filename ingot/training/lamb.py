"""LAMB: Adam with the update of each layer scaled to the norm of its weights (You et al. 2019,
Large Batch Optimization for Deep Learning: Training BERT in 76 minutes).

With g the gradient, t the step counted from 1, d the weight decay and |.| the norm of a tensor:

    m = b1 m + (1 - b1) g            v = b2 v + (1 - b2) g^2
    r = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
    u = r + d w
    w = w - lr |w| / |u| u

The trust ratio |w| / |u| is 1 where either norm is 0, and in groups with `use_trust_ratio=False`:
biases and the weights of norms, which the authors' code also excludes.
"""

# pyright: basic, reportPrivateImportUsage=false
# torch's own optimizers are written with `torch._foreach_*`; it has no public names for them.
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ingot.training.chunked import ChunkedOptimizer


def trust_ratios(weights: list[Tensor], updates: list[Tensor]) -> list[Tensor]:
    """Return |w| / |u| of each tensor; 1 where one of them is 0.

    >>> trust_ratios([torch.tensor([3.0, 4.0])], [torch.tensor([0.0, 2.0])])
    [tensor(2.5000)]
    """
    w = torch.stack(list(torch._foreach_norm(weights)))
    u = torch.stack(list(torch._foreach_norm(updates)))
    return list(torch.where((w > 0) & (u > 0), w / u, 1.0).unbind())


class LAMB(ChunkedOptimizer):
    """LAMB for parameter groups, each with its `lr`, `weight_decay` and `use_trust_ratio`.

    >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> optimizer = LAMB([weight], lr=0.1)
    >>> weight.grad = torch.tensor([0.0, 2.0])
    >>> optimizer.step()
    >>> weight.detach()
    tensor([3.0000, 3.5000])
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        use_trust_ratio: bool = True,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps}
        super().__init__(
            params, {**options, "weight_decay": weight_decay, "use_trust_ratio": use_trust_ratio}
        )

    def apply_update(self, group: dict[str, Any], weights: list[Tensor], grads: list[Any]) -> None:
        """Update these weights of a group in place."""
        updates = self._updates(group, weights, grads)
        if group["use_trust_ratio"]:
            torch._foreach_mul_(updates, trust_ratios(weights, updates))
        torch._foreach_add_(weights, updates, alpha=-group["lr"])

    def _updates(
        self, group: dict[str, Any], weights: list[Tensor], grads: list[Any]
    ) -> list[Tensor]:
        means, squares = self.states(weights, "exp_avg"), self.states(weights, "exp_avg_sq")
        steps = [self.state[p].setdefault("step", torch.zeros(())) for p in weights]
        (b1, b2), eps = group["betas"], group["eps"]
        torch._foreach_add_(steps, 1)
        torch._foreach_lerp_(means, grads, 1 - b1)
        torch._foreach_mul_(squares, b2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - b2)
        counts = [float(step) for step in steps]
        scales = torch._foreach_div(squares, [1 - b2**t for t in counts])
        torch._foreach_sqrt_(scales)
        torch._foreach_add_(scales, eps)
        updates = torch._foreach_div(means, [1 - b1**t for t in counts])
        torch._foreach_div_(updates, scales)
        torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
        return list(updates)
