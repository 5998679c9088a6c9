"""DiLoCo (Douillard et al. 2023): replicas that train on their own and are averaged now and then.

Each replica takes `parallel.local_steps` optimizer steps on its own part of every batch, with its
own optimizer state and gradient clipping. Then all continue from

    g = w - mean of the replicas' weights       w: the weights at the last synchronization
    m = momentum m + g
    w = w - lr (g + momentum m)

which is SGD with Nesterov momentum. The mean is summed over the replicas in the order of
`ingot.parallel.ranks`, in float32 or of int8 messages (`ingot.parallel.compression`).

Each rank stores w and m of its rows, in float32.
"""

# pyright: basic, reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ingot.parallel.compression import Int8Messages, Int8Rounding
from ingot.parallel.config import ParallelConfig
from ingot.parallel.ranks import Ranks, all_reduce

_MOMENTUM = "|momentum"
_SHARD = 2**30  # above the shards of a batch, whose gradients have other random numbers


class OuterOptimizer:
    """Synchronizes the replicas of a run; `weights` are those of the last synchronization.

    With a `seed`, int8 messages are sent. `rows` returns which rows of a weight this rank
    stores.

    >>> config = ParallelConfig(dp=2, local_steps=10, outer_lr=0.5, outer_momentum=0.0)
    >>> outer = OuterOptimizer({"w": torch.tensor([1.0])}, Ranks(), config)
    >>> outer.update("w", torch.tensor([2.0]))
    tensor([1.5000])
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        replicas: Ranks,
        config: ParallelConfig,
        seed: int | None = None,
        rows: Callable[[str], Sequence[slice]] = lambda _: [slice(0, None)],
    ) -> None:
        self.weights = {name: weight.detach().float().clone() for name, weight in weights.items()}
        self._momentum = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}
        self._replicas, self._config = replicas, config
        self._rounding = None if seed is None else Int8Rounding(seed)
        self._rows = rows

    def set_step(self, step: int) -> None:
        """Set the step after which weights are updated; it decides how messages are rounded."""
        if self._rounding:
            self._rounding.set_shard(step=step, shard=_SHARD + self._replicas.rank)

    @torch.no_grad()
    def update(self, name: str, weight: Tensor) -> Tensor:
        """Return the new value of a weight, given this replica's; all ranks call this in turn."""
        outer, momentum = self.weights[name], self._momentum[name]
        grad = self._sum(name, outer - weight).div_(self._replicas.size)
        # No `alpha=`: torch fuses it into one rounding on some instruction sets.
        momentum.mul_(self._config.outer_momentum).add_(grad)
        grad.add_(momentum * self._config.outer_momentum)
        return outer.sub_(grad.mul_(self._config.outer_lr))

    def _sum(self, name: str, change: Tensor) -> Tensor:
        """Return the sum of what the replicas have changed."""
        if self._rounding and change.dim() > 1 and len(change):
            messages = Int8Messages({name: change.shape}, self._rounding)
            sent = messages.encode(change.view(1, -1), self._rows(name)[0].start)
            return messages.all_reduce(sent, self._replicas).view(change.shape)
        if self._replicas.group is not None and len(change):
            flat = change.view(-1)
            all_reduce(flat, self._replicas.group)
        return change

    def state_dict(self) -> dict[str, Tensor]:
        """Return the weights and the momentum: the tensors themselves, not copies."""
        momentum = {f"{name}{_MOMENTUM}": value for name, value in self._momentum.items()}
        return {**self.weights, **momentum}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy a state that `state_dict` returned."""
        for name, weight in self.weights.items():
            weight.copy_(state[name])
            self._momentum[name].copy_(state[f"{name}{_MOMENTUM}"])
