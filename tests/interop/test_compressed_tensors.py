from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from ingot.core.errors import ConfigError, IngotError
from ingot.interop import hf
from ingot.interop.compressed_tensors import (
    COMPRESSED_TENSORS,
    pack,
    read_scheme,
    tensor_shapes,
    unpack,
    write_scheme,
)
from ingot.interop.quantization_scheme import LayerGroup, QuantizationScheme
from ingot.nn import BatchLayout, Decoder, preset
from ingot.nn.formats import Int4, Int8, WeightFormat
from ingot.nn.quantized import quantize_
from ingot.nn.weights import SINGLE, WeightsError

FORMATS: list[WeightFormat] = [
    Int8(),
    Int8(group=32),
    Int4(group=32),
    Int4(group=32, zero_point=True),
    Int4(group=32, scale_dtype=torch.float16),
]
each_format = pytest.mark.parametrize("format", FORMATS, ids=str)


def scheme_of(format: WeightFormat) -> QuantizationScheme:
    return QuantizationScheme((LayerGroup(format),), COMPRESSED_TENSORS)


def saved(directory: Path, format: WeightFormat) -> tuple[Decoder, Path]:
    decoder = Decoder.from_config(preset("tiny"), seed=0, dtype=torch.bfloat16)
    quantize_(decoder, lambda name: None if "embed" in name or "head" in name else format)
    hf.save(decoder, directory)
    return decoder, directory


@each_format
def test_a_saved_model_computes_the_same_bits(format: WeightFormat, tmp_path: Path) -> None:
    decoder, directory = saved(tmp_path, format)
    loaded = hf.load(directory)
    tokens, layout = torch.arange(9), BatchLayout.packed([9])
    with torch.inference_mode():
        assert torch.equal(loaded(tokens, layout), decoder(tokens, layout))
    again = tmp_path / "again"
    hf.save(loaded, again)
    assert (again / SINGLE).read_bytes() == (directory / SINGLE).read_bytes()


@each_format
def test_schemes_are_read_as_written(format: WeightFormat) -> None:
    scheme = read_scheme(write_scheme(scheme_of(format)))
    found: Any = scheme.format_of("model.layers.0.mlp.down_proj")
    assert (type(found), found.group) == (type(format), getattr(format, "group"))  # noqa: B009
    assert scheme.format_of("lm_head") is None


@given(st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_packing_is_reversible(rows: int, seed: int) -> None:
    format = Int4(group=32, zero_point=True)
    weight = torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed))
    tensors = format.encode(weight)
    stored = pack(format, tensors)
    shapes = tensor_shapes(format, rows, 64)
    assert {name: tuple(t.shape) for name, t in stored.items()} == {
        name: shape for name, (shape, _) in shapes.items()
    }
    again = unpack(format, stored, "layer")
    for one, other in zip(tensors, again, strict=True):
        if one is None or other is None:
            assert one is other
        else:
            assert torch.equal(one.float(), other.float())


GOOD = write_scheme(scheme_of(Int4(group=32)))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("config_groups", "group_0", "format"), "marlin"),
        (("config_groups",), {}),
        (("config_groups", "group_0"), None),
        (("config_groups", "group_0", "targets"), ["Embedding"]),
        (("config_groups", "group_0", "weights"), None),
        (("config_groups", "group_0", "weights", "num_bits"), 3),
        (("config_groups", "group_0", "weights", "group_size"), 0),
        (("config_groups", "group_0", "weights", "group_size"), -32),
        (("config_groups", "group_0", "weights", "group_size"), "32"),
        (("config_groups", "group_0", "weights", "type"), "float"),
        (("config_groups", "group_0", "weights", "actorder"), "group"),
        (("ignore",), "lm_head"),
        (("ignore",), [1]),
    ],
)
def test_unsupported_schemes_raise(path: tuple[str, ...], value: Any) -> None:
    config: Any = copy.deepcopy(GOOD)
    at = config
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    with pytest.raises(ConfigError):
        read_scheme(config)


LAYER = "model.layers.0.mlp.down_proj"


def _nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{LAYER}.weight_scale"][0, 0] = float("nan")


def _lying_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{LAYER}.weight_shape"][1] = 10**12


def _no_scale(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[f"{LAYER}.weight_scale"]


def _short_scale(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{LAYER}.weight_scale"] = tensors[f"{LAYER}.weight_scale"][:, :1].contiguous()


def _integer_scale(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{LAYER}.weight_scale"] = tensors[f"{LAYER}.weight_scale"].to(torch.int32)


def _wide_weight(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{LAYER}.weight_packed"] = tensors[f"{LAYER}.weight_packed"].to(torch.int64)


@pytest.mark.parametrize(
    "damage", [_nan, _lying_shape, _no_scale, _short_scale, _integer_scale, _wide_weight]
)
def test_damaged_weights_raise(damage: Any, tmp_path: Path) -> None:
    _, directory = saved(tmp_path, Int4(group=32))
    tensors = load_file(directory / SINGLE)
    damage(tensors)
    save_file(tensors, directory / SINGLE, metadata={"format": "pt"})
    with pytest.raises((ConfigError, WeightsError)):
        hf.load(directory)


def test_a_config_that_quantizes_more_than_the_files_raises(tmp_path: Path) -> None:
    decoder = Decoder.from_config(preset("tiny"), seed=0, dtype=torch.bfloat16)
    hf.save(decoder, tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": GOOD}))
    with pytest.raises(IngotError):
        hf.load(tmp_path)


def test_a_minimum_is_stored_under_a_method_that_others_reject(tmp_path: Path) -> None:
    format = Int4(group=32, minimum=True)
    assert write_scheme(scheme_of(Int4(group=32)))["quant_method"] == "compressed-tensors"
    assert write_scheme(scheme_of(format))["quant_method"] == "ingot"
    decoder, directory = saved(tmp_path, format)
    loaded, (tokens, layout) = hf.load(directory), (torch.arange(9), BatchLayout.packed([9]))
    with torch.inference_mode():
        assert torch.equal(loaded(tokens, layout), decoder(tokens, layout))
    tensors = load_file(directory / SINGLE)
    tensors[f"{LAYER}.weight_minimum"][0, 0] = float("inf")
    save_file(tensors, directory / SINGLE, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="not finite"):
        hf.load(directory)


def test_layers_may_have_different_formats_and_the_embedding_one_too(tmp_path: Path) -> None:
    decoder = Decoder.from_config(preset("tiny"), seed=0, dtype=torch.bfloat16)
    formats: dict[str, WeightFormat] = {
        "tok_embed": Int4(group=32, scale_dtype=torch.float16),
        "blocks.0.mlp.down": Int8(group=32),
        "blocks.1.attention.qkv": Int8(),
        "blocks.1.mlp.gate_up": Int4(group=32, zero_point=True),
    }
    quantize_(decoder, formats.get)
    hf.save(decoder, tmp_path)
    loaded, (tokens, layout) = hf.load(tmp_path), (torch.arange(9), BatchLayout.packed([9]))
    assert loaded.dtype == torch.bfloat16
    for name, format in formats.items():
        assert loaded.get_submodule(name).format == format
    with torch.inference_mode():
        hidden = loaded(tokens, layout)
        assert torch.equal(hidden, decoder(tokens, layout))
        assert torch.equal(loaded.logits(hidden), decoder.logits(hidden))
    assert hf.describe(tmp_path).parameters == sum(
        parameter.numel() for parameter in Decoder.from_config(preset("tiny"), seed=0).parameters()
    )


@each_format
def test_transformers_loads_our_directories_and_writes_them_for_us(
    format: WeightFormat, tmp_path: Path
) -> None:
    """The weights are bitwise equal, both ways; activations are not quantized by transformers."""
    transformers = pytest.importorskip("transformers")
    decoder, directory = saved(tmp_path / "ours", format)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    down: Any = decoder.get_submodule("blocks.0.mlp.down")
    theirs.save_pretrained(tmp_path / "theirs")
    tokens, layout = torch.arange(9), BatchLayout.packed([9])
    with torch.inference_mode():
        expected = theirs(tokens[None]).logits[0].float()
        ours = decoder.logits(decoder(tokens, layout))
        loaded = hf.load(tmp_path / "theirs")
        assert torch.equal(loaded.logits(loaded(tokens, layout)), ours)
    weight = theirs.model.layers[0].mlp.down_proj.weight
    assert torch.equal(weight, down.format.decode(down.tensors).bfloat16())
    assert (expected - ours).abs().max() < 0.05 * expected.abs().max()
