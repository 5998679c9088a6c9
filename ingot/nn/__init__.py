"""Layers and models built on ops: packed tokens and their layout in, hidden states out.

>>> import torch
>>> from ingot.nn import BatchLayout, Decoder, preset
>>> layout = BatchLayout.packed([4])
>>> Decoder.from_config(preset("tiny"), seed=0)(torch.arange(4), layout).shape
torch.Size([4, 64])
"""

from __future__ import annotations

from ingot.nn.attention import Attention
from ingot.nn.config import (
    Activation,
    DecoderConfig,
    EncoderConfig,
    MoEConfig,
    NormKind,
    NormPosition,
    QkNorm,
    Rope,
)
from ingot.nn.conv import CNN, CNNConfig, ResNet, ResNetConfig
from ingot.nn.decoder import Decoder
from ingot.nn.dense import Dense, DenseConfig
from ingot.nn.dropout import Dropout
from ingot.nn.encoder import Encoder
from ingot.nn.gru import GRU, GRUConfig
from ingot.nn.layout import BatchLayout, KVCache, KVSpec
from ingot.nn.linear import Embedding, Linear
from ingot.nn.lora import LoraConfig, LoraKey, LoraWeights
from ingot.nn.mlp import MLP, MoE, SwiGLU
from ingot.nn.norm import LayerNorm, RMSNorm
from ingot.nn.presets import PRESETS, preset

__all__ = [
    "CNN",
    "GRU",
    "MLP",
    "PRESETS",
    "Activation",
    "Attention",
    "BatchLayout",
    "CNNConfig",
    "Decoder",
    "DecoderConfig",
    "Dense",
    "DenseConfig",
    "Dropout",
    "Embedding",
    "Encoder",
    "EncoderConfig",
    "GRUConfig",
    "KVCache",
    "KVSpec",
    "LayerNorm",
    "Linear",
    "LoraConfig",
    "LoraKey",
    "LoraWeights",
    "MoE",
    "MoEConfig",
    "NormKind",
    "NormPosition",
    "QkNorm",
    "RMSNorm",
    "ResNet",
    "ResNetConfig",
    "Rope",
    "SwiGLU",
    "preset",
]
