"""Real timings of tiny workloads: what holds for every number; and exact ones of given times."""

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
from ingot.bench.ops import Bench, Row, contenders, reader
from ingot.bench.peaks import Peak, Peaks
from ingot.bench.timing import Timing
from ingot.bench.workloads import Workload, copies, filled, floats
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
def bench() -> Bench:
    return Bench(PEAKS, seconds=0.002, size=SIZE)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Times by contender, in seconds, instead of measured ones; "" is the probe's."""
    times: dict[str, float] = {}

    def interleaved(runs: dict[str, Callable[[], object]], *_: Any, **__: Any) -> dict[str, Timing]:
        p50s = {name: times.get(name, 1.0) for name in runs}
        return {name: Timing(p50 / 2, p50, p50 * 2, 5) for name, p50 in p50s.items()}

    monkeypatch.setattr(module, "interleaved", interleaved)
    return times


def by_provider(rows: list[Row]) -> dict[str, Row]:
    return {row.provider: row for row in rows}


@pytest.mark.parametrize("workload", [SILU, LINEAR, ROPE, ATTENTION], ids=lambda w: w.op)
def test_rows_are_complete(bench: Bench, workload: Workload) -> None:
    rows = bench.rows(workload)
    op = registry()[workload.op]
    args = copies(workload, filled(SIZE))[0]
    assert rows[0].provider == op.select(*args).name
    assert {row.provider for row in rows} - {"compile", "sdpa"} == set(op.providers)
    for row in rows:
        assert (row.op, row.shape, row.dtype) == (workload.op, workload.shape, workload.dtype)
        assert 0 < row.p20_us <= row.p50_us <= row.p80_us
        assert row.gbs > 0
        assert row.gflops > 0
        assert row.read_gbs > 0
        assert row.share_of_limit > 0
        assert row.batch_invariant == (
            row.provider in op.providers and op.providers[row.provider].batch_invariant
        )


def test_a_row_has_what_the_documentation_promises() -> None:
    promised = (
        "op shape dtype provider p20_us p50_us p80_us gbs gflops limit share_of_limit "
        "vs_aten vs_compile batch_invariant"
    )
    assert set(promised.split()) <= {field.name for field in fields(Row)}


def test_a_share_is_the_limit_over_the_time(bench: Bench, given: dict[str, float]) -> None:
    _, probed = reader(torch.ones(SIZE // 2**16, 2**14), 1)
    given |= {"": probed / 1e9, "aten": 8e-6, "reference": 16e-6, "compile": 2e-6}  # at 1 GB/s
    rows = by_provider(bench.rows(SILU))
    aten = rows["aten"]  # 2 * 8 * 64 float32: 4096 bytes, 4.096 us
    assert (aten.p20_us, aten.p50_us, aten.p80_us) == (4.0, 8.0, 16.0)
    assert aten.read_gbs == pytest.approx(1.0, rel=1e-3)
    assert aten.gbs == pytest.approx(0.512, rel=1e-3)
    assert aten.gflops == pytest.approx(0.512, rel=1e-3)  # 8 FLOPs an element
    assert (aten.limit, aten.share_of_limit) == ("memory", pytest.approx(0.512, rel=1e-3))
    assert rows["reference"].share_of_limit == pytest.approx(0.256, rel=1e-3)


def test_ratios_say_how_many_times_faster(bench: Bench, given: dict[str, float]) -> None:
    given |= {"aten": 8e-6, "reference": 16e-6, "compile": 4e-6}
    rows = by_provider(bench.rows(SILU))
    assert (rows["reference"].vs_aten, rows["reference"].vs_compile) == (0.5, 0.25)
    assert (rows["compile"].vs_aten, rows["compile"].vs_compile) == (2.0, 1.0)


def test_what_does_not_exist_has_no_ratio(bench: Bench, given: dict[str, float]) -> None:
    row = bench.rows(ROPE)[0]
    if "aten" not in registry()["rope"].providers:
        assert row.vs_aten is None
    assert row.vs_compile is not None


def test_attention_is_compared_with_one_call_of_sdpa(bench: Bench, given: dict[str, float]) -> None:
    given |= {"sdpa": 2e-6, "aten": 8e-6}
    rows = by_provider(bench.rows(ATTENTION))
    assert rows["aten"].vs_aten == 0.25
    assert rows["aten"].vs_compile is None
    assert "compile" not in rows


def test_flops_limit_only_what_multiplies_matrices(bench: Bench, given: dict[str, float]) -> None:
    """The machine of this test computes next to nothing: 1e6 FLOPs a second."""
    given |= {"aten": 1.0}
    row = by_provider(bench.rows(LINEAR))["aten"]
    assert (row.limit, row.share_of_limit) == (
        "compute",
        pytest.approx(2 * 8 * 64 * 32 / 1e6, 1e-3),
    )
    assert by_provider(bench.rows(ATTENTION))["aten"].limit == "compute"
    assert by_provider(bench.rows(SILU))["aten"].limit == "memory"
    unknown = replace(LINEAR, dtype="bf16")  # without a peak there is no such limit
    assert by_provider(bench.rows(unknown))["aten"].limit == "memory"


def test_nobody_meets_what_another_has_just_read(monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[int] = []
    monkeypatch.setattr(torch, "compile", lambda *_, **__: lambda x: places.append(x.data_ptr()))
    arena = filled(SIZE)
    args = copies(SILU, arena)
    runs = dict(contenders(SILU, args, arena))
    places.clear()
    runs["reference"]()
    runs["compile"]()
    runs["aten"]()
    runs["compile"]()
    assert places == [args[1][0].data_ptr(), args[3][0].data_ptr()]


def test_a_compiler_that_fails_is_said_and_left_out(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
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
    [(1, 2**22), (2**22 + 1, 2**22 + 2**16), (2**30, 2**23)],  # 4 MiB, more, what there is
)
def test_the_probe_reads_what_the_op_moves(wanted: int, read: int) -> None:
    memory = torch.ones(2**9, 2**14)
    probe, size = reader(memory, wanted)
    assert size == read
    for _ in range(10):
        sums = probe()
        assert isinstance(sums, torch.Tensor)
        assert torch.equal(sums, torch.full((size // 2**16,), 2.0**14))


def test_the_global_random_state_is_left_alone(bench: Bench) -> None:
    before = torch.get_rng_state()
    bench.rows(SILU)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.slow
def test_the_reference_is_really_compiled(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert by_provider(bench.rows(SILU))["compile"].vs_compile == 1.0
