"""What a GPU can do at most: bytes read per second, and matmul FLOPs per second.

    peaks(place=...).matmul["bf16"]      # as those of the CPU, see `ingot.bench.peaks`

Probes take turns, as on the CPU; the peak is the best turn, as a GPU is one. Reading is `torch.mv`
over 1 GiB of float32, beyond every cache. Operands of a matmul are as large as in large models;
float32 is multiplied as such, not as TF32. No GPU was there to say how near these come to what its
maker promises.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

import torch

from ingot.bench.ops import turns
from ingot.bench.peaks import ROUNDS, Dtype, Peak, Peaks, Run
from ingot.bench.timing import Turn

_ROW = 16384
_SECONDS = 0.005  # of a turn
_READ = 2**30
_SIZES: dict[Dtype, int] = {"fp32": 4096, "bf16": 8192, "int8": 8192}


def measure(
    place: str,
    progress: Callable[[], object] = lambda: None,
    *,
    take: Turn | None = None,
    read: int = _READ,
    sizes: dict[Dtype, int] = _SIZES,
) -> Peaks:
    """Measure all peaks of the device; `progress` is called ROUNDS times meanwhile."""
    take = take or turns(place)
    runs: dict[str, tuple[Run, float]] = {"": (_reader(place, read), read)}
    missing: dict[Dtype, str] = {}
    for dtype, size in sizes.items():
        try:
            run = _matmul(dtype, size, place)
            run()
            runs[dtype] = run, 2 * size**3
        except RuntimeError as error:  # no kernel for it
            missing[dtype] = str(error).partition("\n")[0]
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, (run, work) in runs.items():
            times = take(run, _SECONDS)
            rates[name].append(work * len(times) / sum(times) / 1e9)
        progress()
    found = {name: Peak.of(max(turns), turns) for name, turns in rates.items()}
    return Peaks(
        method=1,
        measured=datetime.now(UTC),
        read_bandwidth=found[""],
        matmul={dtype: found.get(dtype) for dtype in sizes},
        missing=missing,
    )


def _reader(place: str, size: int) -> Run:
    rows = torch.ones(size // 4 // _ROW, _ROW, device=place)
    vector = torch.ones(_ROW, device=place)
    return lambda: torch.mv(rows, vector)


def _matmul(dtype: Dtype, size: int, place: str) -> Run:
    if dtype == "int8":
        shape, kind = (size, size), torch.int8
        a, b = (torch.randint(-128, 128, shape, dtype=kind, device=place) for _ in "ab")
        return lambda: torch._int_mm(a, b.t())  # pyright: ignore[reportPrivateImportUsage]
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    a, b = (torch.randn(size, size, device=place).to(kind) for _ in "ab")
    return lambda: torch.mm(a, b)
