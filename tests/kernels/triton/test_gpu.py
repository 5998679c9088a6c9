"""Tests that need a GPU: every op record in every dtype, with the compiled kernels.

Run them with `pytest -m gpu`. They have not been run yet, for lack of a GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ingot import ops
from ingot.bench import gpu_peaks
from ingot.bench.ops import OpBench
from ingot.bench.workloads import WORKLOADS
from ingot.kernels.triton.autotune import time_on_gpu, tune, tuning_tasks
from ingot.kernels.triton.interpreter import all_samples
from ingot.nn import Decoder, preset
from ingot.ops.accuracy import backward_errors, forward_errors
from ingot.ops.arguments import as_tuple, map_tensors
from ingot.ops.inputs import TensorMaker
from ingot.ops.record import Op
from ingot.serving.verify import verify

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SUPPORTED = {(op, sample) for op, sample, _ in all_samples()}
CASES = [
    pytest.param(op, dtype, sample.name, id=f"{op.name}-{sample.name}-{dtype}")
    for op in ops.registry().values()
    for dtype in DTYPES
    for sample in op.samples(TensorMaker(DTYPES[dtype]))
    if (op.name, sample.name) in SUPPORTED
]
each_case = pytest.mark.parametrize(("op", "dtype", "sample"), CASES)


def arguments(op: Op[..., Any], dtype: str, sample: str) -> tuple[Any, ...]:
    found = op.samples(TensorMaker(DTYPES[dtype], device="cuda"))
    args = next(op.with_defaults(s.args) for s in found if s.name == sample)
    with ops.prefer("triton"):
        assert op.select(*args).name == "triton"
    return args


def cloned(arg: Any) -> Any:
    return arg.clone() if isinstance(arg, Tensor) else arg


@each_case
def test_forward(op: Op[..., Any], dtype: str, sample: str) -> None:
    assert max(forward_errors(op, "triton", arguments(op, dtype, sample))) <= 1


@each_case
def test_backward(op: Op[..., Any], dtype: str, sample: str) -> None:
    if op.gradient:
        errors = backward_errors(op, "triton", arguments(op, dtype, sample))
        assert max(errors.values()) <= 1, errors


@each_case
def test_rows_are_batch_invariant(op: Op[..., Any], dtype: str, sample: str) -> None:
    if not op.row_args:
        return
    args, names = arguments(op, dtype, sample), list(op.signature.parameters)
    rows = len(args[names.index(op.row_args[0])])
    with ops.prefer("triton"):
        whole = as_tuple(op(*args))
        for row in range(rows):
            part = slice(row, row + 1)
            taken = [
                arg[part] if name in op.row_args and arg is not None else arg
                for name, arg in zip(names, args, strict=True)
            ]
            for one, other in zip(as_tuple(op(*taken)), whole, strict=True):
                torch.testing.assert_close(one, other[part], rtol=0, atol=0, equal_nan=True)


@each_case
def test_repeated_calls_are_bitwise_equal(op: Op[..., Any], dtype: str, sample: str) -> None:
    """A race, which the interpreter cannot show, would show here."""
    args = arguments(op, dtype, sample)

    def run() -> tuple[Tensor, ...]:
        fresh = tuple(map_tensors(cloned, arg) for arg in args)
        return as_tuple(op(*fresh)) + op.mutated_tensors(fresh)

    with ops.prefer("triton"):
        first = run()
        for _ in range(5):
            for one, other in zip(run(), first, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_tuning_finds_accurate_configurations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for task in tuning_tasks(("rms_norm", "linear", "attention")):
        result = tune(task, time_on_gpu, "cuda")
        assert result.config is not None, result
        assert result.seconds <= result.previous_seconds


def test_serving_is_bitwise_equal_for_all_schedules() -> None:
    decoder = Decoder.from_config(preset("tiny"), seed=0).to("cuda", torch.bfloat16)
    certificate = verify(decoder, schedules=50)
    assert certificate.bitwise_equal, certificate.difference


def test_benchmark_reports_the_roofline_fraction() -> None:
    bench = OpBench(gpu_peaks.measure("cuda"), device="cuda")
    rows = bench.rows(next(w for w in WORKLOADS if w.op == "linear"))
    assert rows[0].provider == "triton"
    assert 0 < rows[0].roofline_fraction < 2
