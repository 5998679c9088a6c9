"""Coordinate descent: improve a quantized weight, one scale and one integer at a time.

GPTQ rounds each channel once, with scales that were chosen before. Given all of its integers, the
error of the layer, tr(E H E^T) for the difference E of the weights, has a minimum in closed form in
any single scale s or integer q. With R = E H and the values v = q - zero of the channels c of a
group, these are

    s + (v_c . R_c) / (v_c H_cc v_c^T)    and    q + R_i / (H_ii s), rounded,

and R changes by a multiple of rows of H. A sweep visits each group: its scale, then its integers.
In SmolLM2 in int4, three sweeps reduce the KL divergence of the model from 0.063 to 0.058.

Legend: N rows (output channels), D channels, G groups, C channels of a group.

References: Behdin et al. 2023 (QuantEase), Nair and Suggala 2024 (CDQuant).
"""

# pyright: basic
from __future__ import annotations

import torch
from torch import Tensor

from ingot.nn.formats import Grid

_SWEEPS = 3
_BLOCK = 128  # channels whose changes are applied to the rest together; a multiple of all groups


def descend(
    weight_ND: Tensor, hessian_DD: Tensor, grid: Grid, q_ND: Tensor, scale_dtype: torch.dtype
) -> tuple[Grid, Tensor]:
    """Return better scales and integers; the same if more channels than a block share a scale.

    >>> weight, hessian = torch.tensor([[2.2, 3.3, 4.4]]), torch.eye(3)
    >>> grid = Grid(torch.ones(1, 1), torch.zeros(1, 1), 0, 15)
    >>> grid, q = descend(weight, hessian, grid, grid.round(weight), torch.float32)
    >>> grid.scale_NG, q
    (tensor([[1.1000]]), tensor([[2., 3., 4.]]))
    """
    group = weight_ND.shape[1] // grid.scale_NG.shape[1]
    if group > _BLOCK:
        return grid, q_ND
    # One row per channel, so that the loops read contiguous memory.
    scale_GN, zero_GN = grid.scale_NG.T.contiguous(), grid.zero_NG.T.contiguous()
    q_DN = q_ND.T.contiguous()
    gradient_DN = hessian_DD @ (weight_ND - grid.decode(q_ND)).T
    for begin in [*range(0, len(q_DN), _BLOCK)] * _SWEEPS:
        block = slice(begin, begin + _BLOCK)
        hessian_BB, gradient_BN = hessian_DD[block, block], gradient_DN[block].clone()
        changes: list[Tensor] = []
        for first in range(0, len(gradient_BN), group):
            channels, rest = slice(first, first + group), slice(first + group, None)
            values = q_DN[block][channels], gradient_BN[channels], hessian_BB[channels, channels]
            index = (begin + first) // group
            changes.append(_step_group(*values, scale_GN[index], zero_GN[index], grid, scale_dtype))
            gradient_BN[rest].addmm_(hessian_BB[rest, channels], changes[-1])
        gradient_DN.addmm_(hessian_DD[:, block], torch.cat(changes))
    return grid._replace(scale_NG=scale_GN.T), q_DN.T


def _step_group(
    q_CN: Tensor,
    gradient_CN: Tensor,
    hessian_CC: Tensor,
    scale_N: Tensor,
    zero_N: Tensor,
    grid: Grid,
    scale_dtype: torch.dtype,
) -> Tensor:
    """Choose the best scale of a group, then one integer after the other, in place.

    Returns:
        What is added to E.
    """
    values_CN = q_CN - zero_N
    curvature_N = ((hessian_CC @ values_CN) * values_CN).sum(0)
    step_N = (values_CN * gradient_CN).sum(0) / curvature_N
    best_N = torch.where(curvature_N > 0, scale_N + step_N, scale_N).to(scale_dtype).float()
    change_CN = values_CN.mul_(scale_N - best_N)
    gradient_CN.addmm_(hessian_CC, change_CN)
    scale_N.copy_(best_N)
    inverse_N = torch.where(scale_N == 0, 0, 1 / scale_N)
    for i, hessian_C in enumerate(hessian_CC):
        best_N = (gradient_CN[i] * inverse_N).div_(hessian_C[i]).add_(q_CN[i])
        best_N.round_().clamp_(grid.low, grid.high)
        change_N = (q_CN[i] - best_N).mul_(scale_N)
        q_CN[i] = best_N
        change_CN[i] += change_N
        gradient_CN[i + 1 :].addr_(hessian_C[i + 1 :], change_N)
    return change_CN
