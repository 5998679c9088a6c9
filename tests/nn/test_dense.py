"""Dense layers: results, initialization and bounds."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from ingot.core.errors import ConfigError
from ingot.nn.dense import Dense, DenseConfig, kaiming_init_


@pytest.mark.parametrize("hidden", [(), (5,), (7, 3, 9)])
def test_dense_is_linear_layers_with_gelu(hidden: tuple[int, ...]) -> None:
    model = Dense.from_config(
        DenseConfig(in_features=6, hidden_dims=hidden, out_features=4), seed=0
    ).double()
    x = torch.randn(3, 2, 3, dtype=torch.float64)
    wanted = x.flatten(1)
    for index, layer in enumerate(model.layers):
        wanted = F.linear(wanted, layer.weight, layer.bias)  # pyright: ignore
        wanted = F.gelu(wanted) if index < len(hidden) else wanted
    torch.testing.assert_close(model(x), wanted)


def test_a_seed_gives_the_same_weights_and_the_right_variance() -> None:
    a, b = (kaiming_init_(torch.nn.Conv2d(16, 64, 3), 7) for _ in range(2))
    assert torch.equal(a.weight, b.weight)
    assert a.weight.std().item() == pytest.approx(math.sqrt(2 / (16 * 9)), rel=0.05)
    assert not a.bias.any()  # pyright: ignore
    assert not torch.equal(a.weight, kaiming_init_(torch.nn.Conv2d(16, 64, 3), 8).weight)


def test_dropout_applies_in_training_only() -> None:
    model = Dense.from_config(
        DenseConfig(in_features=6, hidden_dims=(64,), out_features=4, dropout=0.5), seed=0
    )
    x = torch.randn(8, 6)
    dropped = model(x)
    plain = Dense.from_config(
        DenseConfig(in_features=6, hidden_dims=(64,), out_features=4), seed=0
    )(x)
    assert not torch.equal(dropped, plain)
    assert torch.equal(model.eval()(x), plain)


def test_bounds() -> None:
    with pytest.raises(ConfigError):
        DenseConfig(in_features=0, hidden_dims=(), out_features=1)
    with pytest.raises(ConfigError, match="hidden"):
        DenseConfig(in_features=1, hidden_dims=(0,), out_features=1)
