"""How long a step of the engine takes, as the simulator computes it. A step of T tokens takes

    overhead_s
    + weight_bytes / bandwidth + T * flops_per_token / peak_flops   the matrices, read once a step
    + keys * kv_bytes_per_token / bandwidth                         KV-cache reads of attention
    + pairs * attention_flops / peak_flops                          its FLOPs during prefill
    + sequences * sequence_s + admitted * admission_s               work for each request

(A sum: measured steps are nearer to it than to the larger of memory and compute time.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ingot.core.errors import ConfigError
from ingot.serving.engine.scheduler import ScheduledSeq


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Cost of a step of a model on a machine. Default: SmolLM2-135M, bfloat16, two cores with AMX.

    >>> round(CostModel().step_seconds(1, 100, 0) * 1e3, 1)
    10.2
    """

    weight_bytes: float = 269e6
    """Bytes of weights that a step reads."""
    flops_per_token: float = 269e6
    """FLOPs of a token in the matrices: twice their elements."""
    kv_bytes_per_token: float = 23040.0
    """Bytes of keys and values of a token."""
    attention_flops: float = 69120.0
    """FLOPs of a pair of query and key: 4 * layers * heads * head_dim."""
    bandwidth: float = 30e9
    """Bytes per second."""
    peak_flops: float = 1.6e12
    """FLOPs per second."""
    overhead_s: float = 1e-3
    """Fixed seconds of a step: scheduling, sampling, sending."""
    sequence_s: float = 0.0
    """Seconds for each sequence of a step, for the same."""
    admission_s: float = 0.0
    """Seconds for each sequence that begins."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (math.isfinite(value) and value >= 0) or (name in _DIVISORS and not value):
                raise ConfigError(f"{name} is {value}", hint="give a positive number")

    def step_seconds(
        self, tokens: float, keys: float, pairs: float, sequences: float = 0, admitted: float = 0
    ) -> float:
        """Return the duration of a step that computes `tokens` and reads `keys`; `pairs` counts
        those of a query and a key in requests with several tokens."""
        matrices = (
            self.weight_bytes / self.bandwidth + tokens * self.flops_per_token / self.peak_flops
        )
        reading = keys * self.kv_bytes_per_token / self.bandwidth
        attention = pairs * self.attention_flops / self.peak_flops
        work = sequences * self.sequence_s + admitted * self.admission_s
        return self.overhead_s + matrices + reading + attention + work


_DIVISORS = ("bandwidth", "peak_flops")


def count_work(scheduled: Sequence[ScheduledSeq]) -> tuple[int, int, float]:
    """Return the number of tokens, keys and query-key pairs of a step.

    >>> decode = ScheduledSeq(1, 100, (5,), (), True)
    >>> count_work([decode, ScheduledSeq(2, 0, (5, 6, 7, 8), (), True)])
    (5, 105, 8.0)
    """
    counts = [len(seq.tokens) for seq in scheduled]
    starts = [seq.start for seq in scheduled]
    tokens, pairs = sum(counts), 0.0
    if tokens > len(counts):
        pairs = sum([n * (at + n / 2) for n, at in zip(counts, starts, strict=True) if n > 1])
    return tokens, tokens + sum(starts), pairs
