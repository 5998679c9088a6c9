"""Small models of transformers with random weights."""

from __future__ import annotations

from typing import Any

import torch
import transformers

VOCAB = 101
_TOKENS: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0}
_WIDTHS: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
NAMES = ("gpt2", "llama", "bert", "vit")


def build(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return a model in evaluation mode, without dropout."""
    torch.manual_seed(0)
    text = {"vocab_size": VOCAB, "max_position_embeddings": 64}
    if name == "gpt2":
        config: Any = transformers.GPT2Config(
            vocab_size=VOCAB,
            n_positions=64,
            n_embd=32,
            n_layer=2,
            n_head=4,
            use_cache=False,
            **_TOKENS,
        )
        model: Any = transformers.GPT2LMHeadModel(config)
    elif name == "llama":
        config = transformers.LlamaConfig(
            num_key_value_heads=2, use_cache=False, **text, **_WIDTHS, **_TOKENS
        )
        model = transformers.LlamaForCausalLM(config)
    elif name == "bert":
        model = transformers.BertModel(
            transformers.BertConfig(**text, **_WIDTHS), add_pooling_layer=False
        )
    else:
        model = transformers.ViTModel(
            transformers.ViTConfig(image_size=32, patch_size=8, **_WIDTHS), add_pooling_layer=False
        )
    return model.eval().to(dtype)


def inputs(name: str, batch: int, length: int, dtype: torch.dtype = torch.float32) -> Any:
    """Return the one argument of a model: tokens, or images."""
    if name == "vit":
        return torch.randn(batch, 3, 32, 32).to(dtype)
    return torch.randint(0, VOCAB, (batch, length))
