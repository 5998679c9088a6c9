"""GPT-2 in plain PyTorch: the baseline of `ingot bench train`.

The same weights as `ingot.nn.Decoder`, read from the same directory. It is a fair baseline: fused
attention, fused GELU, one matmul for q, k and v, one for the logits.

Legend: B sequences, L tokens of each, D channels, N heads, H channels of a head.
"""

# pyright: basic
from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ingot.core.errors import ConfigError
from ingot.core.targets import IGNORE_INDEX
from ingot.interop import hf
from ingot.nn import DecoderConfig
from ingot.nn.weights import SafetensorsDir


def check_gpt2(directory: Path) -> DecoderConfig:
    """Return the config of a directory; raise `ConfigError` if it is not a GPT-2."""
    described = hf.describe(directory)
    config = described.config
    if (
        described.model_type != "gpt2"
        or config.activation.value != "gelu_tanh"
        or not config.tie_embeddings
    ):
        raise ConfigError(
            f"{directory}: must be a GPT-2, got '{described.model_type}'",
            hint="leave --model out, or give the directory of a GPT-2",
        )
    return config


class GPT2Block(nn.Module):
    """One layer."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        dim, eps = config.dim, config.norm_eps
        self.heads = config.heads
        self.ln_1, self.ln_2 = nn.LayerNorm(dim, eps), nn.LayerNorm(dim, eps)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, config.ffn_dim), nn.Linear(config.ffn_dim, dim)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Apply attention and the MLP, each added to the residual stream."""
        x_BLD = x_BLD + self.out(self._attention(self.qkv(self.ln_1(x_BLD))))
        return x_BLD + self.down(F.gelu(self.up(self.ln_2(x_BLD)), approximate="tanh"))

    def _attention(self, qkv: Tensor) -> Tensor:
        size, length, _ = qkv.shape
        parts = qkv.view(size, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q_BNLH, k_BNLH, v_BNLH = parts.unbind(0)
        y_BNLH = F.scaled_dot_product_attention(q_BNLH, k_BNLH, v_BNLH, is_causal=True)
        return y_BNLH.transpose(1, 2).flatten(2)


class GPT2(nn.Module):
    """The whole model, including its loss."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.dim)
        self.wpe = nn.Embedding(config.max_seq_len, config.dim)
        self.h = nn.ModuleList(GPT2Block(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.dim, config.norm_eps)

    def forward(self, tokens_BL: Tensor, targets_BL: Tensor) -> Tensor:
        """Mean loss of all targets that are not ignored."""
        x_BLD = self.wte(tokens_BL) + self.wpe.weight[: tokens_BL.shape[1]]
        for block in self.h:
            x_BLD = block(x_BLD)
        logits = F.linear(self.ln_f(x_BLD), self.wte.weight)
        return F.cross_entropy(
            logits.flatten(0, 1), targets_BL.flatten(), ignore_index=IGNORE_INDEX
        )


_NAMES = {
    "attn.c_attn": "qkv",
    "attn.c_proj": "out",
    "mlp.c_fc": "up",
    "mlp.c_proj": "down",
}


def load(directory: Path) -> GPT2:
    """Load the model of a directory in float32."""
    model = GPT2(check_gpt2(directory))
    parameters, weights = dict(model.named_parameters()), SafetensorsDir(directory)
    entries = weights.entries.items()
    tensors = {name: torch.empty(entry.shape, dtype=entry.dtype) for name, entry in entries}
    weights.read(tensors)
    with torch.no_grad():
        for name, tensor in tensors.items():
            ours, kind = name.removeprefix("transformer."), name.rpartition(".")[2]
            transposed = kind == "weight" and ".c_" in ours  # GPT-2's Conv1D stores (in, out)
            for theirs, mine in _NAMES.items():
                ours = ours.replace(theirs, mine)
            parameters.pop(ours).copy_(tensor.T if transposed else tensor)
    assert not parameters, sorted(parameters)
    return model
