"""Measures the peaks of a GPU: bytes read per second and matmul FLOPs per second.

Probes are interleaved, as on the CPU (`ingot.bench.cpu_peaks`). The peak is the best time slice,
because a GPU works as a whole. Reading is `torch.mv` over 1 GiB of float32, larger than every
cache. Matmul operands are as large as in large models; float32 is multiplied as float32, not as
TF32. This has not run on a GPU yet, so how close it comes to a vendor's peak is unknown.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

import torch

from ingot.bench.bandwidth import allocate, make_reader
from ingot.bench.peaks import ROUNDS, Dtype, Peak, Peaks
from ingot.bench.timing import Run, SliceTimer, slice_timer

_SLICE_SECONDS = 0.005
_READ_BYTES = 2**30
_SIZES: dict[Dtype, int] = {"fp32": 4096, "bf16": 8192, "int8": 8192}


def measure(
    device: str,
    progress: Callable[[], object] = lambda: None,
    *,
    timer: SliceTimer | None = None,
    read_bytes: int = _READ_BYTES,
    sizes: dict[Dtype, int] = _SIZES,
) -> Peaks:
    """Measure all peaks of the device; `progress` is called ROUNDS times."""
    timer = timer or slice_timer(device)
    rows = allocate(read_bytes, device)
    runs: dict[str, tuple[Run, float]] = {"": (make_reader(rows, len(rows)), rows.nbytes)}
    missing: dict[Dtype, str] = {}
    for dtype, size in sizes.items():
        try:
            run = _matmul(dtype, size, device)
            run()
            runs[dtype] = run, 2 * size**3
        except RuntimeError as error:  # no kernel for it
            missing[dtype] = str(error).partition("\n")[0]
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, (run, work) in runs.items():
            times = timer(run, _SLICE_SECONDS)
            rates[name].append(work * len(times) / sum(times) / 1e9)
        progress()
    peaks = {name: Peak.from_slices(max(slices), slices) for name, slices in rates.items()}
    return Peaks(
        method=1,
        measured=datetime.now(UTC),
        read_bandwidth=peaks[""],
        matmul={dtype: peaks.get(dtype) for dtype in sizes},
        missing=missing,
    )


def _matmul(dtype: Dtype, size: int, device: str) -> Run:
    if dtype == "int8":
        shape, kind = (size, size), torch.int8
        a, b = (torch.randint(-128, 128, shape, dtype=kind, device=device) for _ in "ab")
        return lambda: torch._int_mm(a, b.t())  # pyright: ignore[reportPrivateImportUsage]
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    a, b = (torch.randn(size, size, device=device).to(kind) for _ in "ab")
    return lambda: torch.mm(a, b)
