"""Dropout whose mask is a function of the seed, the step, the layer and the row.

The mask comes from a counter-based generator (`ingot.core.random`) without shared state. So the
mask is the same in a resumed run, in a block that is recomputed for its backward, and for any split
of the global batch into micro-batches: `set_step` says at which row a micro-batch begins.

A value is dropped if 16 random bits are below `p`, which is rounded to 1/65536; the others are
scaled by 1 / (1 - p). In `eval` mode dropout is the identity. The bits are generated on the CPU.
"""

# pyright: basic
from __future__ import annotations

import torch
from torch import Tensor, nn

from ingot.core.errors import ConfigError
from ingot.core.random import Purpose, philox_generator

_LEVELS = 2**16
_PER_BLOCK = 16  # values per block of the generator, 256 bits


class Dropout(nn.Module):
    """Dropout of a layer; give each layer of a model its own index.

    >>> layer = Dropout(0.5, layer=0)
    >>> layer.set_step(seed=0, step=7)
    >>> x = torch.ones(4, 3)
    >>> whole = layer(x)
    >>> layer.set_step(seed=0, step=7, row=1)
    >>> torch.equal(layer(x[1:]), whole[1:])
    True
    """

    def __init__(self, p: float, layer: int) -> None:
        super().__init__()
        self.threshold = round(p * _LEVELS)
        if not 0 <= self.threshold < _LEVELS:
            raise ConfigError(f"dropout: p must be in [0, 1), got {p}", hint="give a smaller p")
        self.layer = layer
        self.set_step(seed=0, step=0)

    def set_step(self, *, seed: int, step: int, row: int = 0) -> None:
        """Set the step, and the row of the global batch at which the next input begins."""
        self._seed, self._step, self._row = seed, step, row

    def forward(self, x: Tensor) -> Tensor:
        """Drop values at random; rows are along the first dimension."""
        if not (self.training and self.threshold):
            return x
        width = x[0].numel()
        blocks = -(-width // _PER_BLOCK)  # a row begins with a new block
        stream = philox_generator(
            Purpose.DROPOUT,
            seed=self._seed,
            step=self._step,
            index=self.layer,
            start=self._row * blocks,
        )
        bits = torch.from_numpy(stream.random_raw(4 * blocks * len(x)).view("uint16"))
        keep = bits.view(len(x), -1)[:, :width].to(torch.int32) >= self.threshold
        scale = _LEVELS / (_LEVELS - self.threshold)
        return x * (keep.view(x.shape).to(x.device, x.dtype, non_blocking=True) * scale)


def set_step(model: nn.Module, *, seed: int, step: int, row: int = 0) -> None:
    """Call `set_step` of every dropout of a model."""
    for module in model.modules():
        if isinstance(module, Dropout):
            module.set_step(seed=seed, step=step, row=row)
