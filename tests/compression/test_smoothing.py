from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.compression import AWQ, GPTQ, Method, RoundToNearest, SmoothQuant, quantize
from ingot.compression.calibration import LayerInputs, LinearLayer, squared_norm
from ingot.compression.smoothing import Fold, folds
from ingot.nn import BatchLayout, Decoder, preset
from ingot.nn.config import DecoderConfig, NormPosition
from ingot.nn.formats import Int4, Int8, LinearEpilogue, WeightFormat
from ingot.nn.linear import Linear

SEQUENCES = [list(range(n, n + 60)) for n in range(12)]
TINY = preset("tiny")
GPT2 = replace(preset("gpt2-124m"), vocab_size=256, dim=64, layers=2, heads=4, kv_heads=4)
CONFIGS: dict[str, tuple[DecoderConfig, list[str]]] = {
    "pre-norm": (TINY, ["attention.qkv", "attention.out", "mlp.gate_up", "mlp.down"]),
    "bias": (
        replace(TINY, qkv_bias=True),
        ["attention.qkv", "attention.out", "mlp.gate_up", "mlp.down"],
    ),
    "post-norm": (
        replace(TINY, norm_position=NormPosition.POST),
        ["attention.out", "mlp.down"],
    ),
    "layer norm": (
        replace(GPT2, head_dim=16, ffn_dim=96),
        ["attention.qkv", "attention.out", "mlp.up"],
    ),
    "experts": (preset("tiny-moe"), ["attention.qkv", "attention.out"]),
}
each_config = pytest.mark.parametrize(("config", "layers"), CONFIGS.values(), ids=CONFIGS)


def random_decoder(config: DecoderConfig, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    """A decoder in which no bias is 0 and no weight of a norm 1."""
    decoder = Decoder.from_config(config, seed=0, dtype=dtype)
    random = torch.Generator().manual_seed(1)
    for parameter in decoder.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=random)
    return decoder


@torch.no_grad()
def hidden(decoder: Decoder) -> torch.Tensor:
    tokens = torch.tensor(SEQUENCES).flatten()
    return decoder(tokens, BatchLayout.packed([len(ids) for ids in SEQUENCES]))


@torch.no_grad()
def scale_randomly(decoder: Decoder, random: torch.Generator, *, powers_of_two: bool) -> None:
    block: Any
    for block in decoder.blocks:
        for fold in folds(block):
            exponent = fold.tie(
                4 * torch.randn(fold.layer.linears[0].in_features, generator=random)
            )
            fold.apply(torch.exp2(exponent.round() if powers_of_two else exponent))


@each_config
@settings(max_examples=5)
@given(seed=st.integers(0, 1000))
def test_folding_powers_of_two_changes_no_bit(
    config: DecoderConfig, layers: list[str], seed: int
) -> None:
    decoder = random_decoder(config)
    before = hidden(decoder)
    scale_randomly(decoder, torch.Generator().manual_seed(seed), powers_of_two=True)
    assert torch.equal(hidden(decoder), before)


@each_config
def test_folding_other_scales_changes_the_last_bits_only(
    config: DecoderConfig, layers: list[str]
) -> None:
    decoder = random_decoder(config, torch.float32)
    before = hidden(decoder)
    scale_randomly(decoder, torch.Generator().manual_seed(0), powers_of_two=False)
    assert not torch.equal(hidden(decoder), before)
    torch.testing.assert_close(hidden(decoder), before, rtol=1e-3, atol=1e-4)


@each_config
def test_layers_after_a_linear_producer_are_scaled(
    config: DecoderConfig, layers: list[str]
) -> None:
    block: Any = Decoder.on_meta(config).blocks[0]
    assert [fold.layer.name for fold in folds(block)] == layers


def planted(
    channels: int = 128, outlier: float = 30.0, seed: int = 0
) -> tuple[Fold, torch.Tensor, LayerInputs]:
    """A layer, and inputs of which one channel is much larger than the others."""
    random = torch.Generator().manual_seed(seed)
    layer, norm = Linear(channels, 48).requires_grad_(False), torch.ones(channels)
    layer.weight.data = torch.randn(layer.weight.shape, generator=random)
    x = torch.randn(256, channels, generator=random)
    x[:, 37] *= outlier
    fold = Fold(LinearLayer("layer", layer, (layer,)), (norm,), (1, 1, channels))
    return fold, x, LayerInputs(x.T @ x / len(x), x.abs().amax(0))


@torch.no_grad()
def smooth(method: AWQ | SmoothQuant, format: WeightFormat, fold: Fold, inputs: LayerInputs) -> Any:
    scale = method.scale(format, fold, inputs)
    fold.apply(scale)
    return scale


@pytest.mark.parametrize("format", [Int4(), Int4(group=64, zero_point=True), Int8()], ids=str)
def test_awq_protects_a_channel_of_large_inputs(format: WeightFormat) -> None:
    fold, _, inputs = planted()
    weight = fold.layer.weight_ND
    decoded = format.decode(RoundToNearest().encode(format, weight, None))
    rounded = squared_norm(decoded - weight, inputs.hessian_DD)
    scale = smooth(AWQ(), format, fold, inputs)
    hessian = inputs.hessian_DD / scale / scale[:, None]
    decoded = format.decode(AWQ().encode(format, fold.layer.weight_ND, hessian)) / scale
    assert squared_norm(decoded - weight, inputs.hessian_DD) < 0.7 * rounded
    assert scale[37] == scale.max()


@given(seed=st.integers(0, 1000), outlier=st.floats(0.01, 100))
def test_awq_never_adds_error_to_plain_rounding(seed: int, outlier: float) -> None:
    fold, _, inputs = planted(64, outlier=outlier, seed=seed)
    weight, format = fold.layer.weight_ND, Int4()
    scale = smooth(AWQ(), format, fold, inputs)
    before = format.decode(format.encode(weight)) - weight
    after = format.decode(format.encode(fold.layer.weight_ND)) / scale - weight
    hessian = inputs.hessian_DD
    assert squared_norm(after, hessian) <= squared_norm(before, hessian) * 1.000001


def test_smoothquant_protects_the_channels_next_to_large_inputs() -> None:
    fold, x, inputs = planted()
    format, weight = Int8(), fold.layer.weight_ND

    def output(x: torch.Tensor) -> torch.Tensor:
        return format.linear(x, format.encode(fold.layer.weight_ND), LinearEpilogue())

    expected = x @ weight.T
    before = (output(x) - expected).square().mean()
    scale = smooth(SmoothQuant(), format, fold, inputs)
    after = (output(x / scale) - expected).square().mean()
    assert after < 0.5 * before


@given(alpha=st.floats(0, 1))
def test_smoothquant_divides_the_ranges_by_alpha(alpha: float) -> None:
    fold, _, inputs = planted(outlier=64.0)
    ranges = inputs.max_D, fold.layer.weight_ND.abs().amax(0)
    scale = smooth(SmoothQuant(alpha=alpha), Int8(), fold, inputs)
    expected = ranges[0] ** alpha / ranges[1] ** (1 - alpha)
    ratio = scale / expected  # one factor for all channels, within a rounding to powers of two
    assert ratio.max() / ratio.min() <= 2.0001
    assert torch.equal(scale.log2(), scale.log2().round())


@pytest.mark.parametrize("method", [AWQ(), SmoothQuant()], ids=str)
def test_channels_without_inputs_do_no_harm(method: AWQ | SmoothQuant) -> None:
    fold, x, _ = planted()
    x[:, 20:70] = 0
    for values in (x, torch.zeros_like(x)):
        inputs = LayerInputs(values.T @ values, values.abs().amax(0))
        scale = method.scale(Int4(), fold, inputs)
        assert bool(scale.isfinite().all())
        assert bool((scale > 0).all())


@pytest.mark.parametrize(
    ("method", "than"),
    [(AWQ(), RoundToNearest()), (AWQ(rounding=GPTQ()), AWQ())],
    ids=str,
)
def test_each_step_brings_a_model_with_outliers_closer(method: Method, than: Method) -> None:
    def error(method: Method) -> torch.Tensor:
        decoder = Decoder.from_config(TINY, seed=0)
        block: Any
        for block in decoder.blocks:
            for norm in (block.attention_norm, block.mlp_norm):
                norm.weight.data[11] *= 20
        expected = hidden(decoder)
        quantize(decoder, Int4(), method, SEQUENCES)
        return (hidden(decoder) - expected).square().mean()

    assert error(method) < 0.8 * error(than)


def test_the_scales_are_folded_before_quantizing() -> None:
    decoder, original = random_decoder(TINY), random_decoder(TINY)
    block: Any
    other: Any
    for block in (*decoder.blocks, *original.blocks):
        block.mlp_norm.weight.data[11] *= 16
    quantize(decoder, Int8(), SmoothQuant(), SEQUENCES)
    expected = hidden(original)
    assert (hidden(decoder) - expected).norm() < 0.1 * expected.norm()
    for block, other in zip(decoder.blocks, original.blocks, strict=True):
        ratio = block.mlp_norm.weight / other.mlp_norm.weight
        assert ratio[11] < ratio.median()
