from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from ingot.compression.calibration import collect_inputs, embed, linear_layers, squared_norm
from ingot.nn import BatchLayout, Decoder, preset

SEQUENCES = [list(range(n, n + 60)) for n in range(40)]


def test_statistics_are_those_of_all_inputs() -> None:
    decoder = Decoder.from_config(preset("tiny"), seed=0)
    block: Any = decoder.blocks[0]
    inputs: list[torch.Tensor] = []
    with torch.no_grad():
        batches = list(embed(decoder, SEQUENCES))
        assert len(batches) > 1
        found = collect_inputs(block, block.mlp.down, batches)
        block.mlp.down.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        tokens = torch.tensor(SEQUENCES).flatten()
        decoder(tokens, BatchLayout.packed([len(ids) for ids in SEQUENCES]))
    (x,) = inputs
    torch.testing.assert_close(found.hessian_DD, x.T @ x / len(x), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.max_D, x.abs().amax(0), rtol=1e-4, atol=1e-6)


def test_a_forward_pass_ends_at_the_layer() -> None:
    decoder = Decoder.from_config(preset("tiny"), seed=0)
    block: Any = decoder.blocks[0]
    block.mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    with torch.no_grad():
        collect_inputs(block, block.attention.out, list(embed(decoder, SEQUENCES)))


def test_layers_are_in_the_order_of_the_forward_pass() -> None:
    names = [layer.name for layer in linear_layers(Decoder.on_meta(preset("tiny")).blocks[0])]
    assert names == ["attention.qkv", "attention.out", "mlp.gate_up", "mlp.down"]


@given(seed=st.integers(0, 1000))
def test_the_squared_norm_is_the_mean_over_the_outputs(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    weight, x = torch.randn(5, 8, generator=random), torch.randn(30, 8, generator=random)
    expected = float((x @ weight.T).square().sum(1).mean())
    assert abs(squared_norm(weight, x.T @ x / len(x)) / expected - 1) < 1e-4
