"""The part of a block that works on each token alone: one MLP, or a mixture of experts.

Legend: T tokens, D channels, F width, E experts, R choices of a token, A = T * R assignments.
"""

# pyright: basic
from __future__ import annotations

import torch
from torch import Tensor, nn

from ingot import ops
from ingot.nn.config import Activation, MoEConfig
from ingot.nn.linear import STD, Linear

_FUSED = {
    Activation.GELU: ops.linear_gelu,
    Activation.GELU_TANH: ops.linear_gelu_tanh,
    Activation.RELU: ops.linear_relu,
}


class MLP(nn.Module):
    """Up, an activation, down: two layers and what is between them.

    >>> MLP(8, 16, Activation.GELU_TANH, bias=True)(torch.ones(2, 8)).shape
    torch.Size([2, 8])
    """

    def __init__(self, dim: int, ffn_dim: int, activation: Activation, bias: bool = False) -> None:
        super().__init__()
        self.up = Linear(dim, ffn_dim, bias=bias)
        self.down = Linear(ffn_dim, dim, bias=bias)
        self.fused = _FUSED[activation]

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Each token's own, added to the residual if given."""
        return self.down(self.hidden(x), residual)

    def hidden(self, x: Tensor) -> Tensor:
        """What is between the two layers."""
        return self.fused(x, self.up.weight, self.up.bias)


class SwiGLU(nn.Module):
    """An MLP with a gate: `down(silu(gate x) * up x)`.

    >>> SwiGLU(8, 16)(torch.ones(2, 8)).shape
    torch.Size([2, 8])
    """

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.gate = Linear(dim, ffn_dim)
        self.up = Linear(dim, ffn_dim)
        self.down = Linear(ffn_dim, dim)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Each token's own, added to the residual if given."""
        return self.down(self.hidden(x), residual)

    def hidden(self, x: Tensor) -> Tensor:
        """What is before the last layer."""
        return ops.linear_swiglu(x, self.gate.weight, self.up.weight)


class MoE(nn.Module):
    """A mixture of SwiGLU experts: a token's best `top_k`, weighted.

    Of equal scores the expert with the lower number is the better. The results of a token are
    added from its best expert to its worst, in float32, whatever else is in the batch.

    >>> MoE(8, MoEConfig(num_experts=4, top_k=2, ffn_dim=16))(torch.ones(3, 8)).shape
    torch.Size([3, 8])
    """

    def __init__(self, dim: int, config: MoEConfig) -> None:
        super().__init__()
        self.num_experts, self.top_k = config.num_experts, config.top_k
        self.norm_topk_prob = config.norm_topk_prob
        self.router = Linear(dim, config.num_experts)
        self.gate = nn.Parameter(torch.empty(config.num_experts, config.ffn_dim, dim))
        self.up = nn.Parameter(torch.empty(config.num_experts, config.ffn_dim, dim))
        self.down = nn.Parameter(torch.empty(config.num_experts, dim, config.ffn_dim))
        for weight in (self.gate, self.up, self.down):
            nn.init.normal_(weight, std=STD)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Each token's own, added to the residual if given."""
        weights_TR, chosen_TR = self._route(x)
        experts_A, order_A = chosen_TR.flatten().sort(stable=True)  # by expert, then by token
        # Not bincount: how many numbers it gives, no compiler knows.
        offsets = torch.searchsorted(experts_A, torch.arange(self.num_experts + 1, device=x.device))
        h_AF = self.hidden(x[order_A // self.top_k], offsets)
        y_AD = ops.grouped_linear(h_AF, self.down, offsets)
        y_TRD = y_AD[order_A.argsort()].unflatten(0, (-1, self.top_k)).to(weights_TR.dtype)
        total = weights_TR[:, 0, None] * y_TRD[:, 0]
        for rank in range(1, self.top_k):
            total = total + weights_TR[:, rank, None] * y_TRD[:, rank]
        return (total if residual is None else residual + total).to(x.dtype)

    def hidden(self, x_AD: Tensor, offsets: Tensor) -> Tensor:
        """What is before the experts' last layer, for the rows of each expert."""
        return ops.grouped_swiglu(x_AD, self.gate, self.up, offsets)

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores_TE = self.router(x).to(torch.promote_types(x.dtype, torch.float32))
        ranked_TE, experts_TE = scores_TE.sort(dim=-1, descending=True, stable=True)
        chosen_TR = experts_TE[:, : self.top_k]
        if self.norm_topk_prob:  # what is left of a softmax over all is one over the chosen
            return ops.softmax(ranked_TE[:, : self.top_k]), chosen_TR
        return ops.softmax(scores_TE).gather(-1, chosen_TR), chosen_TR
