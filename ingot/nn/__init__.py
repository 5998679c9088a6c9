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
from ingot.nn.decoder import Decoder
from ingot.nn.linear import Embedding, Linear
from ingot.nn.mlp import MLP, MoE, SwiGLU
from ingot.nn.norm import LayerNorm, RMSNorm
from ingot.nn.plan import KVPool, KVSpec, Plan
from ingot.nn.presets import PRESETS, preset
from ingot.nn.session import Sampling, Session

__all__ = [
    "MLP",
    "PRESETS",
    "Activation",
    "Attention",
    "Decoder",
    "DecoderConfig",
    "Embedding",
    "Experts",
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
    "Rope",
    "Sampling",
    "Session",
    "SwiGLU",
    "preset",
]
