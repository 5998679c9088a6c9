from __future__ import annotations

import torch

from ingot import ops

X = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))


def test_rms_norm_has_unit_root_mean_square() -> None:
    y = ops.rms_norm(X * 7, torch.ones(32), eps=0.0)
    torch.testing.assert_close(y.square().mean(-1), torch.ones(5))


def test_layer_norm_is_invariant_to_shift_and_scale() -> None:
    y = ops.layer_norm(X, torch.ones(32), eps=0.0)
    torch.testing.assert_close(ops.layer_norm(3 * X + 5, torch.ones(32), eps=0.0), y)
    torch.testing.assert_close(y.mean(-1), torch.zeros(5), atol=1e-6, rtol=0)


def test_add_forms_return_the_new_residual() -> None:
    weight = torch.ones(32)
    for fused, alone in (
        (ops.add_rms_norm, ops.rms_norm),
        (ops.add_layer_norm, ops.layer_norm),
    ):
        y, total = fused(X, 2 * X, weight)
        assert torch.equal(total, X + 2 * X)
        assert torch.equal(y, alone(total, weight, eps=1e-6 if alone is ops.rms_norm else 1e-5))


def test_square_sum_is_the_squared_norm_in_float32() -> None:
    found = ops.square_sum(X.bfloat16())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.sqrt(), X.bfloat16().float().norm(dim=-1))


def test_square_sum_of_rows_without_channels_is_zero() -> None:
    assert ops.square_sum(torch.zeros(3, 0)).tolist() == [0.0, 0.0, 0.0]
    assert ops.square_sum(torch.zeros(0, 4)).tolist() == []
