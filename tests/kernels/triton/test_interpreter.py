"""The numbers of every GPU kernel, in Triton's interpreter, against the float64 reference.

float32 and float16: the interpreter's bfloat16 is wrong, and needs a GPU to be right. All samples
of a record are slow; the fast ones are those in float16 without the large, and few of sampling.
"""

from __future__ import annotations

from typing import Any

import pytest

from ingot import ops
from ingot.kernels.triton.interpreter import Interpreter, samples, streaming
from ingot.kernels.triton.provider import triton_ops

CASES = samples()
SLOW_OPS = ("sampling_logprobs", "sample")  # they read their rows dozens of times
FAST = [
    (op, sample, dtype)
    for op, sample, dtype in CASES
    if dtype == "float16"
    and sample != "large"
    and (op not in SLOW_OPS or sample in ("typical", "ties"))
]
STREAMING = streaming()
BY_ROWS = [name for name, one in triton_ops().items() if one.op.row_args]


def check(interpreter: Interpreter, op: str, sample: str, dtype: str) -> None:
    errors = interpreter.call("errors", op=op, sample=sample, dtype=dtype)
    assert max(errors.values()) <= 1, errors


@pytest.mark.parametrize(("op", "sample", "dtype"), FAST)
def test_errors_are_within_bounds(
    interpreter: Interpreter, op: str, sample: str, dtype: str
) -> None:
    check(interpreter, op, sample, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("op", "sample", "dtype"), [case for case in CASES if case not in FAST])
def test_the_other_errors_are_within_bounds(
    interpreter: Interpreter, op: str, sample: str, dtype: str
) -> None:
    check(interpreter, op, sample, dtype)


def test_every_op_has_kernels() -> None:
    assert set(triton_ops()) == set(ops.registry())


@pytest.mark.parametrize("op", BY_ROWS)
def test_rows_do_not_depend_on_the_batch(interpreter: Interpreter, op: str) -> None:
    assert not interpreter.call("differing", op=op, sample="odd", dtype="float32")


@pytest.mark.slow
@pytest.mark.parametrize("sample", ["typical", "large"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("op", BY_ROWS)
def test_many_rows_do_not_depend_on_the_batch(
    interpreter: Interpreter, op: str, dtype: str, sample: str
) -> None:
    if sample in [s.name for s in _samples(op)]:
        assert not interpreter.call("differing", op=op, sample=sample, dtype=dtype)


def _samples(op: str) -> Any:
    import torch

    from ingot.ops.inputs import TensorMaker

    return ops.registry()[op].samples(TensorMaker(torch.float32))


@pytest.mark.parametrize(
    ("dtype", "window", "split"),
    [
        ("float32", None, 64),
        pytest.param("float16", None, 64, marks=pytest.mark.slow),
        pytest.param("float32", 40, 64, marks=pytest.mark.slow),
        pytest.param("float16", 40, 128, marks=pytest.mark.slow),
        pytest.param("float32", None, 1024, marks=pytest.mark.slow),
    ],
)
def test_attention_is_the_same_in_chunks_and_from_pages(
    dtype: str, window: int | None, split: int
) -> None:
    with Interpreter() as own:
        assert not own.call("attention_differs", dtype=dtype, window=window, split=split)


@pytest.mark.parametrize("op", STREAMING)
def test_no_byte_is_moved_twice(interpreter: Interpreter, op: str) -> None:
    """At most 1.05 times what the record's cost counts."""
    found = interpreter.call("traffic", op=op)
    assert found["moved"] <= 1.05 * found["counted"], found


def test_a_second_pass_is_noticed() -> None:
    with Interpreter() as own:
        own.call("plant", family="softmax", old="N > block_n", new="True", op="softmax")
        found = own.call("traffic", op="softmax")
    assert found["moved"] == pytest.approx(1.5 * found["counted"])


@pytest.mark.parametrize(
    ("family", "old", "new", "op", "sample"),
    [
        ("attention", "offs_kv <= position", "offs_kv < position", "attention", "typical"),
        ("norm", "tl.where(mask, x - mean[:, None], 0.0)", "x - mean[:, None]",
         "layer_norm", "odd"),
        ("linear", "offs_k < K - start_k", "offs_k <= K - start_k", "linear", "odd"),
        ("softmax", "tl.where(visible, values, float", "tl.where(in_bounds, values, float",
         "softmax", "masked"),
        ("quantized", "offs_k < K - start_k", "offs_k <= K - start_k", "linear_int8", "odd"),
        ("quantized", "packed >> 4", "packed >> 5", "linear_int4", "typical"),
        ("adamw", "offs < vector_end", "offs <= vector_end", "adamw", "odd"),
    ],
)  # fmt: skip
def test_a_wrong_mask_is_noticed(family: str, old: str, new: str, op: str, sample: str) -> None:
    with Interpreter() as own:
        own.call("plant", family=family, old=old, new=new, op=op)
        errors = own.call("errors", op=op, sample=sample, dtype="float32")
    assert max(errors.values()) > 1


def test_nothing_planted_is_nothing_noticed() -> None:
    with Interpreter() as own:
        own.call("plant", family="softmax", old="LOG", new="LOG", op="softmax")
        check(own, "softmax", "masked", "float32")
