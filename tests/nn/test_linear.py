from __future__ import annotations

import torch

from ingot.nn import Embedding, Linear


def test_linear_matches_torch_and_adds_a_residual() -> None:
    layer, x, residual = Linear(12, 5, bias=True), torch.randn(3, 12), torch.randn(3, 5)
    with torch.no_grad():
        layer.bias.normal_()
    expected = torch.nn.functional.linear(x, layer.weight, layer.bias)
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(layer(x, residual), expected + residual)


def test_initial_weights_are_small_and_biases_zero() -> None:
    layer = Linear(300, 300, bias=True)
    assert 0.019 < layer.weight.std() < 0.021
    assert not layer.bias.any()
    assert 0.019 < Embedding(300, 300).weight.std() < 0.021


def test_meta_weights_are_not_initialized() -> None:
    state = torch.get_rng_state()
    with torch.device("meta"):
        assert Linear(8, 8).weight.is_meta
        assert Embedding(8, 8).weight.is_meta
    assert torch.equal(torch.get_rng_state(), state)
