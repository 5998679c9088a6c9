"""Model FLOPs of training, for the utilization of a machine."""

from __future__ import annotations

from ingot.nn import DecoderConfig


def flops_per_token(model: DecoderConfig, seq_len: int, frozen: bool = False) -> float:
    """Return the FLOPs per token of a dense decoder's forward and backward at this length.

    A forward takes two for each weight that a token is multiplied by, and those of causal attention
    over half the sequence; a backward takes twice as many, but only two for a frozen weight. Those
    of LoRA adapters are not counted.

    >>> from ingot.nn import preset
    >>> f"{flops_per_token(preset('gpt2-124m'), 1024):.3g}"
    '7.98e+08'
    """
    heads = model.heads * model.head_dim
    attention = model.dim * (2 * heads + 2 * model.kv_heads * model.head_dim)
    mlp_matrices = 3 if model.activation.value == "swiglu" else 2
    matmuls = model.layers * (attention + mlp_matrices * model.dim * model.ffn_dim)
    scores = model.layers * heads * seq_len
    return (4.0 if frozen else 6.0) * (matmuls + model.dim * model.vocab_size) + 6.0 * scores
