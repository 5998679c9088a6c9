"""Randomness that is a function of its key: the same bits whenever and wherever it is asked for.

Philox (Salmon et al. 2011) turns a key and a counter into bits; nothing is carried from one number
to the next. So a run that is resumed draws what it would have drawn, and a batch that is split
otherwise gets the same numbers, piece by piece.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

_WORD = 2**64
_BLOCK = 4  # words that a counter gives


class Purpose(IntEnum):
    """What numbers are drawn for: no two draw the same."""

    DROPOUT = 1
    MIXUP = 2


def philox_generator(
    purpose: Purpose, *, seed: int, step: int, index: int = 0, start: int = 0
) -> np.random.Philox:
    """The stream of words of this key, from block `start` on, a block being four words.

    >>> whole = philox_generator(Purpose.MIXUP, seed=0, step=3).random_raw(8)
    >>> rest = philox_generator(Purpose.MIXUP, seed=0, step=3, start=1).random_raw(4)
    >>> bool((whole[4:] == rest).all())
    True
    """
    import numpy as np

    key = (seed % _WORD) | (step % _WORD) << 64
    # The counter's lowest word runs; it is raised by one before the first words are made of it.
    counter = (start % _WORD) | (index % _WORD) << 64 | int(purpose) << 128
    return np.random.Philox(key=key, counter=counter)
