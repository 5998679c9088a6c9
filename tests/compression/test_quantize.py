from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ingot.compression import GPTQ, RoundToNearest, quantize
from ingot.core.errors import ConfigError
from ingot.nn import BatchLayout, Decoder, preset
from ingot.nn.formats import Int4, Int8, QuantizedTensors, WeightFormat
from ingot.nn.linear import Linear
from ingot.nn.quantized import QuantizedLinear

SEQUENCES = [list(range(n, n + 60)) for n in range(12)]


def decoder(name: str = "tiny") -> Decoder:
    return Decoder.from_config(preset(name), seed=0, dtype=torch.bfloat16)


def linears(model: nn.Module) -> list[type[nn.Module]]:
    return [type(m) for m in model.modules() if isinstance(m, Linear | QuantizedLinear)]


@pytest.mark.parametrize("name", ["tiny", "gpt2-124m"])
def test_every_linear_layer_of_the_blocks_is_quantized(name: str) -> None:
    model = Decoder.on_meta(preset(name))
    quantize(model, Int8(), RoundToNearest())
    assert set(linears(model.blocks)) == {QuantizedLinear}
    assert linears(model).count(Linear) == (0 if model.lm_head is None else 1)


class Recorder:
    """A method that records the Hessians it gets."""

    calibrated = True

    def __init__(self) -> None:
        self.hessians: list[torch.Tensor] = []

    def encode(
        self, format: WeightFormat, weight_ND: torch.Tensor, hessian_DD: torch.Tensor | None
    ) -> QuantizedTensors:
        assert hessian_DD is not None
        assert len(hessian_DD) == weight_ND.shape[1]
        self.hessians.append(hessian_DD)
        return format.encode(weight_ND)


def test_layers_are_calibrated_with_the_inputs_they_have_in_the_quantized_model() -> None:
    method, model, tokens = Recorder(), decoder(), torch.tensor(SEQUENCES).flatten()
    quantize(model, Int8(), method, SEQUENCES)
    inputs: list[torch.Tensor] = []
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            module.register_forward_pre_hook(lambda _, args: inputs.append(args[0].float()))
    with torch.inference_mode():
        model(tokens, BatchLayout.packed([len(ids) for ids in SEQUENCES]))
    hessians = [x.T @ x / len(x) for x in inputs]
    gate_up = range(2, len(hessians), 4)  # gate and up are one layer with two weights
    expected = [h for n, h in enumerate(hessians) for _ in range(2 if n in gate_up else 1)]
    assert len(method.hessians) == len(expected)
    for ours, theirs in zip(method.hessians, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_gptq_changes_the_hidden_states_less_than_rounding() -> None:
    tokens = torch.tensor(SEQUENCES).flatten()
    layout = BatchLayout.packed([len(ids) for ids in SEQUENCES])

    def hidden(method: GPTQ | RoundToNearest | None) -> torch.Tensor:
        model = decoder()
        if method:
            quantize(model, Int4(), method, SEQUENCES)
        with torch.inference_mode():
            return model(tokens, layout).float()

    expected = hidden(None)
    gptq, rounded = ((hidden(m) - expected).square().mean() for m in (GPTQ(), RoundToNearest()))
    assert gptq < 0.7 * rounded


def test_sensitivity_is_the_relative_error_of_the_output() -> None:
    model, tokens = decoder(), torch.tensor(SEQUENCES).flatten()
    weights = [w.detach().double() for block in model.blocks for w in stacked_weights(block)]
    found = quantize(model, Int4(), RoundToNearest(), SEQUENCES)
    modules = {
        (layer, name): module
        for layer, block in enumerate(model.blocks)
        for name, module in block.named_modules()
        if isinstance(module, QuantizedLinear)
    }
    inputs: dict[nn.Module, torch.Tensor] = {}
    for module in modules.values():
        module.register_forward_pre_hook(lambda m, args: inputs.update({m: args[0].double()}))
    with torch.no_grad():
        model(tokens, BatchLayout.packed([len(ids) for ids in SEQUENCES]))
    for one, weight in zip(found, weights, strict=True):
        module = modules[one.layer, one.kind]
        x, quantized = inputs[module], module.format.decode(module.get()).double()
        expected = (x @ (weight - quantized).T).norm() / (x @ weight.T).norm()
        assert one.relative_error == pytest.approx(float(expected), rel=1e-5)


def stacked_weights(block: Any) -> list[torch.Tensor]:
    gate_up = torch.cat([block.mlp.gate.weight, block.mlp.up.weight])
    return [block.attention.qkv.weight, block.attention.out.weight, gate_up, block.mlp.down.weight]


@pytest.mark.parametrize("method", [GPTQ(), RoundToNearest()])
def test_every_layer_is_more_sensitive_to_fewer_bits(method: GPTQ | RoundToNearest) -> None:
    eight, four = (quantize(decoder(), f, method, SEQUENCES) for f in (Int8(group=32), Int4()))
    assert len(eight) == 4 * preset("tiny").layers
    for fine, coarse in zip(eight, four, strict=True):
        assert (fine.layer, fine.kind) == (coarse.layer, coarse.kind)
        assert coarse.relative_error > 8 * fine.relative_error > 0


def test_there_are_no_sensitivities_without_inputs() -> None:
    assert quantize(decoder(), Int4(), RoundToNearest()) == []


def test_calibration_needs_data() -> None:
    with pytest.raises(ConfigError, match="calibration"):
        quantize(decoder(), Int4(), GPTQ())
