"""Ops: what is computed. Each op is declared by one record; `ingot.kernels` has the kernels.

>>> import torch
>>> from ingot import ops
>>> ops.rms_norm(torch.ones(1, 4), torch.ones(4), eps=0.0)
tensor([[1., 1., 1., 1.]])
>>> ops.rms_norm.cost(torch.ones(1, 4), torch.ones(4), 0.0)
Cost(bytes=48, flops=16)
"""

from __future__ import annotations

from ingot.ops.activation import geglu, geglu_tanh, gelu, gelu_tanh, relu_squared, silu, swiglu
from ingot.ops.adamw import adamw
from ingot.ops.attention import attention, padded_attention
from ingot.ops.dispatch import Override, Provider, batch_invariant, prefer
from ingot.ops.embedding import embedding, embedding_int4, embedding_int8
from ingot.ops.epilogue import ActivationFn
from ingot.ops.linear import (
    gated_linear,
    gated_linear_input_grad,
    gated_linear_preact_grad,
    grouped_gated_linear,
    grouped_linear,
    linear,
    linear_preact_grad,
)
from ingot.ops.lora import lora_shrink
from ingot.ops.loss import (
    cross_entropy,
    linear_cross_entropy,
    linear_cross_entropy_fwd_bwd,
    linear_logits,
    linear_token_logprobs,
    token_logprobs,
)
from ingot.ops.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm, square_sum
from ingot.ops.quantized import (
    linear_int4,
    linear_int4_dynamic,
    linear_int8,
    linear_int8_dynamic,
)
from ingot.ops.record import Cost, Op, Tolerance, registry
from ingot.ops.recurrent import gru, gru_cell, gru_rollout, rssm_step
from ingot.ops.rope import (
    LinearScaling,
    Llama3Scaling,
    NtkScaling,
    YarnScaling,
    rope,
    rope_and_cache,
    rope_frequencies,
)
from ingot.ops.sample import apply_penalties, philox_uniform, sample, sampling_logprobs
from ingot.ops.softmax import log_softmax, softmax

__all__ = [
    "ActivationFn",
    "Cost",
    "LinearScaling",
    "Llama3Scaling",
    "NtkScaling",
    "Op",
    "Override",
    "Provider",
    "Tolerance",
    "YarnScaling",
    "adamw",
    "add_layer_norm",
    "add_rms_norm",
    "apply_penalties",
    "attention",
    "batch_invariant",
    "cross_entropy",
    "embedding",
    "embedding_int4",
    "embedding_int8",
    "gated_linear",
    "gated_linear_input_grad",
    "gated_linear_preact_grad",
    "geglu",
    "geglu_tanh",
    "gelu",
    "gelu_tanh",
    "grouped_gated_linear",
    "grouped_linear",
    "gru",
    "gru_cell",
    "gru_rollout",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "linear_cross_entropy_fwd_bwd",
    "linear_int4",
    "linear_int4_dynamic",
    "linear_int8",
    "linear_int8_dynamic",
    "linear_logits",
    "linear_preact_grad",
    "linear_token_logprobs",
    "log_softmax",
    "lora_shrink",
    "padded_attention",
    "philox_uniform",
    "prefer",
    "registry",
    "relu_squared",
    "rms_norm",
    "rope",
    "rope_and_cache",
    "rope_frequencies",
    "rssm_step",
    "sample",
    "sampling_logprobs",
    "silu",
    "softmax",
    "square_sum",
    "swiglu",
    "token_logprobs",
]
