from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ingot.compression import AWQ, GPTQ, Method, RoundToNearest, quantize
from ingot.compression.calibration import LayerInputs, embed
from ingot.compression.correction import correct, run_original
from ingot.nn import BatchLayout, Decoder, preset
from ingot.nn.formats import Int4, QuantizedTensors, WeightFormat

SEQUENCES = [[(n * n + 7 * i) % 256 for i in range(60)] for n in range(20)]
HELD_OUT = torch.tensor([[(n * n + 7 * i + 3) % 256 for i in range(60)] for n in range(20)])


def layer_inputs(x: torch.Tensor, original: torch.Tensor) -> LayerInputs:
    drift = (original - x).T @ x / len(x)
    return LayerInputs(x.T @ x / len(x), x.abs().amax(0), drift)


@given(seed=st.integers(0, 1000), noise=st.sampled_from([0.0, 0.1, 1.0]))
def test_the_corrected_weight_is_halfway_to_the_solution_of_ridge_regression(
    seed: int, noise: float
) -> None:
    random = torch.Generator().manual_seed(seed)
    weight, original, error = (torch.randn(n, 8, generator=random) for n in (5, 200, 200))
    x = original + noise * error
    found = correct(weight, layer_inputs(x, original))
    # Rows that pull W' towards W, with the damping of 0.1.
    ridge = (0.1 * x.square().mean() * len(x)).sqrt() * torch.eye(8)
    outputs = torch.cat([original @ weight.T, ridge @ weight.T])
    solution = torch.linalg.lstsq(torch.cat([x, ridge]), outputs).solution.T
    torch.testing.assert_close(found, (weight + solution) / 2, rtol=1e-3, atol=1e-3)


def test_without_inputs_of_the_original_model_the_weight_stays() -> None:
    weight, x = torch.randn(3, 4), torch.randn(9, 4)
    assert correct(weight, LayerInputs(x.T @ x, x.abs().amax(0))) is weight


def test_the_inputs_of_all_layers_are_recorded_and_the_hooks_removed() -> None:
    decoder = Decoder.from_config(preset("tiny"), seed=0)
    block: Any = decoder.blocks[0]
    with torch.no_grad():
        batches = list(embed(decoder, SEQUENCES))
        found = run_original(block, batches)
        expected = [block(x, layout) for x, layout in batches]
        norm = block.attention_norm(batches[0][0])
    assert len(batches) > 1
    assert set(found.inputs) == {"attention.qkv", "attention.out", "mlp.gate_up", "mlp.down"}
    assert torch.equal(found.inputs["attention.qkv"][0], norm)
    assert all(len(inputs) == len(batches) for inputs in found.inputs.values())
    assert all(map(torch.equal, [x for x, _ in found.outputs], expected))
    assert not any(m._forward_pre_hooks for m in block.modules())


@pytest.mark.parametrize("method", [GPTQ(), AWQ(), AWQ(rounding=GPTQ())], ids=str)
def test_outputs_are_closer_to_the_original_with_the_correction(
    method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hidden(method: Method | None) -> torch.Tensor:
        decoder = Decoder.from_config(preset("tiny"), seed=0)
        if method:
            quantize(decoder, Int4(), method, SEQUENCES)
        layout = BatchLayout.packed([len(row) for row in HELD_OUT])
        with torch.inference_mode():
            return decoder(HELD_OUT.flatten(), layout).float()

    original, corrected = hidden(None), hidden(method)
    quantize_module = sys.modules["ingot.compression.quantize"]  # hidden by the function
    monkeypatch.setattr(quantize_module, "correct", lambda weight, _: weight)
    plain = hidden(method)
    errors = [float((found - original).square().mean()) for found in (corrected, plain)]
    assert errors[0] < 0.95 * errors[1]


def test_methods_that_are_not_calibrated_round_the_weight_itself() -> None:
    weights = []
    for sequences in ([], SEQUENCES):
        decoder: Any = Decoder.from_config(preset("tiny"), seed=0)
        quantize(decoder, Int4(), RoundToNearest(), sequences)
        down = decoder.blocks[-1].mlp.down
        weights.append(down.format.decode(down.get()))
    assert torch.equal(*weights)


class Recorder:
    """A method that records the weights it gets."""

    calibrated = True

    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []

    def encode(
        self, format: WeightFormat, weight_ND: torch.Tensor, hessian_DD: torch.Tensor | None
    ) -> QuantizedTensors:
        self.weights.append(weight_ND)
        return format.encode(weight_ND)


def test_inputs_are_compared_with_those_in_the_original_model() -> None:
    original, quantized = (Decoder.from_config(preset("tiny"), seed=0) for _ in range(2))
    method = Recorder()
    quantize(quantized, Int4(), method, SEQUENCES)
    found: list[torch.Tensor] = []
    tokens = torch.tensor(SEQUENCES).flatten()
    for decoder in (original, quantized):
        block: Any = decoder.blocks[1]
        block.attention.qkv.register_forward_pre_hook(lambda _, args: found.append(args[0]))
        with torch.no_grad():
            decoder(tokens, BatchLayout.packed([len(ids) for ids in SEQUENCES]))
    weight = method.weights[5]  # of a block: qkv, out, gate, up, down
    block = original.blocks[1]
    expected = correct(block.attention.qkv.weight.detach(), layer_inputs(found[1], found[0]))
    torch.testing.assert_close(weight, expected, rtol=1e-3, atol=1e-4)
