"""`adamw` by PyTorch's own fused kernel, where all tensors have one dtype and nothing is scaled."""

# pyright: basic
from __future__ import annotations

import torch
from torch import Tensor

from ingot import ops
from ingot.kernels.aten import aten
from ingot.ops.arguments import tensors


def _fits(*args: object) -> bool:
    found, grad_scale = tensors(args), args[-1]
    one_dtype = len({t.dtype for t in found}) == 1  # and so there is no `master_lo`
    return grad_scale == 1.0 and one_dtype and all(t.is_contiguous() for t in found)


@aten(ops.adamw, supports=_fits)
def adamw(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    master_lo: list[Tensor],
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    grad_scale: float,
) -> None:
    """One call; each tensor has its own count of steps there, which is read only."""
    count = torch.tensor(float(step), device=params[0].device)
    torch.ops.aten._fused_adamw_(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        [count] * len(params),
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )
