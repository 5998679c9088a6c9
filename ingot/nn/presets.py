"""Named configurations. To change one, use `dataclasses.replace`.

>>> from dataclasses import replace
>>> replace(preset("llama-100m"), layers=6).layers
6
"""

from __future__ import annotations

from ingot.core.errors import UnknownName
from ingot.nn.config import Activation, DecoderConfig, MoEConfig, NormKind, Rope

PRESETS: dict[str, DecoderConfig] = {
    "gpt2-124m": DecoderConfig(
        vocab_size=50257,
        dim=768,
        layers=12,
        heads=12,
        kv_heads=12,
        head_dim=64,
        ffn_dim=3072,
        max_seq_len=1024,
        norm=NormKind.LAYER,
        activation=Activation.GELU_TANH,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        tie_embeddings=True,
    ),
    "smollm2-135m": DecoderConfig(
        vocab_size=49152,
        dim=576,
        layers=30,
        heads=9,
        kv_heads=3,
        head_dim=64,
        ffn_dim=1536,
        max_seq_len=8192,
        rope=Rope(theta=100000.0),
        tie_embeddings=True,
    ),
    "llama-100m": DecoderConfig(
        vocab_size=32000,
        dim=768,
        layers=12,
        heads=12,
        kv_heads=4,
        head_dim=64,
        ffn_dim=2048,
        max_seq_len=4096,
        rope=Rope(),
        tie_embeddings=True,
    ),
    "tiny": DecoderConfig(
        vocab_size=256,
        dim=64,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        ffn_dim=160,
        max_seq_len=512,
        rope=Rope(),
        tie_embeddings=True,
    ),
    "tiny-moe": DecoderConfig(
        vocab_size=256,
        dim=64,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        ffn_dim=48,
        max_seq_len=512,
        rope=Rope(),
        moe=MoEConfig(num_experts=4, top_k=2, ffn_dim=48),
    ),
}


def preset(name: str) -> DecoderConfig:
    """Return the configuration with this name.

    >>> preset("smollm2-135m").layers
    30
    """
    if name not in PRESETS:
        raise UnknownName("preset", name, PRESETS)
    return PRESETS[name]
