"""Synthetic workloads: requests generated from a seed.

Arrivals are Poisson or bursts; lengths are lognormal, as they are in production traces; some
prompts start with one of a few shared prefixes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from ingot.core.config import check_bounds
from ingot.core.errors import ConfigError
from ingot.serving.engine.request import Request

_UNIQUE_TOKEN = 2**31  # token ids from here on are not part of a shared prefix


@dataclass(frozen=True, kw_only=True)
class RequestWorkload:
    """Synthetic requests: how many, how often, how long.

    >>> workload = RequestWorkload(num_requests=1000, request_rate=10.0)
    >>> arrivals = [arrival for arrival, _, _ in workload.generate()]
    >>> len(arrivals), round(arrivals[-1])
    (1000, 103)
    """

    num_requests: int = 10_000
    request_rate: float = 8.0
    """Mean requests per second."""
    burst_size: int = 1
    """Requests that arrive together; 1 is a Poisson process."""
    input_len: int = 128
    """Mean prompt length in tokens, without the shared prefix."""
    output_len: int = 64
    """Mean output length in tokens."""
    length_sigma: float = 0.8
    """Sigma of both lognormal lengths; 0 for constant lengths."""
    max_len: int = 4096
    """Maximum prompt length, and maximum output length."""
    shared_prefix_ratio: float = 0.5
    """Fraction of prompts that start with a shared prefix."""
    prefix_len: int = 256
    """Tokens of a shared prefix."""
    num_prefixes: int = 20
    """Number of distinct shared prefixes."""
    cancel_ratio: float = 0.0
    """Fraction of requests whose client disconnects, after 2 seconds on average."""
    deadline: float | None = None
    """Seconds after which a request is dropped."""
    seed: int = 0

    def __post_init__(self) -> None:
        count = (1, 10**7)
        check_bounds(
            self,
            num_requests=count,
            burst_size=count,
            input_len=count,
            output_len=count,
            max_len=count,
            prefix_len=count,
            num_prefixes=count,
            request_rate=(1e-6, 1e9),
            length_sigma=(0, 4),
            shared_prefix_ratio=(0, 1),
            cancel_ratio=(0, 1),
        )
        if self.deadline is not None:
            check_bounds(self, deadline=(0, 1e9))
        if self.prefix_len * self.num_prefixes > 10**7:
            raise ConfigError(
                "prefix_len * num_prefixes: expected at most 10,000,000, got "
                f"{self.prefix_len * self.num_prefixes:,}",
                hint="lower one of them",
            )

    def generate(self) -> Iterator[tuple[float, Request, float | None]]:
        """Yield arrival time, request, and the time at which its client disconnects, if any."""
        numbers, now = random.Random(self.seed), 0.0
        size = self.prefix_len
        prefixes = [tuple(range(p * size, (p + 1) * size)) for p in range(self.num_prefixes)]
        for id in range(self.num_requests):
            if id % self.burst_size == 0:
                now += numbers.expovariate(self.request_rate / self.burst_size)
            length = self._length(numbers, self.input_len)
            shared = numbers.random() < self.shared_prefix_ratio
            prefix = numbers.choice(prefixes) if shared else ()
            # Unique because of its first token: block keys cover all tokens before.
            tail = (_UNIQUE_TOKEN + id, *range(1, length))
            cancels = numbers.random() < self.cancel_ratio
            yield (
                now,
                Request(
                    id=id,
                    prompt=prefix + tail,
                    max_tokens=self._length(numbers, self.output_len),
                    deadline=None if self.deadline is None else now + self.deadline,
                ),
                now + numbers.expovariate(0.5) if cancels else None,
            )

    def _length(self, numbers: random.Random, mean: int) -> int:
        sigma = self.length_sigma
        length = numbers.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)
        return max(1, min(self.max_len, round(length)))
