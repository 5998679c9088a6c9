"""GPTQ: round one channel after the other, and let the others compensate for its error.

The error of a layer is tr(E H E^T) for the difference E of the weights and the mean H of x x^T over
calibration data. Channels are rounded in the order of their importance, the diagonal of H; the best
compensation by those that are left is given by the Cholesky factor of the inverse of H. The grid of
a group is fixed before, so that the order does not change which channels share a scale. Coordinate
descent improves scales and integers in the end: see `ingot.compression.descent`.

Legend: N rows (output channels), D channels, B channels of a block.

Reference: Frantar et al. 2022 (GPTQ).
"""

# pyright: basic
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ingot.compression.calibration import damp, damped_cholesky
from ingot.compression.descent import descend
from ingot.compression.method import search_grid
from ingot.nn.formats import QuantizedTensors, WeightFormat

_BLOCK = 128  # channels whose errors are applied to the rest together


@dataclass(frozen=True, kw_only=True)
class GPTQ:
    """Rounds with error compensation.

    >>> from ingot.nn.formats import Int4
    >>> weight = torch.linspace(-1, 1, 64).view(1, 64)
    >>> GPTQ().encode(Int4(), weight, torch.eye(64)).scale.shape
    torch.Size([1, 2])
    """

    damping: float = 0.01
    """Added to the diagonal of H, relative to its mean."""

    @property
    def calibrated(self) -> bool:
        """Whether it needs the inputs of the layer."""
        return True

    def encode(
        self, format: WeightFormat, weight_ND: Tensor, hessian_DD: Tensor | None
    ) -> QuantizedTensors:
        """Quantize a weight; `hessian` is the mean of x x^T over the inputs of the layer."""
        assert hessian_DD is not None
        grid = search_grid(format, weight_ND, hessian_DD.diagonal())
        order_D = hessian_DD.diagonal().argsort(descending=True)
        factor_DD = _inverse_factor(hessian_DD[order_D][:, order_D], self.damping)
        groups = grid.scale_NG.shape[1]
        group_D = order_D // (weight_ND.shape[1] // groups)
        # One row per channel, so that the loop reads contiguous memory.
        weight_DN = weight_ND.float().T[order_D].contiguous()
        scale_DN, zero_DN = (v.T.contiguous()[group_D] for v in (grid.scale_NG, grid.zero_NG))
        divisor_DN = torch.where(scale_DN == 0, 1, scale_DN)
        q_DN = torch.empty_like(weight_DN)
        for begin in range(0, len(weight_DN), _BLOCK):
            end = min(begin + _BLOCK, len(weight_DN))
            error_BN = torch.empty_like(weight_DN[begin:end])
            for i in range(begin, end):
                q = (weight_DN[i] / divisor_DN[i] + zero_DN[i]).round_().clamp_(grid.low, grid.high)
                q_DN[i] = q
                error = (weight_DN[i] - (q - zero_DN[i]) * scale_DN[i]) / factor_DD[i, i]
                error_BN[i - begin] = error
                weight_DN[i + 1 : end].addr_(factor_DD[i, i + 1 : end], error, alpha=-1)
            weight_DN[end:].addmm_(factor_DD[begin:end, end:].T, error_BN, alpha=-1)
        q_ND = q_DN[order_D.argsort()].T
        damped_DD = damp(hessian_DD, self.damping)
        grid, q_ND = descend(weight_ND.float(), damped_DD, grid, q_ND, format.scale_dtype)
        return format.pack(q_ND, grid)


def _inverse_factor(hessian_DD: Tensor, damping: float) -> Tensor:
    """Return the upper Cholesky factor of the inverse: U with U^T U = H^-1.

    With rows and columns in reverse order, the factor of H is upper triangular: H = R R^T. So U is
    the inverse of R.
    """
    upper_DD = damped_cholesky(hessian_DD.flip(0, 1), damping).flip(0, 1)
    identity_DD = torch.eye(len(upper_DD), device=upper_DD.device)
    return torch.linalg.solve_triangular(upper_DD, identity_DD, upper=True)
