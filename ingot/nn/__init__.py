"""Layers and models on ops: packed tokens and a plan in, states out.

>>> import torch
>>> from ingot.nn import Decoder, Plan, preset
>>> plan = Plan.packed([4])
>>> Decoder.new(preset("tiny"), seed=0)(torch.arange(4), plan.positions(), plan).shape
torch.Size([4, 64])
"""

from __future__ import annotations

from ingot.nn.attention import Attention
from ingot.nn.config import (
    Activation,
    DecoderConfig,
    Experts,
    NormKind,
    NormPlace,
    QkNorm,
    Rope,
)
from ingot.nn.conv import CNN, CNNConfig, ResNet, ResNetConfig
from ingot.nn.decoder import Decoder
from ingot.nn.dense import Dense, DenseConfig
from ingot.nn.dropout import Dropout
from ingot.nn.gru import GRU, GRUConfig
from ingot.nn.linear import Embedding, Linear
from ingot.nn.mlp import MLP, MoE, SwiGLU
from ingot.nn.norm import LayerNorm, RMSNorm
from ingot.nn.plan import KVPool, KVSpec, Plan
from ingot.nn.presets import PRESETS, preset
from ingot.nn.session import Sampling, Session

__all__ = [
    "CNN",
    "GRU",
    "MLP",
    "PRESETS",
    "Activation",
    "Attention",
    "CNNConfig",
    "Decoder",
    "DecoderConfig",
    "Dense",
    "DenseConfig",
    "Dropout",
    "Embedding",
    "Experts",
    "GRUConfig",
    "KVPool",
    "KVSpec",
    "LayerNorm",
    "Linear",
    "MoE",
    "NormKind",
    "NormPlace",
    "Plan",
    "QkNorm",
    "RMSNorm",
    "ResNet",
    "ResNetConfig",
    "Rope",
    "Sampling",
    "Session",
    "SwiGLU",
    "preset",
]
