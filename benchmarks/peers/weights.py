"""Converts a Hugging Face directory to a GGUF file, which llama.cpp and OpenVINO read.

Only the Llama architecture without RoPE scaling, in bfloat16 safetensors. The values stay the same:
bfloat16 is copied; float16 represents them except those below 6e-8 or above 65,504 (and rounds
those below 6e-5).

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


def bf16(model: Path, cache: Path) -> Path:
    """Return the GGUF file of a model directory in bfloat16, from the cache or written to it."""
    return _convert(model, cache, gguf.GGMLQuantizationType.BF16)


def f16(model: Path, cache: Path) -> Path:
    """Return the same in float16."""
    return _convert(model, cache, gguf.GGMLQuantizationType.F16)


def _convert(model: Path, cache: Path, dtype: gguf.GGMLQuantizationType) -> Path:
    sources = [Path(__file__), *sorted([*model.glob("*.json"), *model.glob("*.safetensors")])]
    inputs = [
        (str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in sources
    ]
    path = cache / f"{hashlib.sha256(repr(inputs).encode()).hexdigest()[:16]}-{dtype.name}.gguf"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        try:
            _write(model, temporary, dtype)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    return path


def _write(model: Path, path: Path, dtype: gguf.GGMLQuantizationType) -> None:
    config = json.loads((model / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{dtype.name}"])
    _write_config(writer, config)
    _write_tokenizer(writer, config, json.loads((model / "tokenizer.json").read_text()))
    heads = config["num_attention_heads"]
    reordered = {"attn_q": heads, "attn_k": config.get("num_key_value_heads") or heads}
    for name, bits in _tensors(model):
        short, _, kind = _gguf_name(name).rpartition(".")
        if count := reordered.get(short.rpartition(".")[2]):
            bits = _neighbours(bits, count)
        if bits.ndim == 1:
            writer.add_tensor(f"{short}.{kind}", _float32(bits))
        elif dtype == gguf.GGMLQuantizationType.F16:
            writer.add_tensor(f"{short}.{kind}", _float32(bits).astype(np.float16))
        else:
            writer.add_tensor(f"{short}.{kind}", bits.view(np.uint8), raw_dtype=dtype)
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


def _tensors(model: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield every tensor as its 16-bit values on disk, memory-mapped."""
    for path in sorted(model.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        data = np.memmap(path, np.uint8, "r", offset=8 + length)
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if entry["dtype"] != "BF16":
                raise ValueError(
                    f"{name}: only BF16 weights can be converted, got {entry['dtype']}"
                )
            start, end = entry["data_offsets"]
            yield name, data[start:end].view(np.uint16).reshape(entry["shape"])


def _gguf_name(name: str) -> str:
    """Translate `model.layers.3.mlp.up_proj.weight` to `blk.3.ffn_up.weight`."""
    stem, _, kind = name.removeprefix("model.").rpartition(".")
    if not stem.startswith("layers."):
        return f"{_NAMES[stem]}.{kind}"
    _, layer, short = stem.split(".", 2)
    return f"blk.{layer}.{_NAMES[short]}.{kind}"


def _neighbours(bits: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of each head from halves (0, n/2) to neighbours (0, 1)."""
    halves = bits.reshape(heads, 2, -1, *bits.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(bits.shape)


def _float32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)
