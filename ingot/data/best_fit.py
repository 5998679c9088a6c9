"""Best-fit packing: sequences in samples of at most `capacity` tokens, none of them cut.

Best-fit decreasing: sequences from the longest to the shortest, each into the fullest sample in
which it fits. It needs at most about 11/9 of the smallest possible number of samples (Johnson
1973). Text for pretraining is cut instead (`ingot.data.pack`), since its documents are
longer than a sample and every token is trained.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return the indices of the sequences of each sample, in an order that depends on nothing else.

    >>> best_fit([5, 3, 4, 4], 8)
    [[0, 1], [2, 3]]
    """
    samples: list[list[int]] = []
    open_samples: dict[int, list[int]] = {}  # samples by the number of tokens that are free
    free: list[int] = []  # the keys of it, ascending
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        if not 0 < length <= capacity:
            raise ValueError(f"length must be from 1 to {capacity}, got {length}")
        at = bisect_left(free, length)
        if at == len(free):
            sample, rest = len(samples), capacity - length
            samples.append([])
        else:
            fit = open_samples[free[at]]
            sample, rest = fit.pop(), free[at] - length
            if not fit:
                del open_samples[free.pop(at)]
        samples[sample].append(index)
        if rest:
            if rest not in open_samples:
                insort(free, rest)
            open_samples.setdefault(rest, []).append(sample)
    return samples
