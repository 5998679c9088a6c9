"""Small GGUF files, made from models of transformers as llama.cpp's converter makes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from tokenizers import pre_tokenizers

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "hello")]
SPECIAL = ["<|begin|>", "<|end|>", "<|turn|>"]
TOKENS = [*SPECIAL, *LETTERS, *("".join(pair) for pair in MERGES)]
TEMPLATE = "{% for m in messages %}<|turn|>{{ m['role'] }} {{ m['content'] }}{% endfor %}"

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

SHAPE: dict[str, Any] = {
    "vocab_size": len(TOKENS),
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}


def model(family: str, **changes: Any) -> Any:
    """A model of the family with random weights that bfloat16 can hold."""
    kinds = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }
    make_config, make_model = kinds[family]
    torch.manual_seed(7)
    made = make_model(make_config(**{**SHAPE, **changes})).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_((0.5 * torch.randn_like(parameter)).bfloat16().float())
    return made


def gguf_name(name: str) -> str:
    fixed = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem, _, kind = name.rpartition(".")
    if stem in fixed:
        return f"{fixed[stem]}.{kind}"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{NAMES[part]}.{kind}"


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k of a Llama: halves become pairs."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def tensors(made: Any, family: str) -> dict[str, np.ndarray]:
    config, found = made.config, {}
    for name, value in made.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        weight = value.detach().float().numpy()
        if family == "llama" and name.endswith("q_proj.weight"):
            weight = interleaved(weight, config.num_attention_heads)
        if family == "llama" and name.endswith("k_proj.weight"):
            weight = interleaved(weight, config.num_key_value_heads)
        found[gguf_name(name)] = weight
    return found


# Offsets of the float16 numbers of a block, and a magnitude for weights of about 0.05.
HALVES = {
    "Q4_0": (0.01, [0]),
    "Q4_1": (0.01, [0, 2]),
    "Q4_K": (2e-4, [0, 2]),
    "Q8_0": (6e-4, [0]),
    "Q6_K": (3e-5, [208]),
}


def random_blocks(name: str, rows: int, channels: int, seed: int = 0) -> np.ndarray:
    """Return rows of blocks of any bits, with scales of a typical magnitude."""
    rng = np.random.default_rng(seed)
    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    blocks = rng.integers(0, 256, (rows, channels // elements, size), dtype=np.uint8)
    magnitude, offsets = HALVES[name]
    for at in offsets:
        halves = rng.uniform(-magnitude, magnitude, (*blocks.shape[:2], 1)).astype("<f2")
        blocks[..., at : at + 2] = halves.view(np.uint8)
    return blocks.reshape(rows, -1)


def metadata(made: Any, family: str) -> dict[str, Any]:
    config = made.config
    return {
        f"{family}.block_count": config.num_hidden_layers,
        f"{family}.context_length": config.max_position_embeddings,
        f"{family}.embedding_length": config.hidden_size,
        f"{family}.feed_forward_length": config.intermediate_size,
        f"{family}.attention.head_count": config.num_attention_heads,
        f"{family}.attention.head_count_kv": config.num_key_value_heads,
        f"{family}.attention.key_length": config.head_dim
        if family != "qwen2"
        else config.hidden_size // config.num_attention_heads,
        f"{family}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{family}.rope.freq_base": config.rope_parameters["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in MERGES],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": TEMPLATE,
    }


def write(
    path: Path,
    family: str,
    values: dict[str, Any],
    weights: dict[str, np.ndarray],
    types: dict[str, gguf.GGMLQuantizationType] | None = None,
) -> Path:
    """Write a GGUF file; a tensor with a type is given as it is stored."""
    writer = gguf.GGUFWriter(path, family)
    for key, value in values.items():
        if value is None:
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, weight in weights.items():
        kind = (types or {}).get(name)
        writer.add_tensor(name, np.ascontiguousarray(weight), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


Small = Callable[..., Path]


@pytest.fixture
def small(tmp_path: Path) -> Small:
    """Make a small file; changes of metadata and weights replace, None takes away."""

    def make(
        family: str = "llama",
        change: dict[str, Any] | None = None,
        weights: dict[str, Any] | None = None,
        architecture: str | None = None,
        types: dict[str, Any] | None = None,
        **shape: Any,
    ) -> Path:
        made = model(family, **shape)
        values = {**metadata(made, family), **(change or {})}
        found = {**tensors(made, family), **(weights or {})}
        kept = {name: weight for name, weight in found.items() if weight is not None}
        return write(tmp_path / "small.gguf", architecture or family, values, kept, types)

    return make
