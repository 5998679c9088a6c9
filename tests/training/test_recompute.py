"""What is computed again gives the same gradients, to the bit, and keeps less."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ingot import ops
from ingot.core.errors import ConfigError
from ingot.nn import BatchLayout, Decoder, Dense, DenseConfig, preset
from ingot.nn.config import Activation, NormKind, NormPosition, QkNorm
from ingot.nn.dropout import set_step
from ingot.training.recompute import recompute

TINY = preset("tiny")


CONFIGS = {
    "llama": TINY,
    "gpt2": replace(
        TINY, norm=NormKind.LAYER, activation=Activation.GELU_TANH, rope=None, qkv_bias=True
    ),
    "olmo2": replace(TINY, qk_norm=QkNorm.FULL, norm_position=NormPosition.POST),
    "moe": preset("tiny-moe"),
}


class Made(TorchDispatchMode):
    """What ops have made, and how much of it still is."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return out

    def alive(self) -> int:
        """In bytes."""
        gc.collect()
        return sum(size for storage, size in self._made.values() if not storage.expired())


def gradients(policy: Any, name: str = "llama", dropout: float = 0.0) -> tuple[list[Any], int]:
    """The gradients, and the bytes that the forward kept for the backward."""
    model = Decoder.from_config(CONFIGS[name], seed=0)
    model.set_dropout(dropout)
    set_step(model, seed=0, step=0)
    recompute(model, policy)
    layout, tokens = BatchLayout.packed([40, 30]), torch.arange(70)
    with Made() as made:
        hidden = model(tokens, layout)
    kept = made.alive()
    ops.linear_cross_entropy(hidden, model.lm_head_weight, tokens).sum().backward()
    return [p.grad for p in model.parameters()], kept


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("policy", ["selective", "full"])
def test_gradients_are_the_same_to_the_bit(policy: Any, name: str, dropout: float) -> None:
    plain, _ = gradients("none", name, dropout)
    again, _ = gradients(policy, name, dropout)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


@pytest.mark.parametrize("policy", ["selective", "full"])
def test_a_graph_that_is_kept_can_be_walked_twice(policy: Any) -> None:
    model = Decoder.from_config(preset("tiny"), seed=0)
    recompute(model, policy)
    layout = BatchLayout.packed([3])
    total = model(torch.arange(3), layout).square().sum()
    total.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    total.backward()
    again = [p.grad for p in model.parameters() if p.grad is not None]
    assert once
    assert all(torch.equal(2 * a, b) for a, b in zip(once, again, strict=True))


def test_what_is_kept() -> None:
    everything = gradients("none")[1]
    assert gradients("selective")[1] < 0.6 * everything
    assert gradients("full")[1] < 0.25 * everything


@pytest.mark.parametrize("policy", ["selective", "full"])
def test_scoring_is_left_alone(policy: Any) -> None:
    model = Decoder.from_config(preset("tiny"), seed=0)
    layout = BatchLayout.packed([3])
    wanted = model(torch.arange(3), layout)
    recompute(model, policy)
    with torch.inference_mode():
        assert torch.equal(model(torch.arange(3), layout), wanted)


def test_a_model_without_blocks_is_refused() -> None:
    model = Dense.from_config(DenseConfig(in_features=1, hidden_dims=(), out_features=1), seed=0)
    recompute(model, "none")
    with pytest.raises(ConfigError, match="Dense, which has no blocks"):
        recompute(model, "full")
