"""Small configurations of every supported family, by transformers' own classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers
from transformers import PreTrainedConfig

VOCABULARY = 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
GPT2: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_positions": 128,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}
MOE: dict[str, Any] = {
    "head_dim": 12,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
}
WINDOW: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 11}

BERT = transformers.BertConfig(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=128,
)

MODELS: dict[str, Callable[[], PreTrainedConfig]] = {
    "gpt2": lambda: transformers.GPT2Config(**GPT2),
    "gpt2-untied-relu": lambda: transformers.GPT2Config(
        **GPT2, n_inner=40, activation_function="relu", tie_word_embeddings=False
    ),
    "llama2": lambda: transformers.LlamaConfig(**SIZES),
    "llama3": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3, head_dim=12),
    "llama-yarn": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=YARN),
    "llama-linear-bias": lambda: transformers.LlamaConfig(
        **SIZES, rope_parameters=LINEAR, attention_bias=True
    ),
    "smollm2": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=9),
    "mistral-unbounded": lambda: transformers.MistralConfig(**SIZES, sliding_window=None),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen2-window": lambda: transformers.Qwen2Config(**SIZES, **WINDOW, max_window_layers=1),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=12),
    "qwen3-window": lambda: transformers.Qwen3Config(
        **SIZES,
        **WINDOW,
        head_dim=12,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "olmo2": lambda: transformers.Olmo2Config(**SIZES),
    "mixtral": lambda: transformers.MixtralConfig(
        **SIZES, num_local_experts=5, num_experts_per_tok=2
    ),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(**SIZES, **MOE, norm_topk_prob=True),
    "qwen3-moe-some": lambda: transformers.Qwen3MoeConfig(
        **SIZES, **MOE, **WINDOW, mlp_only_layers=[2], norm_topk_prob=False
    ),
    "qwen3-moe-step": lambda: transformers.Qwen3MoeConfig(**SIZES, **MOE, decoder_sparse_step=2),
}
