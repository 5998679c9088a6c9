"""Invariants of real timings of tiny workloads, and rows computed from given times."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import fields, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pytest
import torch

from ingot.bench import ops as module
from ingot.bench.ops import OpBench, OpRow, implementations, make_probe
from ingot.bench.peaks import Peak, Peaks
from ingot.bench.timing import Timing
from ingot.bench.workloads import Workload, argument_sets, floats, new_arena
from ingot.ops import registry

SIZE = 2**22
PEAKS = Peaks(
    method=1,
    measured=datetime(2026, 11, 15, tzinfo=UTC),
    read_bandwidth=Peak(value=4.0, low=1.0, typical=2.0, high=3.0),
    matmul={
        "fp32": Peak(value=1e-3, low=1e-3, typical=1e-3, high=1e-3),
        "bf16": None,
        "int8": None,
    },
)
SILU = Workload("silu", "8x64", "fp32", floats((8, 64)))
LINEAR = Workload("linear", "8x64x32", "fp32", floats((8, 64), (32, 64)))
ROPE = Workload("rope", "4x2x8", "fp32", lambda new: (new(4, 2, 8), torch.arange(4), torch.ones(4)))
ATTENTION = Workload(
    "attention",
    "prefill 8",
    "fp32",
    lambda new: (new(8, 4, 16), new(8, 2, 16), new(8, 2, 16), torch.tensor([0, 8])),
    floats((1, 4, 8, 16), (1, 2, 8, 16), (1, 2, 8, 16)),
)


@pytest.fixture(autouse=True)
def quick_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))


@pytest.fixture
def bench() -> OpBench:
    return OpBench(PEAKS, seconds=0.002, size=SIZE)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Times by implementation, in seconds, instead of measured ones; "" is the probe."""
    times: dict[str, float] = {}

    def time_interleaved(
        runs: dict[str, Callable[[], object]], *_: Any, **__: Any
    ) -> dict[str, Timing]:
        p50s = {name: times.get(name, 1.0) for name in runs}
        return {name: Timing(p50 / 2, p50, p50 * 2, 5) for name, p50 in p50s.items()}

    monkeypatch.setattr(module, "time_interleaved", time_interleaved)
    return times


def by_provider(rows: list[OpRow]) -> dict[str, OpRow]:
    return {row.provider: row for row in rows}


@pytest.mark.parametrize("workload", [SILU, LINEAR, ROPE, ATTENTION], ids=lambda w: w.op)
def test_rows_are_complete(bench: OpBench, workload: Workload) -> None:
    rows = bench.rows(workload)
    op = registry()[workload.op]
    args = argument_sets(workload, new_arena(SIZE))[0]
    assert rows[0].provider == op.select(*args).name
    timed = {rows[0].provider} if workload.sdpa else set(op.providers)
    assert {row.provider for row in rows} - {"compile", "sdpa"} == timed
    for row in rows:
        assert (row.op, row.shape, row.dtype) == (workload.op, workload.shape, workload.dtype)
        assert 0 < row.p20_us <= row.p50_us <= row.p80_us
        assert row.gbs > 0
        assert row.gflops > 0
        assert row.read_gbs > 0
        assert row.roofline_fraction > 0
        assert row.batch_invariant == (
            row.provider in op.providers and op.providers[row.provider].batch_invariant
        )


def test_row_has_the_documented_columns() -> None:
    documented = (
        "op shape dtype provider p20_us p50_us p80_us gbs gflops bound roofline_fraction "
        "vs_eager vs_compile batch_invariant"
    )
    assert set(documented.split()) <= {field.name for field in fields(OpRow)}


def test_roofline_fraction_is_the_minimum_time_over_p50(
    bench: OpBench, given: dict[str, float]
) -> None:
    _, probed = make_probe(torch.ones(SIZE // 2**16, 2**14), 1)
    given |= {"": probed / 1e9, "aten": 8e-6, "reference": 16e-6, "compile": 2e-6}  # at 1 GB/s
    rows = by_provider(bench.rows(SILU))
    aten = rows["aten"]  # 2 * 8 * 64 float32: 4096 bytes, 4.096 us
    assert (aten.p20_us, aten.p50_us, aten.p80_us) == (4.0, 8.0, 16.0)
    assert aten.read_gbs == pytest.approx(1.0, rel=1e-3)
    assert aten.gbs == pytest.approx(0.512, rel=1e-3)
    assert aten.gflops == pytest.approx(0.512, rel=1e-3)  # 8 FLOPs an element
    assert (aten.bound, aten.roofline_fraction) == ("memory", pytest.approx(0.512, rel=1e-3))
    assert rows["reference"].roofline_fraction == pytest.approx(0.256, rel=1e-3)


def test_speedups_are_relative_to_eager_and_compile(
    bench: OpBench, given: dict[str, float]
) -> None:
    given |= {"aten": 8e-6, "reference": 16e-6, "compile": 4e-6}
    rows = by_provider(bench.rows(SILU))
    assert (rows["reference"].vs_eager, rows["reference"].vs_compile) == (0.5, 0.25)
    assert (rows["compile"].vs_eager, rows["compile"].vs_compile) == (2.0, 1.0)


def test_missing_baseline_has_no_speedup(bench: OpBench, given: dict[str, float]) -> None:
    row = bench.rows(ROPE)[0]
    if "aten" not in registry()["rope"].providers:
        assert row.vs_eager is None
    assert row.vs_compile is not None


def test_attention_is_compared_with_one_call_of_sdpa(
    bench: OpBench, given: dict[str, float]
) -> None:
    ours, sdpa = bench.rows(ATTENTION)
    assert sdpa.provider == "sdpa"
    given |= {"sdpa": 2e-6, ours.provider: 8e-6}
    ours, _ = bench.rows(ATTENTION)
    assert ours.vs_eager == 0.25
    assert ours.vs_compile is None


def test_only_matmuls_are_compute_bound(bench: OpBench, given: dict[str, float]) -> None:
    """The machine of this test computes only 1e6 FLOPs per second."""
    given |= {"aten": 1.0}
    row = by_provider(bench.rows(LINEAR))["aten"]
    assert (row.bound, row.roofline_fraction) == (
        "compute",
        pytest.approx(2 * 8 * 64 * 32 / 1e6, 1e-3),
    )
    assert bench.rows(ATTENTION)[0].bound == "compute"
    assert by_provider(bench.rows(SILU))["aten"].bound == "memory"
    unknown = replace(LINEAR, dtype="bf16")  # without a peak, compute is not a bound
    assert by_provider(bench.rows(unknown))["aten"].bound == "memory"


def test_implementations_do_not_share_cached_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[int] = []
    monkeypatch.setattr(torch, "compile", lambda *_, **__: lambda x: places.append(x.data_ptr()))
    arena = new_arena(SIZE)
    args = argument_sets(SILU, arena)
    runs = dict(implementations(SILU, args, arena))
    places.clear()
    runs["reference"]()
    runs["compile"]()
    runs["aten"]()
    runs["compile"]()
    assert places == [args[1][0].data_ptr(), args[3][0].data_ptr()]


def test_failed_compilation_is_logged_and_left_out(
    bench: OpBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no compiler\nat line 7")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: fail)
    monkeypatch.setattr(logging.getLogger("ingot"), "propagate", True)
    rows = bench.rows(SILU)
    assert "torch.compile fails for 'silu': no compiler" in caplog.text
    assert {row.vs_compile for row in rows} == {None}


@pytest.mark.parametrize(
    ("wanted", "read"),
    [
        (1, 2**22),
        (2**22 + 1, 2**22 + 2**16),
        (2**30, 2**23),
    ],  # at least 4 MiB; more; at most a quarter
)
def test_probe_reads_as_many_bytes_as_the_op(wanted: int, read: int) -> None:
    memory = torch.ones(2**9, 2**14)
    probe, size = make_probe(memory, wanted)
    assert size == read
    for _ in range(10):
        sums = probe()
        assert isinstance(sums, torch.Tensor)
        assert torch.equal(sums, torch.full((size // 2**16,), 2.0**14))


def test_global_random_state_is_unchanged(bench: OpBench) -> None:
    before = torch.get_rng_state()
    bench.rows(SILU)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.slow
def test_reference_is_really_compiled(bench: OpBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert by_provider(bench.rows(SILU))["compile"].vs_compile == 1.0
