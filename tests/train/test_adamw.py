"""AdamW itself; against its paper it is tested in `test_optimizer`, and as an op."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ingot import ops
from ingot.ops.adamw import join, split
from ingot.train import adamw
from ingot.train.adamw import AdamW


def test_a_weight_without_a_gradient_stays() -> None:
    used, unused = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    used.grad = torch.tensor([1.0, -2.0])
    optimizer = AdamW([used, unused], lr=0.5)
    optimizer.step()
    torch.testing.assert_close(used.detach(), torch.tensor([0.5, 1.5]))
    assert unused.tolist() == [1.0, 1.0]
    assert unused not in optimizer.state


@pytest.mark.parametrize(("moments", "dtype"), adamw.MOMENTS.items())
def test_moments_are_in_the_dtype_that_is_asked_for(moments: str, dtype: torch.dtype) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = AdamW([weight], moments=moments)
    optimizer.step()
    assert {optimizer.state[weight][key].dtype for key in ("exp_avg", "exp_avg_sq")} == {dtype}


def test_one_call_takes_all_weights_of_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int, float, float]] = []

    def counted(params: list[Tensor], *args: Any) -> None:
        calls.append((len(params), args[4], args[9], args[10]))

    monkeypatch.setattr(ops, "adamw", counted)
    late, *weights = [torch.ones(2) for _ in range(6)]
    groups = [{"params": weights[:3]}, {"params": [*weights[3:], late], "weight_decay": 0.1}]
    optimizer = AdamW(groups)
    ones = torch.ones(2)
    optimizer.move(dict.fromkeys(weights, (ones, 0.5)))
    assert calls == [(3, 1, 0.0, 0.5), (2, 1, 0.1, 0.5)]
    calls.clear()
    optimizer.move({w: (ones, 0.25 if w is weights[0] else 1.0) for w in (*weights, late)})
    assert calls == [(1, 2, 0.0, 0.25), (2, 2, 0.0, 1.0), (2, 2, 0.1, 1.0), (1, 1, 0.1, 1.0)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_halves_move_as_a_float32_does(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    master = torch.randn(40, generator=random)
    high, low = split(master)
    whole, parts = AdamW([master], lr=1e-3), AdamW([high], lr=1e-3, low={high: low})
    for _ in range(5):
        grad = torch.randn(40, generator=random).to(dtype)
        whole.move({master: (grad, 0.5)})  # a gradient in bfloat16 of a float32 is widened
        parts.move({high: (grad, 0.5)})
    assert torch.equal(join(high, low), master)
