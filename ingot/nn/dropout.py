"""Dropout whose mask is a function of the seed, the step, the layer and the row.

The mask comes from a counter-based generator (`ingot.core.random`): nothing is drawn from a state
that others draw from too. So a resumed run drops what the first one dropped, a block that is
computed again for its backward drops the same, and so does a global batch whether in one piece
or in several: whoever splits it says at which row a piece begins.

A value is dropped if 16 random bits are below `p`, which is rounded to 1/65536. What is kept is
divided by the share that is kept. In `eval` nothing is dropped. The bits are made on the CPU.
"""

# pyright: basic
from __future__ import annotations

import torch
from torch import Tensor, nn

from ingot.core.errors import ConfigError
from ingot.core.random import Purpose, philox_generator

_LEVELS = 2**16
_PER_BLOCK = 16  # values that a block of the generator, 256 bits, decides


class Dropout(nn.Module):
    """Dropout of a layer; number the layers of a model, each its own.

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
            raise ConfigError(f"dropout of {p}", hint="give a p from 0 to below 1")
        self.layer = layer
        self.set_step(seed=0, step=0)

    def set_step(self, *, seed: int, step: int, row: int = 0) -> None:
        """Say which step the next rows belong to, and which row of the batch is the first."""
        self._seed, self._step, self._row = seed, step, row

    def forward(self, x: Tensor) -> Tensor:
        """Drop some of the values, in rows along the first dimension."""
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
        return x * (keep.view(x.shape).to(x.device, x.dtype) * scale)


def set_step(model: nn.Module, *, seed: int, step: int, row: int = 0) -> None:
    """Tell every dropout of a model which step this is, and at which row the batch goes on."""
    for module in model.modules():
        if isinstance(module, Dropout):
            module.set_step(seed=seed, step=step, row=row)
