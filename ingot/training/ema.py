"""A running mean of the weights, which is often better than the last of them (Polyak & Juditsky
1992).

    e = d e + (1 - d) w,   d = min(decay, (1 + t) / (10 + t))

d is smaller in the first steps t, so that the mean does not drag the fresh weights along. The mean
is in float32, of the optimizer's weights; those that are in two parts are put together some
megabytes at a time.
"""

# pyright: basic, reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ingot.ops.adamw import join

_CHUNK = 2**20  # elements


class EMA:
    """The running mean of some weights by name; `low_bits` holds the low halves of split ones.

    >>> weights = {"w": torch.tensor([0.0])}
    >>> mean = EMA(weights, decay=0.9)
    >>> weights["w"] += 1
    >>> mean.update(step=0)
    >>> mean.weights["w"]
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
        """Take the weights in as they are after this step."""
        decay = min(self._decay, (1 + step) / (10 + step))
        whole = [name for name in self.weights if name not in self._low_bits]
        means = [self.weights[name] for name in whole]
        if whole:
            torch._foreach_lerp_(means, [self._source[name] for name in whole], 1 - decay)
        for name, low in self._low_bits.items():
            both = self._source[name].flatten().split(_CHUNK), low.flatten().split(_CHUNK)
            means = self.weights[name].view(-1).split(_CHUNK)
            for mean, *halves in zip(means, *both, strict=True):
                mean.lerp_(join(*halves), 1 - decay)

    @contextmanager
    def applied_to(self, model: nn.Module) -> Generator[None]:
        """Lend the model the mean for the block, in its own dtype."""
        lent = {n: p for n, p in model.named_parameters() if n in self.weights}
        kept = {name: parameter.detach().clone() for name, parameter in lent.items()}
        try:
            with torch.no_grad():
                for name, parameter in lent.items():
                    parameter.copy_(self.weights[name])
            yield
        finally:
            with torch.no_grad():
                for name, parameter in lent.items():
                    parameter.copy_(kept[name])

    def load_state_dict(self, weights: Mapping[str, Tensor]) -> None:
        """Go on from the means of another process."""
        for name, mean in self.weights.items():
            mean.copy_(weights[name])
