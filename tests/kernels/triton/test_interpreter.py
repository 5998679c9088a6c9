"""The accuracy of every GPU kernel in Triton's interpreter, against the float64 reference.

In float32 and float16, as the interpreter's bfloat16 is wrong. Running all samples is slow: the
fast tier runs those in float16 without large ones and long rows, three samples of the two sampling
ops, and one for each activation of the linear ops. Where four or more ops have a sample of the same
name, such as "strided", every third runs it.
"""

from __future__ import annotations

from collections import defaultdict

import pytest

from ingot import ops
from ingot.kernels.triton.interpreter import Interpreter, all_samples, bandwidth_bound_ops
from ingot.kernels.triton.provider import triton_ops
from ingot.ops.epilogue import ActivationFn

CASES = all_samples()
# They read each row dozens of times, in the same kernel.
SLOW_OPS = {"sample": ("typical", "ties"), "sampling_logprobs": ("ties",)}
ACTIVATIONS = tuple(f"_{activation.name.lower()}" for activation in ActivationFn)
EVERY_OP = ("typical", "odd")
IN_FLOAT16 = [
    (op, sample, dtype)
    for op, sample, dtype in CASES
    if dtype == "float16"
    and not sample.startswith(("large", "long"))
    and (op not in SLOW_OPS or sample in SLOW_OPS[op])
    and (sample.startswith("odd") or not sample.endswith(ACTIVATIONS))
]


def sampled(cases: list[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """Choose every third op with a sample that four or more have, beginning at another op each."""
    by_sample: dict[str, list[tuple[str, str, str]]] = defaultdict(list)
    for case in cases:
        by_sample[case[1]].append(case)
    chosen: set[tuple[str, str, str]] = set()
    for number, (sample, same) in enumerate(by_sample.items()):
        everywhere = sample in EVERY_OP or len(same) < 4
        chosen.update(same if everywhere else same[number % 3 :: 3])
    return [case for case in cases if case in chosen]


FAST = sampled(IN_FLOAT16)
BANDWIDTH_BOUND = bandwidth_bound_ops()
ROW_CASES = [case for case in CASES if triton_ops()[case[0]].op.row_args]


def check(interpreter: Interpreter, op: str, sample: str, dtype: str) -> None:
    errors = interpreter.call("errors", op=op, sample=sample, dtype=dtype)
    assert max(errors.values()) <= 1, errors


@pytest.mark.parametrize(("op", "sample", "dtype"), FAST)
def test_errors_are_within_the_tolerance(
    interpreter: Interpreter, op: str, sample: str, dtype: str
) -> None:
    check(interpreter, op, sample, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("op", "sample", "dtype"), [case for case in CASES if case not in FAST])
def test_errors_of_the_slow_samples_are_within_the_tolerance(
    interpreter: Interpreter, op: str, sample: str, dtype: str
) -> None:
    check(interpreter, op, sample, dtype)


def test_every_op_has_kernels() -> None:
    without = {"lora_shrink", "linear_int4_dynamic", "embedding_int4", "embedding_int8"}
    without.add("square_sum")  # GPUs use ATen's norm
    without.add("padded_attention")  # calls `attention` on packed tokens
    # Several ranks train on the CPU.
    without |= {"linear_preact_grad", "gated_linear_preact_grad", "gated_linear_input_grad"}
    assert set(triton_ops()) == set(ops.registry()) - without


@pytest.mark.parametrize(
    ("op", "sample"),
    [(op, name) for op, name, dtype in ROW_CASES if dtype == "float32" and name.startswith("odd")],
)
def test_rows_are_batch_invariant(interpreter: Interpreter, op: str, sample: str) -> None:
    assert not interpreter.call("batch_dependent_rows", op=op, sample=sample, dtype="float32")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "sample", "dtype"),
    [case for case in ROW_CASES if case[1].startswith(("typical", "large"))],
)
def test_many_rows_are_batch_invariant(
    interpreter: Interpreter, op: str, sample: str, dtype: str
) -> None:
    assert not interpreter.call("batch_dependent_rows", op=op, sample=sample, dtype=dtype)


@pytest.mark.parametrize(
    ("dtype", "window", "split_size", "length"),
    [
        ("float32", None, 32, 70),
        pytest.param("float32", None, 64, 150, marks=pytest.mark.slow),
        pytest.param("float16", None, 64, 150, marks=pytest.mark.slow),
        pytest.param("float32", 40, 64, 150, marks=pytest.mark.slow),
        pytest.param("float16", 40, 128, 150, marks=pytest.mark.slow),
        pytest.param("float32", None, 1024, 150, marks=pytest.mark.slow),
    ],
)
def test_attention_is_bitwise_equal_in_chunks_and_from_cache_blocks(
    interpreter: Interpreter, dtype: str, window: int | None, split_size: int, length: int
) -> None:
    """Three splits; tiles of 16 rows and keys in float32, so several in each split, and a tail."""
    arguments = {"dtype": dtype, "window": window, "split_size": split_size, "length": length}
    assert not interpreter.call("attention_mismatches", **arguments)


@pytest.mark.parametrize("op", BANDWIDTH_BOUND)
@pytest.mark.parametrize("size", [2**17, pytest.param(2**19, marks=pytest.mark.slow)])
def test_traffic_is_at_most_1_05_times_the_cost(
    interpreter: Interpreter, op: str, size: int
) -> None:
    traffic = interpreter.call("traffic", op=op, size=size)
    assert traffic["moved"] <= 1.05 * traffic["cost"], traffic


def test_injected_second_pass_shows_in_the_traffic(interpreter: Interpreter) -> None:
    fault = {"module": "softmax", "old": "block_n < N", "new": "True", "op": "softmax"}
    arguments = {"op": "softmax", "size": 2**17}
    traffic = interpreter.call("call_with_fault", **fault, query="traffic", arguments=arguments)
    assert traffic["moved"] == pytest.approx(1.5 * traffic["cost"])


FAULTS = [
    ("attention_tiles", "offs_kv <= position", "offs_kv < position", "attention", "typical"),
    ("norm", "tl.where(mask, x - mean[:, None], 0.0)", "x - mean[:, None]", "layer_norm", "odd"),
    ("linear", "offs_k < K - start_k", "offs_k <= K - start_k", "linear", "odd"),
    ("softmax", "tl.where(visible, values, float", "tl.where(in_bounds, values, float", "softmax",
     "masked"),
    ("quantized", "offs_k < K - start_k", "offs_k <= K - start_k", "linear_int8", "odd"),
    ("quantized", "packed >> 4", "packed >> 5", "linear_int4", "typical"),
    ("adamw", "offs < vector_end", "offs <= vector_end", "adamw", "odd"),
]  # fmt: skip


@pytest.mark.parametrize(("module", "old", "new", "op", "sample"), FAULTS)
def test_injected_fault_exceeds_the_tolerance(
    interpreter: Interpreter, module: str, old: str, new: str, op: str, sample: str
) -> None:
    arguments = {"op": op, "sample": sample, "dtype": "float32"}
    fault = {"module": module, "old": old, "new": new, "op": op}
    errors = interpreter.call("call_with_fault", **fault, query="errors", arguments=arguments)
    assert max(errors.values()) > 1
    # Without the change, or once the fault is removed, the same call is accurate.
    fault["new"] = old
    errors = interpreter.call("call_with_fault", **fault, query="errors", arguments=arguments)
    assert max(errors.values()) <= 1
    check(interpreter, op, sample, "float32")
