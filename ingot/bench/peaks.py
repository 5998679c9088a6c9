"""The peaks of a machine: bytes read per second, and matmul FLOPs per second.

`ingot.bench.cpu_peaks` and `ingot.bench.gpu_peaks` measure them; `ingot.bench.machine` does so once
and caches the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Literal, TypeAlias, get_args

import msgspec
import numpy as np

Dtype: TypeAlias = Literal["fp32", "bf16", "int8"]
Rate: TypeAlias = Annotated[float, msgspec.Meta(gt=0)]

DTYPES: tuple[Dtype, ...] = get_args(Dtype)
ROUNDS = 280


@dataclass(frozen=True, kw_only=True)
class Peak:
    """A peak in GB/s or GFLOPS, and the rates seen while it was measured.

    `low`, `typical` and `high` are p20, p50 and p80 of the time slices. If they are far below
    `value`, the machine was doing other work.

    >>> Peak.from_slices(42.4, [30.0, 42.4, 41.0, 40.0, 38.0])
    Peak(value=42.4, low=36.4, typical=40.0, high=41.28)
    """

    value: Rate
    low: Rate
    typical: Rate
    high: Rate

    @classmethod
    def from_slices(cls, value: float, rates: Sequence[float]) -> Peak:
        """Combine the peak with the spread of the slices' rates."""
        low, typical, high = (float(q) for q in np.quantile(rates, (0.2, 0.5, 0.8)).round(3))
        return cls(value=round(value, 3), low=low, typical=typical, high=high)


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """All peaks of a machine; `missing` gives the reason why a matmul is None.

    >>> from datetime import UTC
    >>> read = Peak.from_slices(42.4, [38.0, 42.4])
    >>> none = {"fp32": None, "bf16": None, "int8": None}
    >>> machine = Peaks(method=1, measured=datetime.now(UTC), read_bandwidth=read, matmul=none)
    >>> Peaks.from_json(machine.to_json()) == machine
    True
    """

    method: Literal[1]
    """Version of the measuring method; a cached file of another version is ignored."""
    measured: datetime
    read_bandwidth: Peak
    matmul: dict[Dtype, Peak | None]
    missing: dict[Dtype, str] = field(default_factory=dict[Dtype, str])

    def __post_init__(self) -> None:
        if set(self.matmul) != set(DTYPES):
            raise ValueError(f"matmul: keys must be {', '.join(DTYPES)}, got {[*self.matmul]}")

    def to_json(self) -> bytes:
        """Return readable JSON."""
        return msgspec.json.format(msgspec.json.encode(self)) + b"\n"

    @classmethod
    def from_json(cls, text: bytes) -> Peaks:
        """Parse `to_json`'s output; raise `msgspec.DecodeError` for anything else."""
        return msgspec.json.decode(text, type=cls)
