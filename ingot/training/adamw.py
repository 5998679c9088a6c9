"""AdamW on the fused op `ingot.ops.adamw`, which documents the formula.

The weights are in float32, or they are the bfloat16 weights of a model with the low 16 bits of each
master weight (see `ingot.training.precision`). Gradients have the dtype of the weight or are in
float32, and are scaled inside the op. So an update reads and writes every tensor once and allocates
none.

The class has `param_groups` and `state` like torch's optimizers but does not derive from
`torch.optim.Optimizer`: constructing one loads torch's compiler, 140 MB and a second.

The moments are in float32 or in bfloat16. With bfloat16 a weight takes 10 bytes instead of 14
(weight, gradient and low bits take 2 each, the moments 4 instead of 8). DeepSeek-V3 (2024) was
trained with bfloat16 moments.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ingot import ops
from ingot.ops.adamw import ROW_STATS, num_rows

STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class AdamW:
    """AdamW for parameter groups `{"params": [...]}`, which may override the options.

    `low_bits` maps bfloat16 weights to the low 16 bits of their master weights.

    >>> weight = torch.tensor([1.0, -1.0])
    >>> optimizer = AdamW([{"params": [weight]}], lr=0.1)
    >>> optimizer.apply_update({weight: (torch.tensor([5.0, 0.01]), 1.0)})
    >>> weight
    tensor([ 0.9000, -1.1000])
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        state_dtype: str = "fp32",
        low_bits: Mapping[Tensor, Tensor] | None = None,
    ) -> None:
        shared = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        self.param_groups = [{**shared, **group} for group in groups]
        self._low_bits = low_bits or {}
        # Allocated here and not in the first step, between whose activations they would fragment
        # the heap: measured 0.1 GB more for GPT-2 124M.
        weights = (weight for group in self.param_groups for weight in group["params"])
        self.state = {weight: _init_state(weight, STATE_DTYPES[state_dtype]) for weight in weights}

    @torch.no_grad()
    def apply_update(
        self,
        grads: Mapping[Tensor, tuple[Tensor, float]],
        row_stats: dict[Tensor, Tensor] | None = None,
    ) -> None:
        """Update weights by their gradients; each gradient comes with a factor that scales it.

        Weights with the same step and factor are updated by one call of the op. `row_stats` gets
        the sums over the rows of each weight, see `ingot.ops.adamw`.
        """
        for group in self.param_groups:
            calls: dict[tuple[int, float], list[Tensor]] = {}
            for weight in (weight for weight in group["params"] if weight in grads):
                state = self.state[weight]
                state["step"] += 1
                calls.setdefault((int(state["step"]), grads[weight][1]), []).append(weight)
            beta1, beta2 = group["betas"]
            for (step, factor), weights in calls.items():
                rows = [num_rows(weight) for weight in weights]
                stats = None
                if row_stats is not None:
                    stats = torch.empty(sum(rows), len(ROW_STATS))
                    row_stats |= dict(zip(weights, stats.split(rows), strict=True))
                ops.adamw(
                    weights,
                    [_to_op_dtype(grads[weight][0], weight) for weight in weights],
                    [self.state[weight]["exp_avg"] for weight in weights],
                    [self.state[weight]["exp_avg_sq"] for weight in weights],
                    [self._low_bits[weight] for weight in weights] if self._low_bits else [],
                    step,
                    group["lr"],
                    beta1,
                    beta2,
                    group["eps"],
                    group["weight_decay"],
                    factor,
                    stats,
                )
                # The op is opaque to autograd, which would not notice that they have changed.
                torch.autograd.graph.increment_version(weights)


def _init_state(weight: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the state of a weight before its first step, with torch's keys."""
    moments = {name: torch.zeros_like(weight, dtype=dtype) for name in ("exp_avg", "exp_avg_sq")}
    return {"step": torch.zeros((), dtype=torch.int64), **moments}


def _to_op_dtype(grad: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient in a dtype that the op takes: float16 ones are converted to float32."""
    return grad if grad.dtype == weight.dtype else grad.float()
