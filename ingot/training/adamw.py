"""AdamW through our own op, `ingot.ops.adamw`, where its formula is.

The weights are in float32, or they are the bfloat16 weights of a model, each with the lower half of
its master (see `ingot.training.precision`). Gradients are taken as they come, in the dtype of the
weight or in float32, and multiplied by their factors within the op. So an update reads and writes
everything once, and makes no copy of anything.

It has `param_groups` and `state` as torch's optimizers have, and is none of them: making one loads
torch's compiler, 140 MB and a second.

Moments are in float32, or in bfloat16: 4 bytes a weight less, of what it takes 14 to hold (weight,
gradient, lower half and moments; 2 + 2 + 2 + 8). DeepSeek-V3 (2024) was trained so.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ingot import ops

STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class AdamW:
    """AdamW over groups of parameters, `{"params": [...]}`, which may have options of their own.

    `low` has the lower halves of all weights, if they have some.

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
        # Now and not at the first step: between what a step leaves they would make it holes, and
        # what fits into none of them, 0.1 GB for GPT-2 124M.
        weights = (weight for group in self.param_groups for weight in group["params"])
        self.state = {weight: _fresh(weight, STATE_DTYPES[state_dtype]) for weight in weights}

    @torch.no_grad()
    def apply_update(self, grads: Mapping[Tensor, tuple[Tensor, float]]) -> None:
        """Move weights by gradients and what these are multiplied by.

        One call of the op takes all weights that have the same numbers.
        """
        for group in self.param_groups:
            calls: dict[tuple[int, float], list[Tensor]] = {}
            for weight in (weight for weight in group["params"] if weight in grads):
                state = self.state[weight]
                state["step"] += 1
                calls.setdefault((int(state["step"]), grads[weight][1]), []).append(weight)
            beta1, beta2 = group["betas"]
            for (step, factor), weights in calls.items():
                ops.adamw(
                    weights,
                    [_fitting(grads[weight][0], weight) for weight in weights],
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
                )


def _fresh(weight: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """The state of a weight before its first step, by torch's names."""
    moments = {name: torch.zeros_like(weight, dtype=dtype) for name in ("exp_avg", "exp_avg_sq")}
    return {"step": torch.zeros((), dtype=torch.int64), **moments}


def _fitting(grad: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient in a dtype that the op takes: float16 ones are converted to float32."""
    return grad if grad.dtype == weight.dtype else grad.float()
