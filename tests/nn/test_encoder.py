"""Encoders: the whole sequence is seen, and nothing but it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ingot.core.errors import ConfigError
from ingot.nn import Activation, BatchLayout, Encoder, EncoderConfig, KVSpec

CONFIG = EncoderConfig(
    vocab_size=97, dim=48, layers=2, heads=3, ffn_dim=80, max_seq_len=64, type_vocab_size=3
)


def random_encoder(dtype: torch.dtype = torch.float32) -> Encoder:
    """An encoder whose biases and norms are random, too: at 0 and 1 they could be left out."""
    encoder = Encoder.from_config(CONFIG, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in encoder.named_parameters():
            is_norm = "norm.weight" in name
            parameter.normal_(1.0 if is_norm else 0.0, 0.2, generator=generator)
    return encoder.to(dtype)


def tokens(count: int) -> Tensor:
    return torch.randint(97, (count,), generator=torch.Generator().manual_seed(count))


@torch.inference_mode()
def test_every_token_sees_the_whole_sequence_and_no_other() -> None:
    encoder, ids = random_encoder(), tokens(9)
    layout = BatchLayout.packed([5, 4])
    hidden, changed = encoder(ids, layout), ids.clone()
    changed[4] = (ids[4] + 1) % 97
    differs = (encoder(changed, layout) != hidden).any(dim=1)
    assert differs.tolist() == [True] * 5 + [False] * 4


@torch.inference_mode()
def test_token_types_are_added() -> None:
    encoder, ids, layout = random_encoder(), tokens(6), BatchLayout.packed([6])
    hidden = encoder(ids, layout)
    assert torch.equal(encoder(ids, layout, torch.zeros(6, dtype=torch.int64)), hidden)
    assert not torch.equal(encoder(ids, layout, torch.tensor([0, 0, 0, 2, 2, 2])), hidden)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_hidden_states_are_bitwise_equal_in_any_batch(dtype: torch.dtype) -> None:
    encoder, lengths = random_encoder(dtype), [1, 33, 2, 64, 7, 17]
    sequences = [tokens(length) for length in lengths]
    alone = [encoder(ids, BatchLayout.packed([len(ids)])) for ids in sequences]
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1], [2, 2, 4]):
        layout = BatchLayout.packed([lengths[i] for i in order])
        hidden = encoder(torch.cat([sequences[i] for i in order]), layout)
        assert torch.equal(hidden, torch.cat([alone[i] for i in order]))


def test_gradients_reach_every_parameter() -> None:
    encoder = random_encoder()
    ids, types = tokens(9), torch.tensor([0, 1, 2] * 3)
    encoder(ids, BatchLayout.packed([5, 4]), types).square().sum().backward()
    for name, parameter in encoder.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name


def test_encoders_are_stateless() -> None:
    assert KVSpec.of(Encoder.on_meta(CONFIG)) is None


def test_impossible_configurations_raise() -> None:
    sizes: dict[str, Any] = {"vocab_size": 97, "dim": 48, "layers": 2, "ffn_dim": 80}
    sizes["max_seq_len"] = 64
    with pytest.raises(ConfigError, match="heads must divide dim"):
        EncoderConfig(**sizes, heads=5)
    with pytest.raises(ConfigError, match="SwiGLU"):
        EncoderConfig(**sizes, heads=4, activation=Activation.SWIGLU)
    with pytest.raises(ConfigError, match="type_vocab_size"):
        EncoderConfig(**sizes, heads=4, type_vocab_size=0)
