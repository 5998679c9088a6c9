"""AdamW itself; against its paper it is tested in `test_optimizer`, and as an op."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from ingot import ops
from ingot.core.errors import ConfigError
from ingot.ops.adamw import join, split
from ingot.training import adamw
from ingot.training import optimizer as configs
from ingot.training.adamw import AdamW


def test_a_weight_without_a_gradient_stays() -> None:
    used, unused = (torch.ones(2) for _ in range(2))
    optimizer = AdamW([{"params": [used, unused]}], lr=0.5)
    optimizer.apply_update({used: (torch.tensor([1.0, -2.0]), 1.0)})
    torch.testing.assert_close(used, torch.tensor([0.5, 1.5]))
    assert unused.tolist() == [1.0, 1.0]
    assert int(optimizer.state[unused]["step"]) == 0


@pytest.mark.parametrize(("state_dtype", "dtype"), adamw.STATE_DTYPES.items())
def test_moments_are_in_the_dtype_that_is_asked_for(state_dtype: str, dtype: torch.dtype) -> None:
    weight = torch.ones(2)
    optimizer = AdamW([{"params": [weight]}], state_dtype=state_dtype)
    optimizer.apply_update({weight: (torch.ones(2), 1.0)})
    assert {optimizer.state[weight][key].dtype for key in ("exp_avg", "exp_avg_sq")} == {dtype}


def test_one_call_takes_all_weights_of_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int, float, float]] = []

    def num_targets(params: list[Tensor], *args: Any) -> None:
        calls.append((len(params), args[4], args[9], args[10]))

    monkeypatch.setattr(ops, "adamw", num_targets)
    late, *weights = [torch.ones(2) for _ in range(6)]
    groups = [{"params": weights[:3]}, {"params": [*weights[3:], late], "weight_decay": 0.1}]
    optimizer = AdamW(groups)
    ones = torch.ones(2)
    optimizer.apply_update(dict.fromkeys(weights, (ones, 0.5)))
    assert calls == [(3, 1, 0.0, 0.5), (2, 1, 0.1, 0.5)]
    calls.clear()
    optimizer.apply_update({w: (ones, 0.25 if w is weights[0] else 1.0) for w in (*weights, late)})
    assert calls == [(1, 2, 0.0, 0.25), (2, 2, 0.0, 1.0), (2, 2, 0.1, 1.0), (1, 1, 0.1, 1.0)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_halves_move_as_a_float32_does(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    master = torch.randn(40, generator=random)
    high, low = split(master)
    whole = AdamW([{"params": [master]}], lr=1e-3)
    parts = AdamW([{"params": [high]}], lr=1e-3, low_bits={high: low})
    for _ in range(5):
        grad = torch.randn(40, generator=random).to(dtype)
        whole.apply_update({master: (grad, 0.5)})  # a gradient in bfloat16 of a float32 is widened
        parts.apply_update({high: (grad, 0.5)})
    assert torch.equal(join(high, low), master)


@pytest.mark.parametrize("beta", [0.5, 0.95, 0.99])
def test_moments_in_bf16_are_forgotten_like_others(beta: float) -> None:
    """Whatever the number is: half a unit of bfloat16 is not the same share of all."""
    start = 1 + torch.arange(128) / 128
    weight, none = torch.zeros(128), torch.zeros(128)
    optimizer = AdamW([{"params": [weight]}], betas=(beta, beta), state_dtype="bf16")
    for name in ("exp_avg", "exp_avg_sq"):
        optimizer.state[weight][name].copy_(start)
    for _ in range(5):
        optimizer.apply_update({weight: (none, 1.0)})
    for name in ("exp_avg", "exp_avg_sq"):
        left = optimizer.state[weight][name].float() / start
        assert left.max() < beta**2.5
        assert left.min() > beta**10


def test_betas_too_large_for_a_bf16_state_are_rejected() -> None:
    with pytest.raises(ConfigError, match="for state_dtype bf16"):
        configs.AdamWConfig(betas=(0.9, 0.999), state_dtype="bf16")
    configs.AdamWConfig(betas=(0.9, 0.99), state_dtype="bf16")


def test_a_step_does_not_load_the_compiler_of_torch() -> None:
    code = """
import sys
import torch
from ingot.data import TokenBatch
from ingot.nn import Decoder, preset
from ingot.training.clip import Clipper, ClipNormConfig
from ingot.training.objective import CrossEntropy
from ingot.training.optimizer import AdamWConfig, Optimizers
from ingot.training.precision import MasterWeights, Precision
from ingot.training.step import TrainStep

for policy in ("none", "selective", "full"):
    model = Decoder.from_config(preset("tiny"), seed=0)
    model.set_recompute(policy)
    masters = MasterWeights(model, Precision.BF16, split=True)
    optimizers = Optimizers(AdamWConfig(), model, masters.weights, masters.low_bits)
    clipper = Clipper(ClipNormConfig(), len(masters.weights))
    step = TrainStep(model, masters, optimizers, clipper, CrossEntropy())
    step.forward_backward([TokenBatch(torch.arange(3), torch.tensor([1, 2, -100]), [3], [])], 0)
    step.optimizer_step(1.0)
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
