"""An endless loader whose whole state is one number and a seed.

The order of all samples of all epochs is a function of the seed (`ingot.data.permutation`), so
where a run is in its data is one number, that of the samples taken by all ranks together:

    rank r of w takes c batches that follow one another, beginning at  sample + r * c * batch_size,
    and then sample += w * c * batch_size

with c = `consecutive`. So w ranks together take the batches that one rank would take alone.

Nothing else decides the next batch: a loader with the same seed at the same sample returns the same
bits, whatever ranks, batch sizes and interruptions there were before.

A thread prefetches the next batches while the model computes. `wait_seconds` is the total time the
caller has waited for it: near 0, unless the disk is slower than the model.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

from torch.profiler import record_function

from ingot.core import spans
from ingot.core.errors import ConfigError
from ingot.data.permutation import shuffled_indices

PREFETCH = 2  # batches made before they are asked for
MAX_SAMPLE = 1 << 62
MAX_WORLD_SIZE = 1 << 20

B = TypeVar("B")
B_co = TypeVar("B_co", covariant=True)


class Dataset(Protocol[B_co]):
    """A dataset that `Loader` can read."""

    def __len__(self) -> int: ...

    def batch(self, indices: Sequence[int]) -> B_co:
        """Return the samples of these indices, in this order."""
        ...


class Loader(Generic[B]):
    """Batches of shuffled samples for one rank.

    >>> from ingot.data.array import xor
    >>> loader = Loader(xor(), batch_size=2, seed=1)
    >>> next(loader).sample_ids, next(loader).sample_ids, loader.state_dict()
    ([3, 0], [1, 2], {'sample': 4, 'seed': 1})
    >>> loader.seek(2)
    >>> next(loader).sample_ids
    [1, 2]
    """

    def __init__(
        self,
        samples: Dataset[B],
        *,
        batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        consecutive: int = 1,
    ) -> None:
        if not (len(samples) > 0 and 0 < batch_size <= MAX_SAMPLE and 0 <= seed < 1 << 64):
            raise ConfigError(
                "loader: needs samples, a batch_size above 0 and a seed from 0 to 2**64 - 1, got "
                f"{len(samples)} samples, batch_size {batch_size} and seed {seed}",
                hint="change the value that is out of range",
            )
        if not (0 <= rank < world_size <= MAX_WORLD_SIZE and consecutive > 0):
            raise ConfigError(
                f"rank: must be below world_size, which is at most {MAX_WORLD_SIZE:,}, and "
                f"consecutive above 0, got {rank}, {world_size} and {consecutive}",
                hint="give a rank from 0 to world_size - 1",
            )
        self._samples, self._batch_size, self._seed = samples, batch_size, seed
        self._rank, self._world_size, self._consecutive = rank, world_size, consecutive
        self._start, self._taken = 0, 0
        self._coming: deque[Future[B]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ingot-data")
        self.wait_seconds = 0.0
        """Total seconds spent waiting for batches."""

    def __iter__(self) -> Loader[B]:
        return self

    def __next__(self) -> B:
        while len(self._coming) <= PREFETCH:
            sample = self._position(self._taken + len(self._coming))
            self._coming.append(self._thread.submit(self.batch_at, sample))
        start = time.perf_counter()
        try:
            # It stays at the head while we wait: an interrupted wait loses no batch.
            with record_function(spans.DATA):
                found = self._coming[0].result()
        except Exception:
            self._forget()  # the next call tries again
            raise
        finally:
            self.wait_seconds += time.perf_counter() - start
        self._coming.popleft()
        self._taken += 1
        return found

    def batch_at(self, sample: int) -> B:
        """Return the batch that begins at this sample, without moving the loader."""
        stop = sample + self._batch_size
        _check(stop)
        indices = shuffled_indices(sample, stop, len(self._samples), self._seed)
        return self._samples.batch(indices.tolist())

    def _position(self, number: int) -> int:
        """Return the sample at which this rank's batch of this number begins."""
        group, within = divmod(number, self._consecutive)
        batches = (group * self._world_size + self._rank) * self._consecutive + within
        return self._start + batches * self._batch_size

    @property
    def _sample(self) -> int:
        return self._start + self._taken * self._batch_size * self._world_size

    def state_dict(self) -> dict[str, int]:
        """Return the position after the batches handed out; prefetched ones do not count.

        With several ranks, it is a position after as many batches of each.
        """
        return {"sample": self._sample, "seed": self._seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue at the position that `state_dict` returned, with the same seed."""
        if state["seed"] != self._seed:
            raise ConfigError(
                f"loader seed: must be that of the saved state, {state['seed']}, got {self._seed}",
                hint="create the loader with that seed",
            )
        self.seek(state["sample"])

    def seek(self, sample: int) -> None:
        """Continue at this sample of the order."""
        _check(sample)
        self._forget()
        self._start, self._taken = sample, 0

    def _forget(self) -> None:
        for future in self._coming:
            future.cancel()
        self._coming.clear()


def _check(sample: int) -> None:
    if not 0 <= sample <= MAX_SAMPLE:
        raise ConfigError(
            f"sample: must be from 0 to {MAX_SAMPLE:,}, got {sample}",
            hint="give a position in this range",
        )
