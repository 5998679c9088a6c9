"""The GGUF file of a model directory has the same values, quantized or not."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ingot.interop import compressed_tensors, hf
from ingot.interop.compressed_tensors import COMPRESSED_TENSORS
from ingot.interop.quantization_scheme import LayerGroup, QuantizationScheme
from ingot.nn import Decoder, preset
from ingot.nn.formats import Int4, Int8, WeightFormat
from ingot.nn.quantized import quantize_

gguf = pytest.importorskip("gguf")
from benchmarks.peers import formats, weights  # noqa: E402

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 6,
    "intermediate_size": 5,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 32,
    "vocab_size": 7,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
}
SHAPES = {
    "model.embed_tokens.weight": (7, 6),
    "model.layers.0.input_layernorm.weight": (6,),
    "model.layers.0.self_attn.q_proj.weight": (12, 6),
    "model.layers.0.self_attn.k_proj.weight": (4, 6),
    "model.layers.0.mlp.down_proj.weight": (6, 5),
    "model.norm.weight": (6,),
}
TOKENIZER = {
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]},
    "added_tokens": [{"id": 3, "content": "<end>", "special": True}],
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of random bfloat16 values, from 2^-8 to 2^8."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    random, header, data = np.random.default_rng(0), {}, b""
    for name, shape in SHAPES.items():
        floats = random.uniform(1, 2, shape) * 2.0 ** random.integers(-8, 8, shape)
        bits = (floats.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
        offsets = [len(data), len(data) + len(bits)]
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": offsets}
        data += bits
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + data
    (tmp_path / "model.safetensors").write_bytes(content)
    return tmp_path


def source(model: Path, name: str) -> np.ndarray:
    return (weights._tensors(model)[name].astype(np.uint32) << 16).view(np.float32)


def read_gguf(path: Path) -> dict[str, np.ndarray]:
    reader = gguf.GGUFReader(path)
    return {t.name: gguf.dequantize(t.data, t.tensor_type) for t in reader.tensors}


def rotate(x: np.ndarray, pairs: list[tuple[int, int]]) -> np.ndarray:
    """Apply RoPE: rotate each pair of rows by its own angle."""
    y = x.copy()
    for index, (i, j) in enumerate(pairs):
        cos, sin = np.cos(0.3 + index), np.sin(0.3 + index)
        y[i], y[j] = cos * x[i] - sin * x[j], sin * x[i] + cos * x[j]
    return y


@pytest.mark.parametrize("write", [weights.bf16, weights.f16])
def test_values_are_the_same(
    model: Path, tmp_path: Path, write: Callable[[Path, Path], Path]
) -> None:
    tensors = read_gguf(write(model, tmp_path / "cache"))
    assert len(tensors) == len(SHAPES)
    for theirs, ours in {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.0.attn_norm.weight": "model.layers.0.input_layernorm.weight",
        "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
        "output_norm.weight": "model.norm.weight",
    }.items():
        np.testing.assert_array_equal(tensors[theirs], source(model, ours))


def test_attention_scores_are_the_same_with_either_rope_layout(model: Path, tmp_path: Path) -> None:
    tensors = read_gguf(weights.bf16(model, tmp_path / "cache"))
    halves, neighbours = [(0, 2), (1, 3)], [(0, 1), (2, 3)]
    x = np.random.default_rng(1).normal(size=6).astype(np.float32)
    q, k = (source(model, f"model.layers.0.self_attn.{n}_proj.weight") @ x for n in "qk")
    theirs_q, theirs_k = (tensors[f"blk.0.attn_{n}.weight"] @ x for n in "qk")
    for head in range(3):
        rows = slice(4 * head, 4 * head + 4)
        expected = rotate(q[rows], halves) @ k
        assert rotate(theirs_q[rows], neighbours) @ theirs_k == pytest.approx(expected, rel=1e-5)


def quantized_model(directory: Path, format: WeightFormat) -> Path:
    config = replace(preset("tiny"), ffn_dim=192, vocab_size=7)
    decoder = Decoder.from_config(config, seed=0, dtype=torch.bfloat16)
    quantize_(decoder, lambda name: None if "embed" in name else format)
    hf.save(decoder, directory)
    (directory / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    return directory


def decode(directory: Path, layer: str, format: WeightFormat) -> np.ndarray:
    """Decode a layer as ingot does."""
    tensors = load_file(directory / "model.safetensors")
    parts = {n.rpartition(".")[2]: t for n, t in tensors.items() if n.startswith(f"{layer}.")}
    return format.decode(compressed_tensors.unpack(format, parts, layer)).numpy()


@pytest.mark.parametrize("write", [weights.bf16, weights.f16])
@pytest.mark.parametrize(
    ("format", "type"),
    [
        (Int8(), "Q8_0"),
        (Int8(group=32), "Q8_0"),
        (Int4(group=32), "Q4_0"),
        (Int4(group=64), "Q4_0"),
        (Int4(group=32, zero_point=True), "Q4_1"),
    ],
    ids=str,
)
def test_quantized_values_are_the_same(
    tmp_path: Path, format: WeightFormat, type: str, write: Callable[[Path, Path], Path]
) -> None:
    model = quantized_model(tmp_path / "model", format)
    path = write(model, tmp_path / "cache")
    assert weights.type_name(path) == type
    types = {t.name: t.tensor_type.name for t in gguf.GGUFReader(path).tensors}
    linear = [name for name in types if name.startswith("blk") and "norm" not in name]
    assert len(linear) == 2 * 7
    assert {types[name] for name in linear} == {type}
    assert types["token_embd.weight"] == "F16"
    assert types["blk.0.ffn_norm.weight"] == "F32"
    tensors, prefix = read_gguf(path), "model.layers.1"
    for theirs, ours, heads in (
        ("attn_q", "self_attn.q_proj", 4),
        ("attn_k", "self_attn.k_proj", 2),
        ("attn_v", "self_attn.v_proj", None),
        ("ffn_down", "mlp.down_proj", None),
    ):
        expected = decode(model, f"{prefix}.{ours}", format)
        rows = weights._neighbours(expected, heads) if heads else expected
        # Scales are the same in float16; minima are rounded to 11 bits.
        error = 2**-11 * np.abs(rows).max() if type == "Q4_1" else 0
        np.testing.assert_allclose(tensors[f"blk.1.{theirs}.weight"], rows, rtol=0, atol=error)


@pytest.mark.parametrize(
    ("format", "name"),
    [(Int8(), "int8"), (Int4(group=64), "int4 g64"), (Int4(zero_point=True), "int4 g32 zp")],
    ids=str,
)
def test_formats_have_names(tmp_path: Path, format: WeightFormat, name: str) -> None:
    assert str(formats.read_format(quantized_model(tmp_path, format))) == name


def test_unsupported_formats_are_rejected(model: Path, tmp_path: Path) -> None:
    assert formats.read_format(model) is None
    for change, reason in (
        ({"quant_method": "gptq"}, "only compressed-tensors is supported, got gptq"),
        (None, "GGUF has no type for int2 g32"),
    ):
        scheme = QuantizationScheme((LayerGroup(Int4(group=32)),), COMPRESSED_TENSORS)
        quantization = compressed_tensors.write_scheme(scheme)
        quantization["config_groups"]["group_0"]["weights"]["num_bits"] = 2
        config = {**CONFIG, "quantization_config": change or quantization}
        (model / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=reason):
            weights.f16(model, tmp_path / "cache")


def test_configuration_is_the_same(model: Path, tmp_path: Path) -> None:
    path = weights.bf16(model, tmp_path / "cache")
    fields = {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}
    assert fields["llama.rope.freq_base"] == 5000.0
    assert fields["llama.attention.head_count"] == 3
    assert fields["llama.attention.head_count_kv"] == 1
    assert fields["llama.rope.dimension_count"] == 4
    assert fields["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)
    assert fields["tokenizer.ggml.tokens"][:4] == ["a", "b", "ab", "<end>"]
    assert fields["tokenizer.ggml.merges"] == ["a b"]
    assert fields["tokenizer.ggml.eos_token_id"] == 2


def test_file_is_cached_until_the_model_changes(model: Path, tmp_path: Path) -> None:
    first = weights.bf16(model, tmp_path / "cache")
    stamp = first.stat().st_mtime_ns
    assert weights.bf16(model, tmp_path / "cache").stat().st_mtime_ns == stamp
    assert weights.f16(model, tmp_path / "cache") != first
    (model / "config.json").write_text(json.dumps({**CONFIG, "rope_theta": 7.0}))
    assert weights.bf16(model, tmp_path / "cache") != first


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, "only LlamaForCausalLM"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling: not supported"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_scaling: not supported"),
    ],
)
def test_unsupported_model_is_rejected(
    model: Path, tmp_path: Path, change: dict[str, object], reason: str
) -> None:
    (model / "config.json").write_text(json.dumps({**CONFIG, **change}))
    with pytest.raises(ValueError, match=reason):
        weights.bf16(model, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())
