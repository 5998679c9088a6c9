"""The feed-forward sublayer of a block: an MLP, or a mixture of experts.

Legend: T tokens, D channels, F hidden width, E experts, R experts per token (`top_k`), A = T * R
assignments.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ingot import ops
from ingot.nn.config import Activation, MoEConfig
from ingot.nn.linear import STD, Linear
from ingot.nn.lora import LoraAdapter, LoraPart, LoraShape, LoraSite, LoraSlots
from ingot.nn.recompute import recomputable
from ingot.ops.epilogue import SILU


class MLP(nn.Module):
    """Two linear layers with an activation between them.

    >>> MLP(8, 16, Activation.GELU_TANH, bias=True)(torch.ones(2, 8)).shape
    torch.Size([2, 8])
    """

    def __init__(self, dim: int, ffn_dim: int, activation: Activation, bias: bool = False) -> None:
        super().__init__()
        self.up = Linear(dim, ffn_dim, bias=bias)
        self.down = Linear(ffn_dim, dim, bias=bias)
        self.activation = int(ops.ActivationFn[activation.name])

    @property
    def lora_sites(self) -> list[LoraSite]:
        """The modules that take LoRA adapters."""
        up, down = LoraShape.of(self.up, "up_proj"), LoraShape.of(self.down, "down_proj")
        return [(self.up, up), (self.down, down)]

    def forward(
        self, x: Tensor, residual: Tensor | None = None, adapters: Tensor | None = None
    ) -> Tensor:
        """Apply the MLP; add `residual` if given. `adapters` selects the LoRA adapter of a row."""
        return self.down(recomputable(self.hidden, x, adapters), residual, adapters=adapters)

    def hidden(self, x: Tensor, adapters: Tensor | None = None) -> Tensor:
        """Return the activations between the two layers."""
        return self.up(x, activation=self.activation, adapters=adapters)


class SwiGLU(nn.Module):
    """A gated MLP: `down(silu(gate(x)) * up(x))`.

    >>> SwiGLU(8, 16)(torch.ones(2, 8)).shape
    torch.Size([2, 8])
    """

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.gate: Linear | None = Linear(dim, ffn_dim)
        self.up: Linear | None = Linear(dim, ffn_dim)
        self.gate_up: nn.Module | None = None
        """Gate and up as one quantized layer, which replaces both: see `ingot.nn.quantized`."""
        self.down = Linear(ffn_dim, dim)
        self.lora: LoraAdapter | LoraSlots | None = None
        """LoRA adapters of gate and up together, which have one input."""
        self.compute: Callable[..., Tensor] | None = None
        """Computes gate and up instead of `ops.gated_linear`: see `ingot.nn.qat` and
        `ingot.parallel`."""

    @property
    def lora_sites(self) -> list[LoraSite]:
        """The modules that take LoRA adapters."""
        width, dim = self.down.in_features, self.down.out_features
        parts = tuple((LoraPart(target, 0, width),) for target in ("gate_proj", "up_proj"))
        down = LoraShape.of(self.down, "down_proj")
        site = self if self.gate_up is None else self.gate_up
        return [(site, LoraShape(dim, parts)), (self.down, down)]

    def forward(
        self, x: Tensor, residual: Tensor | None = None, adapters: Tensor | None = None
    ) -> Tensor:
        """Apply the MLP; add `residual` if given. `adapters` selects the LoRA adapter of a row."""
        return self.down(recomputable(self.hidden, x, adapters), residual, adapters=adapters)

    def hidden(self, x: Tensor, adapters: Tensor | None = None) -> Tensor:
        """Return the gated activations before the last layer."""
        if self.gate_up is not None:
            return self.gate_up(x, adapters=adapters)
        assert self.gate is not None
        assert self.up is not None
        gate, up = self.gate.weight, self.up.weight
        if self.compute is not None:
            return self.compute(x, [gate, up], activation=SILU)
        term = None if self.lora is None else self.lora(x, adapters)
        if term is None:
            return ops.gated_linear(x, gate, up)
        h, (gate_b, up_b), index = term
        return ops.gated_linear(x, gate, up, SILU, h, gate_b, up_b, index)


class MoE(nn.Module):
    """A mixture of SwiGLU experts: the weighted sum of the `top_k` experts of a token.

    Of equal router logits the expert with the lower index ranks first. The outputs for a token are
    accumulated in float32 in the order of their rank, independent of the rest of the batch.

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
        self.dispatcher: Callable[[Tensor, Tensor], Tensor] | None = None
        """Computes the experts where they are stored: see `ingot.parallel.expert`."""

    @property
    def lora_sites(self) -> list[LoraSite]:
        """None: experts and routers have no LoRA adapters."""
        return []

    def forward(
        self, x: Tensor, residual: Tensor | None = None, adapters: Tensor | None = None
    ) -> Tensor:
        """Apply the MLP; add `residual` if given."""
        weights_TR, selected_TR = self._route(x)
        experts_A, order_A = selected_TR.flatten().sort(stable=True)  # by expert, then by token
        # Not bincount: the size of its result is data-dependent, which torch.compile cannot trace.
        offsets = torch.searchsorted(experts_A, torch.arange(self.num_experts + 1, device=x.device))
        compute = self._compute_experts if self.dispatcher is None else self.dispatcher
        y_AD = compute(x[order_A // self.top_k], offsets)
        y_TRD = y_AD[order_A.argsort()].unflatten(0, (-1, self.top_k)).to(weights_TR.dtype)
        total = weights_TR[:, 0, None] * y_TRD[:, 0]
        for rank in range(1, self.top_k):
            total = total + weights_TR[:, rank, None] * y_TRD[:, rank]
        return (total if residual is None else residual + total).to(x.dtype)

    def _compute_experts(self, x_AD: Tensor, offsets: Tensor) -> Tensor:
        return compute_experts(x_AD, self.gate, self.up, self.down, offsets)

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits_TE = self.router(x).to(torch.promote_types(x.dtype, torch.float32))
        ranked_TE, experts_TE = logits_TE.sort(dim=-1, descending=True, stable=True)
        selected_TR = experts_TE[:, : self.top_k]
        if self.norm_topk_prob:  # equal to a softmax over the selected logits
            return ops.softmax(ranked_TE[:, : self.top_k]), selected_TR
        return ops.softmax(logits_TE).gather(-1, selected_TR), selected_TR


def compute_experts(
    x_AD: Tensor, gate_EFD: Tensor, up_EFD: Tensor, down_EDF: Tensor, offsets: Tensor
) -> Tensor:
    """Return the output of each row's expert; expert e has rows `offsets[e]` to `offsets[e + 1]`.

    >>> weight, offsets = torch.ones(2, 1, 1), torch.tensor([0, 1, 1])
    >>> compute_experts(torch.ones(1, 1), weight, weight, weight, offsets)
    tensor([[0.7311]])
    """
    h_AF = recomputable(ops.grouped_gated_linear, x_AD, gate_EFD, up_EFD, offsets)
    return ops.grouped_linear(h_AF, down_EDF, offsets)
