"""Converts a Hugging Face directory to a GGUF file, which llama.cpp and OpenVINO read.

Only the Llama architecture without RoPE scaling, in bfloat16 safetensors or in the formats of
`ingot compress`. The values stay the same: bfloat16 is copied; float16 represents them except those
below 6e-8 or above 65,504 (and rounds those below 6e-5).

Quantized weights keep their integers, in blocks of 32 channels with the scale of their group in
float16; weights that are not quantized are in float16:

    int8                      Q8_0    scale * q
    int4                      Q4_0    scale * (q - 8)
    int4 with zero points     Q4_1    scale * q + minimum, which is -scale * zero_point, rounded

RoPE in GGUF rotates neighbours (0, 1), (2, 3)...; that of Hugging Face rotates halves (0, n/2),
(1, n/2 + 1)... So the rows of each head of q and k are reordered.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from .formats import IntegerFormat, read_format

_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
}
_NORMAL, _CONTROL = 1, 3
_DTYPES = {"BF16": np.uint16, "I8": np.int8, "I32": np.int32, "I64": np.int64}
_BLOCK = 32


def bf16(model: Path, cache: Path) -> Path:
    """Return the GGUF file of a model directory, from the cache or written to it.

    It is in bfloat16, or in the format of a quantized directory.
    """
    return _convert(model, cache, Type.BF16)


def f16(model: Path, cache: Path) -> Path:
    """Return the same in float16, or in the format of a quantized directory."""
    return _convert(model, cache, Type.F16)


def type_name(path: Path) -> str:
    """Return the type of most weights in a file that is in the cache: `f16`, `Q4_0`."""
    return path.stem.rpartition("-")[2]


def _gguf_type(format: IntegerFormat) -> Type:
    if (format.bits, format.zero_point) == (8, False):
        return Type.Q8_0
    if format.bits != 4:
        raise ValueError(f"GGUF has no type for {format}")
    return Type.Q4_1 if format.zero_point else Type.Q4_0


def _convert(model: Path, cache: Path, dtype: Type) -> Path:
    format = read_format(model)
    dtype = _gguf_type(format) if format else dtype
    name = dtype.name if format else dtype.name.lower()
    sources = [Path(__file__), *sorted([*model.glob("*.json"), *model.glob("*.safetensors")])]
    inputs = [
        (str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in sources
    ]
    path = cache / f"{hashlib.sha256(repr(inputs).encode()).hexdigest()[:16]}-{name}.gguf"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        try:
            _write(model, temporary, dtype)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    return path


def _write(model: Path, path: Path, dtype: Type) -> None:
    config = json.loads((model / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{dtype.name}"])
    _write_config(writer, config)
    _write_tokenizer(writer, config, json.loads((model / "tokenizer.json").read_text()))
    heads = config["num_attention_heads"]
    reordered = {"attn_q": heads, "attn_k": config.get("num_key_value_heads") or heads}
    for name, rows, type in _weights(model, dtype):
        short, _, kind = _gguf_name(name).rpartition(".")
        if count := reordered.get(short.rpartition(".")[2]):
            rows = _neighbours(rows, count)
        writer.add_tensor(f"{short}.{kind}", rows, raw_dtype=type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    rope = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or rope
    if config.get("architectures") != ["LlamaForCausalLM"]:
        architectures = config.get("architectures")
        raise ValueError(f"architectures: only LlamaForCausalLM is supported, got {architectures}")
    if scaling.get("rope_type", "default") != "default":
        raise ValueError(f"rope_scaling: not supported, got {scaling}")
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(config.get("rope_theta") or rope.get("rope_theta") or 10_000.0)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def _write_tokenizer(
    writer: gguf.GGUFWriter, config: dict[str, Any], tokenizer: dict[str, Any]
) -> None:
    """Both readers require a tokenizer, but only ids are used, so its merges do not matter."""
    if tokenizer["model"].get("type", "BPE") != "BPE":
        raise ValueError(f"tokenizer: only BPE can be converted, got {tokenizer['model']['type']}")
    size = config["vocab_size"]
    tokens, types = [f"[unused{i}]" for i in range(size)], [_NORMAL] * size
    for token, index in tokenizer["model"]["vocab"].items():
        tokens[index] = token
    for added in tokenizer.get("added_tokens", []):
        tokens[added["id"]] = added["content"]
        types[added["id"]] = _CONTROL if added["special"] else _NORMAL
    merges = tokenizer["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    for name, add in (("bos", writer.add_bos_token_id), ("eos", writer.add_eos_token_id)):
        token = config.get(f"{name}_token_id")
        add(token[0] if isinstance(token, list) else token or 0)


def _weights(model: Path, dtype: Type) -> Iterator[tuple[str, np.ndarray, Type | None]]:
    """Yield each weight by name, encoded row by row; None is the type of its NumPy dtype."""
    tensors = _tensors(model)
    for name, values in tensors.items():
        layer, _, kind = name.rpartition(".")
        if kind in ("weight_packed", "weight") and f"{layer}.weight_scale" in tensors:
            is_int8 = values.dtype == np.int8  # in a model of 4 bits, the embedding may be
            yield f"{layer}.weight", _quantized(tensors, layer), Type.Q8_0 if is_int8 else dtype
        elif kind in ("weight_scale", "weight_zero_point", "weight_shape"):
            continue
        elif values.dtype != np.uint16:
            raise ValueError(f"{name}: only BF16 weights can be converted, got {values.dtype}")
        elif values.ndim == 1:
            yield name, _float32(values), None
        elif dtype == Type.BF16:
            yield name, values.view(np.uint8), dtype
        else:
            yield name, _float32(values).astype(np.float16), None


def _quantized(tensors: dict[str, np.ndarray], layer: str) -> np.ndarray:
    """Return the blocks of a layer of compressed-tensors."""
    scale = _float32(tensors[f"{layer}.weight_scale"])
    packed = tensors.get(f"{layer}.weight_packed")
    if packed is None:
        return _blocks(tensors[f"{layer}.weight"], scale)
    pairs = packed.view(np.uint8)
    q = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(len(packed), -1)
    words = tensors.get(f"{layer}.weight_zero_point")
    if words is None:
        return _blocks(q, scale)
    zero = words[:, None] >> 4 * np.arange(8)[:, None] & 15  # 8 rows per word
    return _blocks(q, scale, -scale * zero.reshape(-1, words.shape[1])[: len(q)])


def _blocks(q: np.ndarray, scale: np.ndarray, minimum: np.ndarray | None = None) -> np.ndarray:
    """Encode integers: int8 as Q8_0, those from 0 to 15 as Q4_0, with minima as Q4_1."""
    if q.shape[1] % _BLOCK:
        raise ValueError(f"{q.shape[1]} channels are not a multiple of {_BLOCK}")
    blocks = q.reshape(len(q), -1, _BLOCK)

    def of_blocks(values: np.ndarray) -> np.ndarray:
        repeated = np.repeat(values, blocks.shape[1] // values.shape[1], axis=1)
        return repeated.astype(np.float16)[..., None].view(np.uint8)

    half = _BLOCK // 2
    is_int8 = q.dtype == np.int8
    packed = blocks.view(np.uint8) if is_int8 else blocks[..., :half] | blocks[..., half:] << 4
    parts = [of_blocks(values) for values in (scale, minimum) if values is not None]
    return np.concatenate([*parts, packed], axis=-1).reshape(len(q), -1)


def _tensors(model: Path) -> dict[str, np.ndarray]:
    """Return all tensors by name, memory-mapped; bfloat16 as its 16 bits."""
    tensors: dict[str, np.ndarray] = {}
    for path in sorted(model.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        data = np.memmap(path, np.uint8, "r", offset=8 + length)
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if entry["dtype"] not in _DTYPES:
                raise ValueError(
                    f"{name}: only BF16 weights can be converted, got {entry['dtype']}"
                )
            start, end = entry["data_offsets"]
            tensors[name] = data[start:end].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def _gguf_name(name: str) -> str:
    """Translate `model.layers.3.mlp.up_proj.weight` to `blk.3.ffn_up.weight`."""
    stem, _, kind = name.removeprefix("model.").rpartition(".")
    if not stem.startswith("layers."):
        return f"{_NAMES[stem]}.{kind}"
    _, layer, short = stem.split(".", 2)
    return f"blk.{layer}.{_NAMES[short]}.{kind}"


def _neighbours(rows: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of each head from halves (0, n/2) to neighbours (0, 1)."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def _float32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)
