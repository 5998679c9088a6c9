"""An example row, its run and the peaks of a machine, for tests."""

from __future__ import annotations

from datetime import UTC, datetime

from ingot.bench.ops import OpRow
from ingot.bench.peaks import Peak, Peaks
from ingot.bench.results import RunInfo

RUN = RunInfo(
    date="2026-11-15T12:00:00+00:00", cpu="Xeon, 2 cores", isa="amx", torch="2", ingot="0.1"
)
ROW = OpRow(
    op="silu",
    family="activation",
    shape="32x64",
    dtype="bf16",
    provider="cpu",
    p20_us=1.0,
    p50_us=2.0,
    p80_us=3.0,
    gbs=10.0,
    gflops=20.0,
    read_gbs=40.0,
    bound="memory",
    roofline_fraction=0.25,
    vs_eager=2.0,
    vs_compile=None,
    batch_invariant=True,
)
PEAK = Peak(value=4.0, low=1.0, typical=2.0, high=3.0)
PEAKS = Peaks(
    method=1,
    measured=datetime(2026, 11, 15, tzinfo=UTC),
    read_bandwidth=PEAK,
    matmul={"fp32": PEAK, "bf16": PEAK, "int8": None},
    missing={"int8": "no kernel"},
)
