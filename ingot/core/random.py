"""Counter-based random numbers: a function of their key, without state.

Philox (Salmon et al. 2011) maps a key and a counter to bits. So a resumed run uses the same random
numbers as an uninterrupted one, and a batch does not depend on how it is split into micro-batches.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

_WORD = 2**64


class Purpose(IntEnum):
    """Use of the random numbers; each has a stream of its own."""

    DROPOUT = 1
    MIXUP = 2
    ROUNDING = 3


def philox_generator(
    purpose: Purpose, *, seed: int, step: int, index: int = 0, start: int = 0
) -> np.random.Philox:
    """Return the generator of this key, from block `start` on; a block is four words.

    >>> whole = philox_generator(Purpose.MIXUP, seed=0, step=3).random_raw(8)
    >>> rest = philox_generator(Purpose.MIXUP, seed=0, step=3, start=1).random_raw(4)
    >>> bool((whole[4:] == rest).all())
    True
    """
    import numpy as np

    key = (seed % _WORD) | (step % _WORD) << 64
    # numpy increments the counter, from its lowest word, before it generates the first block.
    counter = (start % _WORD) | (index % _WORD) << 64 | int(purpose) << 128
    return np.random.Philox(key=key, counter=counter)
