"""Small models of transformers with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor

VOCAB = 101
_TOKENS: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0}
_WIDTHS: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
NAMES = ("gpt2", "llama", "qwen2", "bert", "vit", "t5", "whisper", "resnet")
_TEXT: dict[str, Any] = {"vocab_size": VOCAB, "max_position_embeddings": 64}
_CAUSAL: dict[str, Any] = {"num_key_value_heads": 2, "use_cache": False}
_MELS, _FRAMES = 8, 24


def _gpt2() -> Any:
    widths: dict[str, Any] = {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
    config = transformers.GPT2Config(vocab_size=VOCAB, use_cache=False, **widths, **_TOKENS)
    return transformers.GPT2LMHeadModel(config)


def _llama() -> Any:
    config = transformers.LlamaConfig(**_CAUSAL, **_TEXT, **_WIDTHS, **_TOKENS)
    return transformers.LlamaForCausalLM(config)


def _qwen2() -> Any:
    config = transformers.Qwen2Config(**_CAUSAL, **_TEXT, **_WIDTHS, **_TOKENS)
    return transformers.Qwen2ForCausalLM(config)


def _bert() -> Any:
    config = transformers.BertConfig(**_TEXT, **_WIDTHS)
    return transformers.BertModel(config, add_pooling_layer=False)


def _vit() -> Any:
    config = transformers.ViTConfig(image_size=32, patch_size=8, **_WIDTHS)
    return transformers.ViTModel(config, add_pooling_layer=False)


def _t5() -> Any:
    widths: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4}
    config = transformers.T5Config(vocab_size=VOCAB, num_layers=2, use_cache=False, **widths)
    return transformers.T5ForConditionalGeneration(config)


def _whisper() -> Any:
    sides: dict[str, Any] = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))
    }
    positions = {"max_source_positions": _FRAMES // 2, "max_target_positions": 64}
    config = transformers.WhisperConfig(
        vocab_size=VOCAB,
        d_model=32,
        num_mel_bins=_MELS,
        use_cache=False,
        pad_token_id=0,
        **sides,
        **positions,
        **_TOKENS,
    )
    return transformers.WhisperForConditionalGeneration(config)


def _resnet() -> Any:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1]
    )
    return transformers.ResNetForImageClassification(config)


_BUILDERS: dict[str, Callable[[], Any]] = dict(
    zip(NAMES, (_gpt2, _llama, _qwen2, _bert, _vit, _t5, _whisper, _resnet), strict=True)
)


def build(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return a model in evaluation mode, without dropout."""
    torch.manual_seed(0)
    return _BUILDERS[name]().eval().to(dtype)


def num_layers(model: Any) -> int:
    """Return how many layers follow one another."""
    config = model.config
    return sum(config.depths) if hasattr(config, "depths") else config.num_hidden_layers


def inputs(
    name: str, batch: int, length: int, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Return the arguments of a model: tokens, images or audio features."""
    tokens = torch.randint(0, VOCAB, (batch, length))
    match name:
        case "vit" | "resnet":
            return {"pixel_values": torch.randn(batch, 3, 32, 32).to(dtype)}
        case "t5":
            sources = torch.randint(0, VOCAB, (batch, length + 3))
            return {"input_ids": sources, "decoder_input_ids": tokens}
        case "whisper":
            features = torch.randn(batch, _MELS, _FRAMES).to(dtype)
            return {"input_features": features, "decoder_input_ids": tokens}
        case _:
            return {"input_ids": tokens}
