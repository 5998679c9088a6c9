"""Exponential moving average (EMA) of the weights (Polyak & Juditsky 1992).

    e = d e + (1 - d) w,   d = min(decay, (1 + t) / (10 + t))

d is smaller in the first steps t, so that the average soon forgets the random initialization. The
average is kept in float32, of the weights that the optimizer updates; split master weights are
joined a few megabytes at a time.
"""

# pyright: basic, reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ingot.ops.adamw import join
from ingot.parallel.shard import local

_CHUNK = 2**20  # elements


class EMA:
    """The EMA of weights by name; `low_bits` holds the low halves of split master weights.

    >>> weights = {"w": torch.tensor([0.0])}
    >>> ema = EMA(weights, decay=0.9)
    >>> weights["w"] += 1
    >>> ema.update(step=0)
    >>> ema.weights["w"]
    tensor([0.9000])
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        decay: float,
        low_bits: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._source, self._low_bits, self._decay = weights, low_bits or {}, decay
        self.weights = {
            name: join(w.detach(), self._low_bits[name]).contiguous()
            if name in self._low_bits
            else w.detach().float().clone()
            for name, w in weights.items()
        }

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Average in the weights as they are after this step."""
        decay = min(self._decay, (1 + step) / (10 + step))
        whole = [name for name in self.weights if name not in self._low_bits]
        averages = [self.weights[name] for name in whole]
        if whole:
            torch._foreach_lerp_(averages, [self._source[name] for name in whole], 1 - decay)
        for name, low in self._low_bits.items():
            both = self._source[name].flatten().split(_CHUNK), low.flatten().split(_CHUNK)
            averages = self.weights[name].view(-1).split(_CHUNK)
            for average, *halves in zip(averages, *both, strict=True):
                average.lerp_(join(*halves), 1 - decay)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the averaged weights by name: the tensors themselves, not copies."""
        return self.weights

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy averages that `state_dict` returned."""
        for name, average in self.weights.items():
            average.copy_(state[name])


@contextmanager
def apply_weights(weights: Mapping[str, Tensor], model: nn.Module) -> Generator[None]:
    """Give the model these weights for the block, in its own dtype.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> with apply_weights({"weight": torch.tensor([[2.0]])}, model):
    ...     model(torch.ones(1)).item()
    2.0
    """
    named = model.named_parameters()
    replaced = {n: local(p) for n, p in named if n in weights}
    saved = {name: parameter.detach().clone() for name, parameter in replaced.items()}
    try:
        with torch.no_grad():
            for name, parameter in replaced.items():
                parameter.copy_(weights[name])
        yield
    finally:
        with torch.no_grad():
            for name, parameter in replaced.items():
                parameter.copy_(saved[name])
