"""An example row and its run, for tests that process rows."""

from __future__ import annotations

from ingot.bench.ops import OpRow
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
