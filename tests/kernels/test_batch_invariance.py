"""Batch invariance: the bits of a row do not depend on the rest of the batch.

A schedule is a batch and a second way to compute it: in a different order, in several batches, on a
different number of threads, from memory with a different layout. Under every schedule, each row is
bitwise equal to the row of the whole batch. `-0.0` and `0.0` are different bits.

Schedules are generated for every op that has a `cpu` provider and rows. An op of a known family
needs no code here unless it has a parameter with a new name: `ARGUMENTS` creates each of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from ingot import ops
from ingot.core.device import detect
from ingot.ops.arguments import as_tuple
from ingot.ops.codec import to_panels
from ingot.ops.inputs import TensorMaker
from ingot.ops.record import Op

KIND = "schedules"
OPS = [op for op in ops.registry().values() if op.row_args and "cpu" in op.providers]
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MAX_PRODUCTS = 1 << 24  # of a matmul, so that a schedule takes milliseconds

pytestmark = pytest.mark.skipif(detect().compiler is None, reason="no C++ compiler")


@dataclass(frozen=True)
class Layout:
    """How tensors lie in memory: the same values at other strides and offsets."""

    columns_apart: int
    rows_padded_by: int
    offset: int

    def of(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dim() == 0:
            return x
        *others, last = x.shape
        space = torch.empty(self.offset + x.numel(), dtype=x.dtype)[self.offset :].view(x.shape)
        if len(others) and (self.columns_apart > 1 or self.rows_padded_by):
            wide = last * self.columns_apart + self.rows_padded_by
            space = torch.empty(*others, wide, dtype=x.dtype)[..., :: self.columns_apart][
                ..., :last
            ]
        return space.copy_(x)


@dataclass(frozen=True)
class Run:
    """How a call is made."""

    threads: int
    layout: Layout


@dataclass(frozen=True)
class Schedule:
    """Sizes and numbers of a batch, and two ways to compute it."""

    dtype: torch.dtype
    seed: int
    rows: int
    middle: int | None
    """Size of a dimension between rows and channels, where the op allows one."""
    width: int
    out: int
    option: int
    """Selects the variant of arguments that are not sizes."""
    shuffled: bool
    share: float
    """Fraction of the batch that is computed again."""
    cuts: tuple[float, ...]
    whole: Run
    split: Run

    @property
    def row_shape(self) -> tuple[int, ...]:
        return (self.rows,) if self.middle is None else (self.rows, self.middle)

    def parts(self) -> list[Tensor | slice]:
        """Return the rows of each smaller batch: slices, or indices if they are shuffled."""
        count = max(1, round(self.rows * self.share))
        ends = sorted({round(cut * count) for cut in self.cuts} | {0, count})
        slices = [slice(a, b) for a, b in pairwise(ends)]
        random = torch.Generator().manual_seed(self.seed)
        order = torch.randperm(self.rows, generator=random)
        return [order[part] for part in slices] if self.shuffled else [*slices]


def sizes(*near: int, most: int) -> st.SearchStrategy[int]:
    """Return sizes that are mostly small, and often one off the size of a vector or tile."""
    close = [size + by for size in near for by in (-1, 0, 1) if 0 < size + by <= most]
    return st.one_of(st.integers(1, 20), st.sampled_from(close), st.integers(1, most))


runs = st.builds(
    Run,
    threads=st.integers(1, 2),
    layout=st.builds(
        Layout,
        columns_apart=st.sampled_from([1, 1, 1, 2, 3]),
        rows_padded_by=st.sampled_from([0, 0, 1, 5, 16]),
        offset=st.sampled_from([0, 0, 1, 3]),
    ),
)
schedules = st.builds(
    Schedule,
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**32 - 1),
    rows=sizes(16, 32, 64, 256, 512, 530, most=700),
    middle=st.sampled_from([None, None, None, 1, 3]),
    width=sizes(16, 32, 64, 128, 256, 512, 1024, most=1100),
    out=sizes(16, 32, 48, 64, 128, 256, most=300),
    option=st.integers(0, 11),
    shuffled=st.booleans(),
    share=st.sampled_from([1.0, 1.0, 0.5, 0.1]),
    cuts=st.lists(st.floats(0, 1), max_size=6).map(tuple),
    whole=runs,
    split=runs,
)


class Inputs(TensorMaker):
    """Makes what a schedule asks for, from its seed."""

    def __init__(self, op: Op[..., Any], schedule: Schedule) -> None:
        super().__init__(schedule.dtype, seed=schedule.seed)
        self.schedule, self.op = schedule, op.name
        self.adapters, self.rank = 1 + schedule.seed % 4, 1 + schedule.width % 37
        self.rows, self.width = schedule.rows, schedule.width
        self.is_quantized = "_int" in op.name
        self.gated = op.family == "quantized" and schedule.option % 4 == 3
        self.lora_parts = 2 if op.name == "gated_linear" or self.gated else 1
        self.group = (32, 64, 128)[schedule.option % 3]
        self.has_groups = "int4" in op.name or schedule.seed % 2 == 0
        if self.is_quantized and self.has_groups:
            self.width = self.group * (1 + schedule.width % 8)
        self.out = max(1, min(schedule.out, MAX_PRODUCTS // (schedule.rows * schedule.width)))
        self.has_panels = self.is_quantized and schedule.seed % 4 != 0 and self.width % 8 == 0
        if self.has_panels:
            self.out = (self.out + 15) // 16 * 16

    def values(self, *shape: int, low: int = -12, high: int = 8) -> Tensor:
        """Wide magnitudes, with zeros of either sign among them."""
        x = self.spread(*shape, low=low, high=high)
        return x.where(self.ints(50, *shape) > 0, torch.zeros_like(x).copysign(x))

    def weight(self) -> Tensor:
        return self.values(self.out, self.width, low=-8, high=0)

    def by_row(self, *values: float) -> Tensor:
        """Another value for each row."""
        return self.floats(values)[self.ints(len(values), self.rows)]

    def one_of(self, *values: Any) -> Any:
        value = values[self.schedule.option % len(values)]
        return value() if callable(value) else value


def _rows(i: Inputs) -> Tensor:
    return i.values(*i.schedule.row_shape, i.width)


def _matrix(i: Inputs) -> Tensor:
    return i.values(i.rows, i.width, low=-8, high=3)


def _output_rows(i: Inputs) -> Tensor:
    return i.values(*i.schedule.row_shape, i.out)


def _residual(i: Inputs) -> Tensor | None:
    return _output_rows(i) if i.schedule.option % 3 else None


def _index(i: Inputs) -> Tensor | None:
    shape = i.schedule.row_shape
    some = i.ints(i.adapters + 1, *shape, dtype=torch.int32) - 1
    return i.one_of(some, some, None)


def _lora_h(i: Inputs) -> Tensor | None:
    return _with_lora(i, lambda: _rank_rows(i))


def _rank_rows(i: Inputs) -> Tensor:
    return i.values(*i.schedule.row_shape, i.lora_parts * i.rank, low=-8, high=3).float()


def _lora_b(i: Inputs) -> Tensor | None:
    return _with_lora(i, lambda: i.values(i.adapters, i.rank, i.out, low=-8, high=0))


def _stacked_lora_b(i: Inputs) -> Tensor | None:
    shape = i.adapters, i.rank, i.lora_parts * i.out
    return _with_lora(i, lambda: i.values(*shape, low=-8, high=0))


def _quantized_weight(i: Inputs) -> Tensor:
    if not i.is_quantized:
        return i.weight()
    rows = i.lora_parts * i.out
    if "int4" in i.op:
        weight = i.ints(256, rows, i.width // 2, dtype=torch.uint8)
    else:
        weight = (i.ints(256, rows, i.width) - 128).to(torch.int8)
    return to_panels(weight) if i.has_panels else weight


def _group_values(i: Inputs) -> Tensor:
    rows = i.lora_parts * i.out
    if not i.has_groups:
        return i.values(rows, low=-9, high=0).float()
    values = i.values(i.width // i.group, rows, low=-9, high=0)
    values = values.to((torch.float16, torch.bfloat16, torch.float32)[i.schedule.option % 3]).T
    return to_panels(values) if i.has_panels and i.schedule.seed % 3 else values


def _with_lora(i: Inputs, make: Callable[[], Tensor | None]) -> Tensor | None:
    return make() if i.schedule.option % 2 else None


def _mask(i: Inputs) -> Tensor | None:
    shape = i.schedule.row_shape
    return i.one_of(
        None,
        lambda: i.bools(*shape, i.width),
        lambda: i.bools(i.width),
        lambda: i.bools(*shape, 1),
        lambda: i.bools(*(1 for _ in shape), i.width),
    )


def _heads(i: Inputs) -> Tensor:
    return i.values(i.rows, i.schedule.middle or 2, 8 + i.width % 130)


def _frequencies(i: Inputs) -> Tensor:
    pairs = (8 + i.width % 130) // 2
    return ops.rope_frequencies(2 * i.one_of(pairs, pairs // 2))[0]


def _categories(i: Inputs) -> Tensor:
    return i.values(i.rows, 1 + i.out % 5, i.width, low=-8, high=3)


ARGUMENTS: dict[str, dict[str, Callable[[Inputs], Any]]] = {
    "activation": {"x": _rows, "gate": _rows, "up": _rows},
    "norm": {
        "x": _rows,
        "residual": _rows,
        "weight": lambda i: i.values(i.width),
        "bias": lambda i: i.one_of(None, lambda: i.values(i.width)),
        "eps": lambda i: i.one_of(1e-6, 1e-5, 1e-3),
    },
    "softmax": {"x": _rows, "scale": lambda i: i.one_of(1.0, 0.125, 2.0), "mask": _mask},
    "linear": {
        "x": _rows,
        "weight": Inputs.weight,
        "gate_weight": Inputs.weight,
        "up_weight": Inputs.weight,
        "bias": lambda i: i.one_of(None, lambda: i.values(i.out)),
        "activation": lambda i: i.schedule.option % len(ops.ActivationFn),
        "residual": _residual,
        "grad": _output_rows,
        "gate_grad": _output_rows,
        "up_grad": _output_rows,
        "lora_h": _lora_h,
        "lora_b": _lora_b,
        "gate_lora_b": _lora_b,
        "up_lora_b": _lora_b,
        "lora_index": lambda i: _with_lora(i, lambda: _index(i)),
    },
    "lora": {
        "x": _rows,
        "a": lambda i: i.values(i.adapters, i.rank, i.width, low=-8, high=0),
        "scale": lambda i: i.floats([0.5, 2.0, 1.3, 32.0][: i.adapters]),
        "index": _index,
    },
    "quantized": {
        "x": _rows,
        "weight": _quantized_weight,
        "scale": _group_values,
        "zero_point": lambda i: i.one_of(None, None, lambda: _group_values(i)),
        "minimum": lambda i: i.one_of(lambda: _group_values(i), None, None),
        "bias": lambda i: i.one_of(None, lambda: i.values(i.out), None, None),
        "activation": lambda i: i.schedule.option % len(ops.ActivationFn),
        "residual": _residual,
        "x_group": lambda i: 0 if i.has_groups else i.one_of(0, 32, 64, 128),
        "gated": lambda i: i.gated,
        "lora_h": _lora_h,
        "lora_b": _stacked_lora_b,
        "lora_index": lambda i: _with_lora(i, lambda: _index(i)),
        "to_float32": lambda i: i.schedule.option % 2 == 0,
    },
    "embedding": {
        "tokens": lambda i: i.ints(i.out, *i.schedule.row_shape),
        "weight": _quantized_weight,
        "scale": _group_values,
        "zero_point": lambda i: i.one_of(None, None, lambda: _group_values(i)),
        "minimum": lambda i: i.one_of(lambda: _group_values(i), None, None),
        "bf16": lambda i: i.schedule.option % 2 == 0,
    },
    "rope": {
        "x": _heads,
        "positions": lambda i: i.ints(1 << 17, i.rows),
        "freqs": _frequencies,
        "interleaved": lambda i: i.one_of(False, True),
        "scale": lambda i: i.one_of(1.0, 1.2),
    },
    "loss": {
        "logits": _matrix,
        "hidden": _matrix,
        "weight": Inputs.weight,
        "targets": lambda i: i.ints(min(i.out, i.width), i.rows),
        "ignore_index": lambda i: i.one_of(-100, 0),
        "label_smoothing": lambda i: i.one_of(0.0, 0.1),
        "z_loss": lambda i: i.one_of(0.0, 0.0, 1e-3),
    },
    "recurrent": {
        "x": _matrix,
        "h": lambda i: i.values(i.rows, i.out, low=-8, high=0),
        "w_ih": lambda i: i.values(3 * i.out, i.width, low=-8, high=0),
        "w_hh": lambda i: i.values(3 * i.out, i.out, low=-8, high=0),
        "b_ih": lambda i: i.values(3 * i.out, low=-8, high=0),
        "b_hh": lambda i: i.values(3 * i.out, low=-8, high=0),
        "reset_after": lambda i: i.one_of(True, False),
        "prior": _categories,
        "posterior": lambda i: i.one_of(lambda: _categories(i), None),
        "seeds": lambda i: i.ints(1 << 40, i.rows),
        "positions": lambda i: i.ints(1 << 20, i.rows),
        "unimix": lambda i: i.one_of(0.01, 0.1),
    },
    "sample": {
        "logits": _matrix,
        "prompt_mask": lambda i: i.bools(i.rows, i.width),
        "output_counts": lambda i: i.ints(3, i.rows, i.width, dtype=torch.int32),
        "repetition_penalty": lambda i: i.by_row(1.0, 1.3),
        "presence_penalty": lambda i: i.by_row(0.0, 0.5),
        "frequency_penalty": lambda i: i.by_row(0.0, 0.2),
        "temperature": lambda i: i.by_row(1.0, 0.7, 0.0, 1.5),
        "top_k": lambda i: i.ints(i.width, i.rows) + 1,
        "top_p": lambda i: i.by_row(1.0, 0.9, 0.5),
        "min_p": lambda i: i.by_row(0.0, 0.05, 0.3),
        "seeds": lambda i: i.ints(1 << 40, i.rows),
        "positions": lambda i: i.ints(1 << 20, i.rows),
    },
}


def arguments(op: Op[..., Any], schedule: Schedule) -> dict[str, Any]:
    inputs = Inputs(op, schedule)
    return {name: ARGUMENTS[op.family][name](inputs) for name in op.signature.parameters}


def compute(op: Op[..., Any], args: dict[str, Any], run: Run) -> tuple[Tensor, ...]:
    torch.set_num_threads(run.threads)
    placed = [run.layout.of(arg) for arg in args.values()]
    assert op.select(*placed).name == "cpu"
    return as_tuple(op(*placed))


def by_rows(op: Op[..., Any], args: dict[str, Any], rows: int) -> set[str]:
    """The arguments with a row for each token: those of the record, and a mask that has one."""
    mask = args.get("mask")
    if isinstance(mask, Tensor) and mask.dim() == args["x"].dim() and len(mask) == rows:
        return {*op.row_args, "mask"}
    return set(op.row_args)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(BITS[x.element_size()])


def assert_batch_invariant(op: Op[..., Any], schedule: Schedule) -> None:
    args = arguments(op, schedule)
    whole = compute(op, args, schedule.whole)
    named = by_rows(op, args, schedule.rows)
    for part in schedule.parts():
        taken = {
            name: arg[part] if name in named and arg is not None else arg
            for name, arg in args.items()
        }
        again = compute(op, taken, schedule.split)
        for one, other in zip(again, whole, strict=True):
            different = (bits(one) != bits(other[part])).nonzero()
            assert not len(different), f"rows {part}: {len(different)} values, {different[:3]}"


each_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)


@each_op
def test_rows_do_not_depend_on_the_batch(op: Op[..., Any], explore: Any) -> None:
    explore(schedules, lambda schedule: assert_batch_invariant(op, schedule), 20)


@pytest.mark.slow
@each_op
def test_rows_do_not_depend_on_the_batch_on_many_schedules(op: Op[..., Any], explore: Any) -> None:
    explore(schedules, lambda schedule: assert_batch_invariant(op, schedule), 200)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rows", [2, 11, 12, 13, 33, 64, 545])
@pytest.mark.parametrize("channels", [1, 33, 576, 577, 1536, 3072, 3073])
def test_rows_of_a_gemm_do_not_depend_on_how_it_is_blocked(
    dtype: torch.dtype, rows: int, channels: int
) -> None:
    make = TensorMaker(dtype, seed=rows * channels)
    x, weight = make(rows, channels), make(37, channels)
    y = ops.linear(x, weight)
    by_row = [ops.linear(row, weight) for row in x.split(1)]
    assert torch.equal(bits(y), bits(torch.cat(by_row)))
    exact = x.double() @ weight.double().T
    rtol, atol = (1e-2, 1e-3) if dtype == torch.bfloat16 else (1e-4, 1e-4)
    torch.testing.assert_close(y.double(), exact, rtol=rtol, atol=atol)


@pytest.mark.parametrize("rows", [2, 64, 545])
@pytest.mark.parametrize("channels", [37, 577])
def test_gradients_of_rows_do_not_depend_on_how_they_are_blocked(rows: int, channels: int) -> None:
    make = TensorMaker(torch.bfloat16, seed=rows + channels)
    weight, grad = make(70, channels), make(rows, 70)

    def grad_input(grad: Tensor) -> Tensor:
        x = torch.zeros(len(grad), channels, dtype=grad.dtype, requires_grad=True)
        ops.linear(x, weight).backward(grad)
        assert x.grad is not None
        return x.grad

    by_row = [grad_input(row) for row in grad.split(1)]
    assert torch.equal(bits(grad_input(grad)), bits(torch.cat(by_row)))


def test_every_op_with_rows_and_a_kernel_has_arguments_here() -> None:
    for op in OPS:
        assert set(op.signature.parameters) <= set(ARGUMENTS[op.family]), op


@pytest.mark.slow
@pytest.mark.skipif("INGOT_ISA" in os.environ, reason="this run is already limited to a tier")
@pytest.mark.parametrize("tier", detect().cpu.isa[1:])
def test_the_other_tiers_are_batch_invariant(tier: str) -> None:
    """Run the fast tests of batch invariance and gradients in a process limited to the tier."""
    folder = os.path.dirname(__file__)
    names = ("test_batch_invariance.py", "test_attention.py", "test_gradient.py", "test_adamw.py")
    files = [os.path.join(folder, name) for name in names]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    environment = {**os.environ, "INGOT_ISA": tier}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
