"""Shuffled order of an epoch: a permutation of n samples that is computed and not stored.

A Feistel network permutes the numbers of 2 h bits, whatever its round function F is:

    (left, right) -> (right, left ^ F(right, key of the round))

since each round is invertible. 2 h is the smallest even number of bits that can hold n - 1. An
output of n or more is permuted again until it is below n ("cycle walking", Black and Rogaway 2002),
which gives a permutation of [0, n). This takes fewer than four passes on average. So the cost of a
sample does not depend on n, any rank can compute any part of the order, and the seed is the only
state. F is the finalizer of splitmix64; the shuffle is not cryptographic.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from ingot.core.errors import ConfigError

MAX_SAMPLES = 1 << 62
# Measured over 4,000 seeds and 2 to 17 samples (chi-squared): with 4 and with 6 rounds some
# positions are biased, with 8 none.
ROUNDS = 8

Indices = NDArray[np.int64]


class Permutation:
    """A permutation of [0, n), determined by `seed` and `epoch`.

    >>> Permutation(10, seed=0, epoch=0)(np.arange(10))
    array([7, 3, 2, 6, 4, 5, 1, 9, 8, 0])
    """

    def __init__(self, n: int, *, seed: int, epoch: int = 0) -> None:
        if not 0 < n <= MAX_SAMPLES:
            raise ConfigError(
                f"samples: must be from 1 to {MAX_SAMPLES:,}, got {n} samples",
                hint=f"give 1 to {MAX_SAMPLES:,}",
            )
        self.n = n
        # The halves have the same size: an odd number of bits is rounded up.
        self._half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
        self._mask = np.uint64((1 << int(self._half)) - 1)
        name = f"ingot order {seed} {epoch}".encode()
        digest = hashlib.blake2b(name, digest_size=8 * ROUNDS).digest()
        self._keys = np.frombuffer(digest, "<u8")

    def __call__(self, indices: Indices) -> Indices:
        """Permute indices, each in [0, n)."""
        permuted = self._permute_once(indices.astype(np.uint64))
        while (outside := permuted >= self.n).any():
            permuted[outside] = self._permute_once(permuted[outside])
        return permuted.astype(np.int64)

    def _permute_once(self, x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = x >> self._half, x & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & self._mask)
        return (left << self._half) | right


def shuffled_indices(start: int, stop: int, n: int, seed: int) -> Indices:
    """Return the samples at these positions of an endless order of epochs of n samples each.

    >>> shuffled_indices(0, 20, 10, seed=0)[::2]
    array([7, 2, 4, 1, 8, 5, 6, 0, 1, 3])
    """
    positions = np.arange(start, stop, dtype=np.int64)
    epochs, within = positions // n, positions % n
    samples = np.empty_like(positions)
    for epoch in np.unique(epochs):
        mask = epochs == epoch
        samples[mask] = Permutation(n, seed=seed, epoch=int(epoch))(within[mask])
    return samples


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
