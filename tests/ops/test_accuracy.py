"""The measure must see what is wrong: each fault here turns a share of at most 1 into more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ingot import ops
from ingot.ops.accuracy import backward_errors, forward_errors, relative_error
from ingot.ops.dispatch import Provider

ARGS = (torch.randn(16, 64, generator=torch.Generator().manual_seed(1)), torch.ones(64), 1e-6)


def aten(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


def with_fault(monkeypatch: pytest.MonkeyPatch, **parts: Callable[..., Any]) -> None:
    sound = ops.rms_norm.providers["aten"]
    faulty = Provider(
        name="aten",
        forward=parts.get("forward", sound.forward),
        backward=parts.get("backward", sound.backward),
        supports=sound.supports,
        batch_invariant=False,
    )
    monkeypatch.setitem(ops.rms_norm.providers, "aten", faulty)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "fault",
    [
        lambda x, w, eps: aten(x, w, eps + 0.1),
        lambda x, w, eps: aten(x, w, eps) * (1 + 2.0**-5),
        lambda x, w, eps: aten(x, w, eps).index_fill(0, torch.tensor([3]), 0.0),
        lambda x, w, eps: aten(x, w, eps).index_fill(1, torch.tensor([63]), torch.nan),
        lambda x, w, eps: aten((x.float() / 16).to(torch.float8_e4m3fn).to(x.dtype) * 16, w, eps),
    ],
    ids=["eps", "scale", "lost_row", "nan", "narrow"],
)
def test_wrong_forward_exceeds_the_bound(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[..., Any], dtype: torch.dtype
) -> None:
    args = (ARGS[0].to(dtype), ARGS[1].to(dtype), ARGS[2])
    assert max(forward_errors(ops.rms_norm, "aten", args)) <= 1
    with_fault(monkeypatch, forward=fault)
    assert max(forward_errors(ops.rms_norm, "aten", args)) > 1


def test_baseline_that_overflows_does_not_loosen_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float16 the squares overflow and plain PyTorch returns 0, so rounding is the bound."""
    args = (torch.full((2, 8), 5e3).half(), torch.ones(8).half(), 1e-6)
    assert max(forward_errors(ops.rms_norm, "aten", args)) <= 1
    with_fault(monkeypatch, forward=ops.rms_norm.reference)
    assert max(forward_errors(ops.rms_norm, "aten", args)) > 1


def test_wrong_backward_exceeds_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets_the_norm(needs: list[bool], grads: list[Tensor], *args: Any) -> list[Any]:
        return [grads[0] * args[1], (grads[0] * args[0]).sum(0), None]

    assert max(backward_errors(ops.rms_norm, "aten", ARGS).values()) <= 1
    with_fault(monkeypatch, backward=forgets_the_norm)
    errors = backward_errors(ops.rms_norm, "aten", ARGS)
    assert errors["x"] > 1
    assert errors["weight"] > 1


def test_non_finite_values_must_match_the_oracle() -> None:
    oracle = torch.tensor([[1.0, -torch.inf]], dtype=torch.float64)
    assert relative_error(torch.tensor([[1.0, -torch.inf]]), oracle) == 0
    assert relative_error(torch.tensor([[1.0, torch.inf]]), oracle) == torch.inf
    assert relative_error(torch.tensor([[torch.nan, -torch.inf]]), oracle) == torch.inf


def test_overflow_of_the_dtype_must_be_infinite() -> None:
    oracle = torch.tensor([[1e6, 1.0]], dtype=torch.float64)
    assert relative_error(torch.tensor([[torch.inf, 1.0]]).half(), oracle) == 0
    assert relative_error(torch.tensor([[65504.0, 1.0]]).half(), oracle) == torch.inf


def test_error_of_a_small_row_is_relative_to_the_row() -> None:
    oracle = torch.tensor([[1e6, 1e6], [1e-3, 1e-3]], dtype=torch.float64)
    wrong = oracle.float() * torch.tensor([[1.0], [1.5]])
    assert relative_error(wrong, oracle) == pytest.approx(0.5)
    assert relative_error(wrong, oracle, by_row=False) < 1e-8


def test_integers_must_be_equal() -> None:
    assert relative_error(torch.tensor([1, 2]), torch.tensor([1, 2])) == 0
    assert relative_error(torch.tensor([1, 2]), torch.tensor([1, 3])) == torch.inf
