"""Expert parallelism: rows travel to the rank that stores their expert, instead of the weights.

The experts of a layer are divided among the ranks of `fsdp`, which compute different micro-batches.
A rank sends each row to the owner of its expert (all-to-all), the owner computes it, and sends the
result back.

The bits are those of a single process. A row's result does not depend on other rows. The gradient
of a weight is a sum over rows, so an owner computes the rows of each sender by themselves: this is
the gradient that the sender would have computed. The gradients of the senders are then summed in
the order of `ingot.parallel.ranks`, without communication.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ingot.core.errors import ConfigError
from ingot.nn.mlp import MoE, compute_experts
from ingot.parallel import ranks as collectives
from ingot.parallel.mesh import Mesh

WEIGHTS = ("gate", "up", "down")
_Key = tuple[str, int]  # a weight and the rank whose rows gave its gradient


def check_experts(config: Any, size: int) -> None:
    """Raise a `ConfigError` unless this number of ranks can divide the experts of a model.

    >>> from ingot.nn import preset
    >>> check_experts(preset("tiny-moe"), 2)
    """
    moe = getattr(config, "moe", None)
    if moe is None:
        raise ConfigError("parallel.ep: the model has no experts", hint="set parallel.ep=1")
    if moe.num_experts % size:
        raise ConfigError(
            f"parallel.ep: must divide model.moe.num_experts, {moe.num_experts}, got {size}",
            hint="lower parallel.ep, or set it to 1: then experts are sharded (FSDP)",
        )


class ExpertDispatcher:
    """Computes the experts of a layer on the ranks that store them; `sync` ends a sum.

    The weights of the layer are replaced by those of this rank's experts. `on_grad` takes the
    gradient of a shard of the batch, by the name of the weight.
    """

    def __init__(self, moe: MoE, mesh: Mesh, on_grad: Callable[[str, Tensor], None]) -> None:
        self._ranks, self._replicas, self._on_grad = mesh.fsdp, mesh.dp.group, on_grad
        self._moe, self._own = moe, moe.num_experts // mesh.fsdp.size
        self._grads: dict[_Key, Tensor] = {}
        self._collected = 0
        self.sync = True
        """Whether the next backward is the last of a shard of the batch."""
        begin = self._own * mesh.fsdp.rank
        for name in WEIGHTS:
            weight = getattr(moe, name)
            own = weight.detach()[begin : begin + self._own].clone()
            setattr(moe, name, nn.Parameter(own, requires_grad=weight.requires_grad))
        moe.dispatcher = self

    @property
    def weights(self) -> list[nn.Parameter]:
        """The weights of this rank's experts."""
        return [getattr(self._moe, name) for name in WEIGHTS]

    def __call__(self, x_AD: Tensor, offsets: Tensor) -> Tensor:
        """Return the output of each row's expert; the rows are sorted by expert."""
        group, size = self._ranks.group, self._ranks.size
        counts = offsets.diff()
        by_sender = collectives.all_to_all(counts, group).view(size, self._own)
        sent_rows = counts.view(size, self._own).sum(1).tolist()
        received_rows = by_sender.sum(1).tolist()
        x = _AllToAll.apply(x_AD, received_rows, sent_rows, group)
        parts = [
            self._compute(rows, each, sender)
            for sender, (rows, each) in enumerate(
                zip(x.split(received_rows), by_sender, strict=True)
            )
        ]
        return _AllToAll.apply(torch.cat(parts), sent_rows, received_rows, group)

    def _compute(self, rows: Tensor, counts: Tensor, sender: int) -> Tensor:
        gate, up, down = self._leaves(sender)
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        return compute_experts(rows, gate, up, down, offsets)

    def _leaves(self, sender: int) -> list[Tensor]:
        """Return the weights of this rank's experts, with gradients of the sender's rows."""
        if not torch.is_grad_enabled():
            return [*self.weights]
        leaves = [weight.detach().requires_grad_() for weight in self.weights]
        for name, leaf in zip(WEIGHTS, leaves, strict=True):
            leaf.register_post_accumulate_grad_hook(partial(self._collect, (name, sender)))
        return leaves

    def _collect(self, key: _Key, leaf: Tensor) -> None:
        grad, leaf.grad = leaf.grad, None
        assert grad is not None
        so_far = self._grads.get(key)
        self._grads[key] = grad if so_far is None else so_far.float().add_(grad)
        self._collected += 1
        if self._collected == len(WEIGHTS) * self._ranks.size:
            self._collected = 0
            if self.sync:
                self._sum()

    def _sum(self) -> None:
        for name in WEIGHTS:
            parts = [self._grads.pop((name, sender)).float() for sender in range(self._ranks.size)]
            total = collectives.tree_sum(parts)
            assert self._replicas is not None
            collectives.all_reduce(total.view(-1), self._replicas)
            self._on_grad(name, total)


class _AllToAll(torch.autograd.Function):
    """Sends `sent[r]` rows to rank r and receives `received[r]` from it; the gradient returns."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.splits = sent, received, group
        return collectives.all_to_all(rows, group, received, sent)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        return _AllToAll.apply(grad, *ctx.splits), None, None, None
