"""`adamw` with PyTorch's fused kernel, if all tensors have one dtype and `grad_scale` is 1."""

# pyright: basic
from __future__ import annotations

import torch
from torch import Tensor

from ingot import ops
from ingot.kernels.aten import aten
from ingot.ops.arguments import tensors


def _supports(*args: object) -> bool:
    values, (grad_scale, row_stats) = tensors(args), args[-2:]
    one_dtype = len({t.dtype for t in values}) == 1  # which excludes `master_lo`
    plain = grad_scale == 1.0 and row_stats is None
    return plain and one_dtype and all(t.is_contiguous() for t in values)


@aten(ops.adamw, supports=_supports)
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
    row_stats: None,
) -> None:
    """Make one fused call. It takes a step count per tensor, which it only reads."""
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
