"""QAT: the bits of the quantized model, and the gradients of one with dequantized weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ingot import ops
from ingot.core.errors import ConfigError
from ingot.nn import BatchLayout, Decoder, preset
from ingot.nn.config import Activation, NormKind
from ingot.nn.formats import Int4, Int8, QuantizedTensors, WeightFormat
from ingot.nn.qat import FakeQuantizer, QatConfig, convert_qat, prepare_qat_
from ingot.nn.quantized import quantize_
from ingot.ops.epilogue import IDENTITY, SILU
from ingot.training.adamw import AdamW

FORMATS = [Int8(), Int8(group=32), Int4(group=32), Int4(group=32, zero_point=True)]
each_format = pytest.mark.parametrize("format", FORMATS, ids=str)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
CONFIGS = {
    "llama": preset("tiny"),
    "gpt2": replace(
        preset("tiny"),
        norm=NormKind.LAYER,
        activation=Activation.GELU_TANH,
        rope=None,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
    ),
}


@each_format
@each_dtype
@pytest.mark.parametrize("name", CONFIGS)
def test_the_bits_are_those_of_the_converted_model(
    format: WeightFormat, dtype: torch.dtype, name: str
) -> None:
    decoder = Decoder.from_config(CONFIGS[name], seed=0, dtype=dtype)
    for parameter in decoder.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter)
    tokens, layout = torch.arange(40), BatchLayout.packed([25, 15])
    original = decoder(tokens, layout)
    prepare_qat_(decoder, format)
    trained = decoder(tokens, layout)
    assert trained.requires_grad
    assert not torch.equal(trained, original)
    with torch.inference_mode():
        assert torch.equal(decoder(tokens, layout), trained)
        converted = convert_qat(decoder, format)
        assert torch.equal(converted(tokens, layout), trained)
    assert {n for n, _ in decoder.named_parameters()} > {n for n, _ in converted.named_parameters()}


def leaves(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=random).to(dtype).requires_grad_() for s in shapes]


def relative_error(y: Tensor, wanted: Tensor) -> float:
    y, wanted = y.detach().float(), wanted.detach().float()
    return float((y - wanted).norm() / wanted.norm())


@each_format
@each_dtype
@pytest.mark.parametrize("activation", [IDENTITY, SILU])
def test_gradients_are_those_of_the_dequantized_weight(
    format: WeightFormat, dtype: torch.dtype, activation: int
) -> None:
    x, weight, bias, residual, grad = leaves(dtype, (5, 64), (48, 64), (48,), (5, 48), (5, 48))
    values = format.decode(format.encode(weight.detach())).to(dtype).requires_grad_()
    y = FakeQuantizer(format)(x, [weight], bias, activation, residual)
    found = torch.autograd.grad(y, [x, weight, bias, residual], grad)
    dequantized = ops.linear(x, values, bias, activation, residual)
    wanted = torch.autograd.grad(dequantized, [x, values, bias, residual], grad)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert relative_error(y, dequantized) < 0.02  # the rounding of activations


@each_format
@each_dtype
def test_gradients_of_gate_and_up(format: WeightFormat, dtype: torch.dtype) -> None:
    x, gate, up, grad = leaves(dtype, (5, 64), (48, 64), (48, 64), (5, 48))
    values = [format.decode(format.encode(w.detach())).to(dtype) for w in (gate, up)]
    values = [value.requires_grad_() for value in values]
    y = FakeQuantizer(format)(x, [gate, up], activation=SILU)
    found = torch.autograd.grad(y, [x, gate, up], grad)
    dequantized = ops.gated_linear(x, values[0], values[1])
    wanted = torch.autograd.grad(dequantized, [x, *values], grad)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert relative_error(y, dequantized) < 0.02


def test_a_frozen_weight_has_no_gradient() -> None:
    x, weight = leaves(torch.float32, (5, 64), (48, 64))
    FakeQuantizer(Int8())(x, [weight.detach()]).sum().backward()
    assert x.grad is not None
    FakeQuantizer(Int8())(x.detach(), [weight]).sum().backward()
    assert weight.grad is not None


class CountingInt8(Int8):
    """Counts how often a weight is quantized."""

    def encode(self, weight_ND: Tensor) -> QuantizedTensors:
        ENCODED.append(1)
        return super().encode(weight_ND)


ENCODED: list[int] = []


@each_dtype
def test_a_weight_is_quantized_once_for_each_update(dtype: torch.dtype) -> None:
    ENCODED.clear()
    x, weight = leaves(dtype, (5, 64), (48, 64))
    quantizer = FakeQuantizer(CountingInt8())

    def check(count: int) -> None:
        for _ in range(2):
            y = quantizer(x, [weight])
            with torch.inference_mode():
                assert torch.equal(quantizer(x, [weight]), y)
            assert torch.equal(y, FakeQuantizer(Int8())(x, [weight]))
            torch.autograd.grad(y.sum(), weight)
        assert len(ENCODED) == count

    check(1)
    with torch.no_grad():
        weight.mul_(2)
    check(2)
    low_bits = {weight: torch.zeros_like(weight, dtype=torch.int16)}
    options: Any = {"low_bits": low_bits} if dtype == torch.bfloat16 else {}
    optimizer = AdamW([{"params": [weight]}], lr=0.1, **options)
    optimizer.apply_update({weight: (torch.ones_like(weight), 1.0)})
    check(3)
    weight.data = weight.data.clone()
    check(4)


def test_what_cannot_be_trained_raises() -> None:
    decoder = Decoder.from_config(preset("tiny"), seed=0)
    with pytest.raises(ConfigError, match="64 channels"):
        prepare_qat_(decoder, Int4(group=128))
    with pytest.raises(ConfigError, match="group must be one of"):
        QatConfig(group=48)
    quantize_(decoder, lambda name: Int8() if "qkv" in name else None)
    with pytest.raises(ConfigError, match="quantized already"):
        prepare_qat_(decoder, Int8())


@pytest.mark.parametrize(
    ("config", "format"),
    [
        (QatConfig(), Int4(group=32, zero_point=True)),
        (QatConfig(group=64, symmetric=True), Int4(group=64)),
        (QatConfig(format="int8"), Int8(group=32)),
        (QatConfig(format="int8", group=0), Int8()),
    ],
    ids=str,
)
def test_formats_are_those_of_compress(config: QatConfig, format: WeightFormat) -> None:
    assert config.weight_format == format
