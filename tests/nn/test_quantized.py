from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ingot.core.errors import IngotError
from ingot.nn import BatchLayout, Decoder, LoraWeights, preset
from ingot.nn.formats import Int4, Int8, WeightFormat
from ingot.nn.linear import Linear
from ingot.nn.quantized import QuantizedEmbedding, QuantizedLinear, quantize_

FORMATS = [Int8(), Int8(group=32), Int4(group=32), Int4(group=32, zero_point=True)]
each_format = pytest.mark.parametrize("format", FORMATS, ids=str)


def quantized(format: WeightFormat, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    decoder = Decoder.from_config(preset("tiny"), seed=0, dtype=dtype)
    quantize_(decoder, lambda name: format)
    return decoder


def logits(decoder: Decoder, tokens: Tensor, lengths: list[int]) -> Tensor:
    with torch.inference_mode():
        return decoder.logits(decoder(tokens, BatchLayout.packed(lengths)))


@each_format
def test_logits_are_near_those_of_the_original(format: WeightFormat) -> None:
    tokens = torch.arange(20)
    original = Decoder.from_config(preset("tiny"), seed=0)
    expected = logits(original, tokens, [20])
    found = logits(quantized(format, torch.float32), tokens, [20])
    steps = 8 if isinstance(format, Int4) else 127
    assert float((found - expected).std() / expected.std()) < 3 / steps


@each_format
def test_a_token_does_not_depend_on_the_batch(format: WeightFormat) -> None:
    decoder, tokens = quantized(format), torch.arange(60) % 50
    whole = logits(decoder, tokens, [20, 40])
    assert torch.equal(logits(decoder, tokens[:20], [20]), whole[:20])
    assert torch.equal(logits(decoder, tokens[:1], [1]), whole[:1])


@each_format
def test_logprobs_are_those_of_the_logits(format: WeightFormat) -> None:
    decoder, tokens = quantized(format), torch.arange(300) % 50
    with torch.inference_mode():
        hidden = decoder(tokens, BatchLayout.packed([300]))
        expected = torch.ops.ingot.token_logprobs(decoder.logits(hidden), tokens)
        assert torch.equal(decoder.logprobs(hidden, tokens), expected)


def test_gate_and_up_become_one_layer() -> None:
    decoder = quantized(Int8())
    mlp: Any = decoder.blocks[0].mlp
    assert mlp.gate is None
    assert mlp.gate_up.out_features == 2 * preset("tiny").ffn_dim
    kinds = {type(m) for m in decoder.modules() if not list(m.children())}
    assert {QuantizedLinear, QuantizedEmbedding} <= kinds


def test_conversion_keeps_the_dtypes_of_quantized_tensors() -> None:
    decoder = quantized(Int4(scale_dtype=torch.float16)).float()
    layer = decoder.get_submodule("blocks.0.attention.qkv")
    assert layer.scale.dtype == torch.float16
    assert layer.weight.dtype == torch.uint8
    assert decoder.norm.weight.dtype == torch.float32


def test_adapters_are_added_to_quantized_layers() -> None:
    decoder, tokens = quantized(Int8()), torch.arange(12)
    plain = logits(decoder, tokens, [12])
    decoder.add_lora_slots(max_loras=2, max_rank=4)
    index = torch.tensor([-1] * 6 + [1] * 6, dtype=torch.int32)
    layout = replace(BatchLayout.packed([12]), adapters=index)
    width = preset("tiny").dim
    pair = LoraWeights(torch.randn(4, width), torch.randn(4, preset("tiny").ffn_dim))
    decoder.set_adapter(1, {(0, "gate_proj"): pair}, scale=2.0)
    with torch.inference_mode():
        adapted = decoder.logits(decoder(tokens, layout))
    assert torch.equal(adapted[:6], plain[:6])
    assert not torch.equal(adapted[6:], plain[6:])


def test_quantizing_twice_raises() -> None:
    decoder = quantized(Int8())
    with pytest.raises(IngotError, match="already"):
        quantize_(decoder, lambda name: Int8())


def test_the_weight_of_a_quantized_lm_head_raises() -> None:
    with pytest.raises(IngotError, match="quantized"):
        _ = quantized(Int8()).lm_head_weight


@each_format
def test_weights_are_in_panels_where_they_fit(format: WeightFormat) -> None:
    layer: Any = QuantizedLinear.of(Linear(64, 48), format)
    expected = format.encode(torch.randn(48, 64))
    layer.set(expected.map(lambda tensor: tensor[:20]), slice(0, 20))
    layer.set(expected.map(lambda tensor: tensor[20:]), slice(20, 48))
    assert layer.weight.dim() == 4
    for own, new in zip(layer.get(slice(5, 30)), expected, strict=True):
        assert (own is None) == (new is None)
        assert own is None or new is None or torch.equal(own, new[5:30])
    assert torch.equal(format.decode(layer.tensors), format.decode(expected))
    odd: Any = QuantizedLinear.of(Linear(64, 47), format)
    assert odd.weight.dim() == 2
    gated: Any = QuantizedLinear(64, 48, format, gated=True)
    gated.set(expected)
    assert gated.weight.dim() == 2  # half of it is not a whole number of panels


def test_panels_are_for_cpus() -> None:
    layer = QuantizedLinear.of(Linear(64, 48), Int8()).to("meta")
    assert layer.weight.shape == (48, 64)
    assert layer.to_empty(device="cpu").weight.shape == (48, 64)  # until it is set


def test_the_dtype_of_results_follows_the_model() -> None:
    model: Any = Decoder.from_config(preset("tiny"), seed=0, dtype=torch.bfloat16)
    quantize_(model, lambda name: Int8())
    scale = model.tok_embed.tensors.scale
    model.float()
    assert model.tok_embed(torch.tensor([3])).dtype == torch.float32
    assert model.tok_embed.tensors.scale is scale
    model.bfloat16()
    assert model.tok_embed(torch.tensor([3])).dtype == torch.bfloat16
