"""Coordinate descent: improve a quantized weight, one scale and one integer at a time.

GPTQ rounds each channel once, with scales that were chosen before. Given all of its integers, the
error of the layer, tr(E H E^T) for the difference E of the weights, has a minimum in closed form in
any single scale s or integer q. With R = E H and the values v = q - zero of the channels c of a
group, these are

    s + (v_c . R_c) / (v_c H_cc v_c^T)    and    q + R_i / (H_ii s), rounded,

and R changes by a multiple of rows of H. A sweep visits each group: its scale, then its integers.
In SmolLM2 in int4, four sweeps reduce the squared error of its layers by 11 %, and the KL
divergence of the model from 0.063 to 0.058.

Legend: N rows (output channels), D channels, G groups, C channels of a group.

References: Behdin et al. 2023 (QuantEase), Nair and Suggala 2024 (CDQuant).
"""

# pyright: basic
from __future__ import annotations

import torch
from torch import Tensor

from ingot.nn.formats import Grid

_BLOCK = 128  # channels whose changes are applied to the rest together


def descend(
    weight_ND: Tensor, hessian_DD: Tensor, grid: Grid, q_ND: Tensor, scale_dtype: torch.dtype
) -> tuple[Grid, Tensor]:
    """Return scales and integers after one sweep.

    >>> weight, hessian = torch.tensor([[2.2, 3.3, 4.4]]), torch.eye(3)
    >>> grid = Grid(torch.ones(1, 1), torch.zeros(1, 1), 0, 15)
    >>> grid, q = descend(weight, hessian, grid, grid.round(weight), torch.float32)
    >>> grid.scale_NG, q
    (tensor([[1.1000]]), tensor([[2., 3., 4.]]))
    """
    # One row per channel, so that the loops read contiguous memory.
    scale_GN, zero_GN = grid.scale_NG.T.contiguous(), grid.zero_NG.T.contiguous()
    q_DN = q_ND.T.contiguous()
    gradient_DN = hessian_DD @ (weight_ND - grid.decode(q_ND)).T
    group = len(q_DN) // len(scale_GN)
    for index, (scale_N, zero_N) in enumerate(zip(scale_GN, zero_GN, strict=True)):
        first, last = index * group, (index + 1) * group
        channels = slice(first, last)
        values_CN = q_DN[channels] - zero_N
        step_N = _scale_step(values_CN, gradient_DN[channels], hessian_DD[channels, channels])
        new_scale_N = (scale_N + step_N).to(scale_dtype).float()
        values_CN *= scale_N - new_scale_N
        gradient_DN[first:].addmm_(hessian_DD[first:, channels], values_CN)
        scale_N.copy_(new_scale_N)
        for begin in range(first, last, _BLOCK):
            end = min(begin + _BLOCK, last)
            block = slice(begin, end)
            change_BN = _step_integers(
                q_DN[block], gradient_DN[block], hessian_DD[block, block], scale_N, grid
            )
            gradient_DN[end:].addmm_(hessian_DD[end:, block], change_BN)
    return grid._replace(scale_NG=scale_GN.T), q_DN.T


def _scale_step(values_CN: Tensor, gradient_CN: Tensor, hessian_CC: Tensor) -> Tensor:
    """Return what to add to the scale of each row; 0 if all values are."""
    curvature_N = ((hessian_CC @ values_CN) * values_CN).sum(0)
    step_N = (values_CN * gradient_CN).sum(0) / curvature_N
    return torch.where(curvature_N > 0, step_N, 0)


def _step_integers(
    q_BN: Tensor, gradient_BN: Tensor, hessian_BB: Tensor, scale_N: Tensor, grid: Grid
) -> Tensor:
    """Choose the best integer of one channel after the other, in place.

    Returns:
        What is added to the difference of the weights.
    """
    inverse_N = torch.where(scale_N == 0, 0, 1 / scale_N)
    change_BN = torch.empty_like(q_BN)
    for i, row_B in enumerate(hessian_BB):
        q_N = (gradient_BN[i] * (inverse_N / row_B[i])).add_(q_BN[i]).round_()
        q_N.clamp_(grid.low, grid.high)
        change_BN[i] = (q_BN[i] - q_N).mul_(scale_N)
        q_BN[i] = q_N
        gradient_BN[i + 1 :].addr_(row_B[i + 1 :], change_BN[i])
    return change_BN
