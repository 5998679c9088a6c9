"""Recomputed activations: bitwise equal gradients, less memory."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ingot import ops
from ingot.nn import BatchLayout, Decoder, preset
from ingot.nn.config import Activation, NormKind, NormPosition, QkNorm
from ingot.nn.dropout import set_step
from ingot.nn.recompute import recomputable, run, run_by_rows
from tests.test_fake_device import run_script

TINY = preset("tiny")


CONFIGS = {
    "llama": TINY,
    "gpt2": replace(
        TINY, norm=NormKind.LAYER, activation=Activation.GELU_TANH, rope=None, qkv_bias=True
    ),
    "olmo2": replace(TINY, qk_norm=QkNorm.FULL, norm_position=NormPosition.POST),
    "moe": preset("tiny-moe"),
}


class AllocationCounter(TorchDispatchMode):
    """Records the storages that ops allocate, and counts the bytes still alive."""

    def __init__(self) -> None:
        super().__init__()
        self._allocated: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._allocated[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return out

    def alive_bytes(self) -> int:
        """Return the size of the storages that are still referenced."""
        gc.collect()
        return sum(size for storage, size in self._allocated.values() if not storage.expired())


def gradients(policy: Any, name: str = "llama", dropout: float = 0.0) -> tuple[list[Any], int]:
    """Return the gradients, and the bytes that the forward kept for the backward."""
    model = Decoder.from_config(CONFIGS[name], seed=0)
    model.set_dropout(dropout)
    set_step(model, seed=0, step=0)
    model.set_recompute(policy)
    layout, tokens = BatchLayout.packed([40, 30]), torch.arange(70)
    with AllocationCounter() as counter:
        hidden = model(tokens, layout)
    kept = counter.alive_bytes()
    ops.linear_cross_entropy(hidden, model.lm_head_weight, tokens).sum().backward()
    return [p.grad for p in model.parameters()], kept


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("policy", ["selective", "full"])
def test_gradients_are_bitwise_equal(policy: Any, name: str, dropout: float) -> None:
    plain, _ = gradients("none", name, dropout)
    recomputed, _ = gradients(policy, name, dropout)
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))


@pytest.mark.parametrize("policy", ["selective", "full"])
def test_backward_can_run_twice_with_retain_graph(policy: Any) -> None:
    model = Decoder.from_config(preset("tiny"), seed=0)
    model.set_recompute(policy)
    layout = BatchLayout.packed([3])
    total = model(torch.arange(3), layout).square().sum()
    total.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    total.backward()
    twice = [p.grad for p in model.parameters() if p.grad is not None]
    assert once
    assert all(torch.equal(2 * a, b) for a, b in zip(once, twice, strict=True))


def test_activation_memory_falls_with_the_policy() -> None:
    everything = gradients("none")[1]
    assert gradients("selective")[1] < 0.6 * everything
    assert gradients("full")[1] < 0.25 * everything


def test_rows_are_discarded_and_recomputed() -> None:
    x = torch.randn(7, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    weight = torch.randn(4, 100, generator=torch.Generator().manual_seed(1))
    rows: list[int] = []

    def forward(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        rows.append(len(x))
        return (x @ weight).logsumexp(-1) * scale

    scale = torch.arange(7.0)
    wanted = forward(x, scale)
    (gradient,) = torch.autograd.grad(wanted.sum(), x)
    rows.clear()
    with AllocationCounter() as counter:
        found = run_by_rows(forward, 3, x, scale)
    assert counter.alive_bytes() < 3 * 100 * 4  # less than three rows of a matmul
    assert torch.allclose(found, wanted)
    (recomputed,) = torch.autograd.grad(found.sum(), x)
    assert torch.allclose(recomputed, gradient)
    assert rows == [3, 3, 1, 1, 3, 3]  # the backward begins at the end


@pytest.mark.parametrize("policy", ["selective", "full"])
def test_inference_is_unaffected(policy: Any) -> None:
    model = Decoder.from_config(preset("tiny"), seed=0)
    layout = BatchLayout.packed([3])
    wanted = model(torch.arange(3), layout)
    model.set_recompute(policy)
    with torch.inference_mode():
        assert torch.equal(model(torch.arange(3), layout), wanted)


def test_recomputable_without_a_policy_calls_the_function() -> None:
    x = torch.ones(2, requires_grad=True)
    assert torch.equal(recomputable(torch.exp, x), x.exp())


@pytest.mark.parametrize("policy", ["selective", "full"])
def test_a_failed_forward_leaves_no_state(policy: Any) -> None:
    def fail(x: torch.Tensor) -> torch.Tensor:
        recomputable(torch.exp, x)
        raise ValueError("failed")

    x = torch.ones(2, requires_grad=True)
    with pytest.raises(ValueError, match="failed"):
        run(policy, fail, x)
    kept = recomputable(torch.exp, x).square()
    assert isinstance(kept.grad_fn._saved_self, torch.Tensor)  # pyright: ignore


@pytest.mark.parametrize("policy", ["selective", "full"])
def test_gradients_on_an_accelerator_are_those_without_a_policy(policy: str) -> None:
    code = """
from ingot.nn import BatchLayout, Decoder, preset

def gradients(policy):
    model = Decoder.from_config(preset("tiny"), seed=0).to(fake_device.DEVICE)
    model.set_recompute(policy)
    layout = BatchLayout.packed([4, 3], device=fake_device.DEVICE)
    model(torch.arange(7).to(fake_device.DEVICE), layout).square().sum().backward()
    return [p.grad.cpu() for p in model.parameters() if p.grad is not None]

pairs = list(zip(gradients("none"), gradients(sys.argv[1]), strict=True))
assert pairs and all(torch.equal(a, b) for a, b in pairs)
"""
    run_script(code, policy)
