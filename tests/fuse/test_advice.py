"""Advice names the cause, faults first."""

from __future__ import annotations

from ingot.fuse.advice import advise
from ingot.fuse.profile import CallProfile


def call(name: str, seconds: float, dtype: str = "bfloat16", *notes: str) -> CallProfile:
    return CallProfile(
        node=name,
        name=name,
        seconds=seconds,
        bytes=1,
        flops=1,
        dtype=dtype,
        source="model.py:7",
        notes=frozenset(notes),
    )


def test_faults_come_before_other_forms() -> None:
    calls = [call("linear", 8.0, "float32"), call("mul", 1.0, "float64"), call("exp", 1.0)]
    first, second, *_ = [advice.text for advice in advise(calls)]
    assert first == (
        "10% of the time is arithmetic in float64; it begins at `mul` (model.py:7): "
        "convert to float32"
    )
    assert "80% of the time is matmuls in float32" in second


def test_the_larger_fault_comes_first() -> None:
    calls = [
        call("linear", 8.0, "bfloat16", "strided_weight"),
        call("sdpa", 2.0, "bfloat16", "dense_mask", "causal_mask"),
        call("sdpa", 2.0, "bfloat16", "dense_mask", "empty_mask"),
    ]
    first, second, *_ = [advice.text for advice in advise(calls)]
    assert "33% of the time is attention with a dense mask" in second
    assert "pass `is_causal=True`" in second
    assert "67% of the time is linear layers whose weight is not contiguous" in first


def test_an_empty_mask_is_left_out() -> None:
    (advice, *_) = advise([call("sdpa", 1.0, "bfloat16", "dense_mask", "empty_mask")])
    assert "it masks nothing: pass none instead" in advice.text


def test_small_savings_and_an_empty_profile_give_none() -> None:
    assert advise([]) == []
    assert advise([call("linear", 1.0), call("mul", 0.01, "float64")]) == []
