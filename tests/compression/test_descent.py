from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ingot.compression import descent, gptq
from ingot.compression.calibration import damp, squared_norm
from ingot.compression.descent import descend
from ingot.nn.formats import Grid, Int4, Int8, WeightFormat

FORMATS: list[WeightFormat] = [
    Int4(group=32),
    Int4(group=64, zero_point=True, scale_dtype=torch.float32),
    Int8(),
    Int8(group=32),
]


def make_layer(seed: int, rows: int, channels: int) -> tuple[Tensor, Tensor]:
    """Return a weight, and the damped Hessian of correlated inputs."""
    random = torch.Generator().manual_seed(seed)
    mixed = torch.randn(256, channels // 4, generator=random)
    x = mixed @ torch.randn(channels // 4, channels, generator=random)
    weight = torch.randn(rows, channels, generator=random)
    return weight, damp(x.T @ x / len(x), 0.01)


def error(weight: Tensor, hessian: Tensor, grid: Grid, q: Tensor) -> float:
    return squared_norm(weight - grid.decode(q), hessian)


@given(
    seed=st.integers(0, 1000),
    rows=st.integers(1, 5),
    groups=st.integers(1, 5),
    format=st.sampled_from(FORMATS),
)
def test_the_error_decreases(seed: int, rows: int, groups: int, format: WeightFormat) -> None:
    weight, hessian = make_layer(seed, rows, 64 * groups)
    grid = format.grid(weight)
    q = grid.round(weight)
    errors = [error(weight, hessian, grid, q)]
    for _ in range(3):
        grid, q = descend(weight, hessian, grid, q, format.scale_dtype)
        errors.append(error(weight, hessian, grid, q))
        assert grid.low <= int(q.min()) <= int(q.max()) <= grid.high
        assert torch.equal(q, q.round())
        assert torch.equal(grid.scale_NG, grid.scale_NG.to(format.scale_dtype).float())
    # A scale that is rounded to bfloat16 may be worse than the one before.
    assert all(after <= before * 1.001 for before, after in itertools.pairwise(errors))
    assert errors[-1] < 0.9 * errors[0] or grid.scale_NG.shape[1] == 1


def test_at_the_end_no_single_change_is_an_improvement() -> None:
    weight, hessian = make_layer(0, 1, 64)
    format = Int4(group=32, scale_dtype=torch.float32)
    grid = format.grid(weight)
    q = grid.round(weight)
    for _ in range(50):
        grid, q = descend(weight, hessian, grid, q, torch.float32)
    least = error(weight, hessian, grid, q)
    for channel in range(64):
        for step in (-1, 1):
            other = q.clone()
            other[0, channel] = (other[0, channel] + step).clamp(grid.low, grid.high)
            assert error(weight, hessian, grid, other) >= least * (1 - 1e-5)
    for group in range(2):
        for factor in (0.999, 1.001):
            scale = grid.scale_NG.clone()
            scale[0, group] *= factor
            assert error(weight, hessian, grid._replace(scale_NG=scale), q) >= least * (1 - 1e-5)


def test_groups_of_zeros_stay_zero() -> None:
    weight, hessian = make_layer(0, 4, 64)
    weight[:, :32] = 0
    grid = Int4(group=32).grid(weight)
    grid, q = descend(weight, hessian, grid, grid.round(weight), torch.bfloat16)
    assert grid.decode(q)[:, :32].abs().max() == 0
    assert q.isfinite().all()


def test_gptq_ends_with_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, hessian = make_layer(0, 16, 128)

    def squared_error() -> float:
        decoded = Int4().decode(gptq.GPTQ().encode(Int4(), weight, hessian))
        return squared_norm(weight - decoded, hessian)

    swept = squared_error()
    monkeypatch.setattr(descent, "_SWEEPS", 0)
    assert swept < 0.95 * squared_error()
