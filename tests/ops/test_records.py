"""Tests generated from the records of all ops.

A case is an op x dtype x sample x provider. pytest prints their number at the end. The fast tier
takes some of them, see `cases`.
"""

from __future__ import annotations

import doctest
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from ingot import ops
from ingot.ops.accuracy import backward_errors, forward_errors
from ingot.ops.arguments import as_tuple, map_tensors, tensors
from ingot.ops.dispatch import prefer
from ingot.ops.gradient import straight_through
from ingot.ops.inputs import REQUIRED_SAMPLES, TensorMaker
from ingot.ops.record import Op
from tests.sampling import fast_samples

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
OPS = list(ops.registry().values())


@dataclass(frozen=True)
class Case:
    op: Op[..., Any]
    dtype: str
    sample: str
    provider: str

    def __str__(self) -> str:
        return f"{self.op.name}-{self.sample}-{self.dtype}-{self.provider}"

    @property
    def combination(self) -> tuple[str, ...]:
        return self.op.name, self.dtype, self.provider

    @property
    def smooth(self) -> bool:
        """Small enough for finite differences, and away from the kink of relu_squared."""
        return not self.sample.startswith(("large", "zero"))

    @property
    def args(self) -> tuple[Any, ...]:
        """New tensors at each access, since tests may mutate them."""
        samples = self.op.samples(TensorMaker(DTYPES[self.dtype]))
        return next(self.op.with_defaults(s.args) for s in samples if s.name == self.sample)

    @property
    def leaves(self) -> tuple[Any, ...]:
        """The arguments; those of the case's dtype require gradients."""
        return tuple(
            arg.detach().requires_grad_() if needed else arg
            for arg, needed in zip(self.args, self.needs, strict=True)
        )

    @property
    def needs(self) -> list[bool]:
        dtype = DTYPES[self.dtype]
        return [
            self.op.gradient is not None and isinstance(arg, Tensor) and arg.dtype == dtype
            for arg in self.args
        ]


def cases(
    *dtypes: str,
    where: Callable[[Case], bool] = lambda case: True,
    fast: Callable[[Case], bool] = lambda case: True,
    computes: bool = False,
) -> pytest.MarkDecorator:
    """Parametrize over every op x sample x provider that supports it, in these dtypes.

    The fast tier takes a sample of those that are `fast`, the slow tier the rest.
    """
    found = [case for op in OPS for dtype in dtypes for case in cases_of(op, dtype) if where(case)]
    names = {op.name: fast_names(op) for op in OPS}
    chosen = sampled([c for c in found if c.sample in names[c.op.name] and fast(c)], computes)
    params = [
        pytest.param(case, marks=() if case in chosen else pytest.mark.slow) for case in found
    ]
    return pytest.mark.parametrize("case", params, ids=str)


def sampled(found: list[Case], computes: bool) -> set[Case]:
    """Choose the sample "typical" from every provider in every dtype, and each other one once.

    The provider and the dtype change from one to the next. Tests that compute (`computes`) the
    error of a result take each twice: from the C++ kernels and from one of the other providers.
    Every provider of an op is chosen in each dtype at least once.
    """
    groups: dict[tuple[str, str, bool], list[Case]] = {}
    for case in found:
        kernel = computes and case.provider == "cpu"
        groups.setdefault((case.op.name, case.sample, kernel), []).append(case)
    chosen: set[Case] = set()
    turns: Counter[bool] = Counter()
    for (_, sample, kernel), group in groups.items():
        if sample == "typical":
            chosen.update(group)
        else:
            chosen.add(group[turns[kernel] % len(group)])
            turns[kernel] += 1
    covered = {case.combination for case in chosen}
    for case in found:
        if case.combination not in covered:
            covered.add(case.combination)
            chosen.add(case)
    return chosen


@cache
def fast_names(op: Op[..., Any]) -> set[str]:
    return fast_samples(sample.name for sample in op.samples(TensorMaker(torch.float32)))


@cache
def cases_of(op: Op[..., Any], dtype: str) -> list[Case]:
    return [
        Case(op, dtype, sample.name, provider.name)
        for sample in op.samples(TensorMaker(DTYPES[dtype]))
        for provider in op.providers.values()
        if provider.supports(*op.with_defaults(sample.args))
    ]


def typical(case: Case) -> bool:
    return case.sample == "typical"


def typical_in_one_dtype(case: Case) -> bool:
    """Return whether the case is typical and in a dtype that is another one for the next op."""
    dtypes = ("fp32", "bf16", "fp16")
    return typical(case) and case.dtype == dtypes[OPS.index(case.op) % len(dtypes)]


@cache
def default_providers(op: Op[..., Any], dtype: str) -> dict[str, str]:
    """Return the provider that `select` chooses for each sample."""
    samples = op.samples(TensorMaker(DTYPES[dtype]))
    return {sample.name: op.select(*sample.args).name for sample in samples}


def by_default(case: Case) -> bool:
    """Return whether the case's provider is the one that a call gets by default."""
    return default_providers(case.op, case.dtype)[case.sample] == case.provider


def differentiable(case: Case) -> bool:
    return case.op.gradient is not None


def continuous(case: Case) -> bool:
    """Exclude ties, of which any change of a logit may exclude another from the top k.

    Ops that round their inputs are excluded, too: see tests/ops/test_quantized.py.
    """
    if case.op.gradient is straight_through:
        return False
    return differentiable(case) and not case.sample.startswith("ties")


def invariant_in_python(case: Case) -> bool:
    """Exclude the C++ kernels, which tests/kernels/test_batch_invariance.py covers."""
    return case.op.providers[case.provider].batch_invariant and case.provider != "cpu"


each_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)


@each_op
def test_record_is_complete(op: Op[..., Any]) -> None:
    names = [sample.name for sample in op.samples(TensorMaker(torch.float32))]
    assert set(REQUIRED_SAMPLES) <= set(names)
    assert len(names) == len(set(names))
    assert set(op.row_args) <= set(op.signature.parameters)
    assert "reference" in op.providers


@each_op
def test_example_in_docstring(op: Op[..., Any]) -> None:
    source = sys.modules[op.reference.__module__]
    test = doctest.DocTestParser().get_doctest(
        op.__doc__ or "", {**vars(source), "torch": torch}, op.name, None, None
    )
    assert test.examples, "every op shows how it is called"
    assert doctest.DocTestRunner().run(test).failed == 0


@cases("fp32", "bf16", "fp16", computes=True)
def test_forward_error_is_within_bound(case: Case) -> None:
    assert max(forward_errors(case.op, case.provider, case.args)) <= 1


@cases("fp32", "bf16", "fp16", where=differentiable, computes=True)
def test_backward_error_is_within_bound(case: Case) -> None:
    errors = backward_errors(case.op, case.provider, case.args)
    assert max(errors.values()) <= 1, errors


@cases("fp32", "bf16", "fp16")
def test_fake_and_real_agree(case: Case) -> None:
    with prefer(case.provider):
        real = as_tuple(case.op(*case.args))
    fake = as_tuple(case.op(*(map_tensors(on_meta, arg) for arg in case.args)))
    assert [(t.shape, t.dtype, t.stride()) for t in real] == [
        (t.shape, t.dtype, t.stride()) for t in fake
    ]


@cases("fp64", where=continuous)
def test_gradient_is_the_derivative(case: Case) -> None:
    def finite(*args: Any) -> tuple[Tensor, ...]:  # a masked log-probability is -inf
        return tuple(out.where(out.isfinite(), 0) for out in as_tuple(case.op(*args)))

    with prefer(case.provider):
        assert torch.autograd.gradcheck(finite, case.leaves, fast_mode=True)


@cases(
    "fp64",
    where=lambda case: by_default(case) and continuous(case) and case.smooth,
    fast=typical,
)
def test_second_gradient_is_the_derivative_of_the_first(case: Case) -> None:
    def finite(*args: Any) -> tuple[Tensor, ...]:
        return tuple(out.where(out.isfinite(), 0) for out in as_tuple(case.op(*args)))

    assert torch.autograd.gradgradcheck(finite, case.leaves, fast_mode=True)


@cases(
    "fp32", "bf16", where=lambda case: case.sample.startswith("typical") and differentiable(case)
)
def test_gradient_does_not_depend_on_the_other_needed_ones(case: Case) -> None:
    grads = [torch.ones_like(out) for out in as_tuple(case.op(*case.args))]
    with prefer(case.provider):
        together = iter(case.op.backward_overload(case.needs, grads, *case.args))
        for index, (arg, needed) in enumerate(zip(case.args, case.needs, strict=True)):
            if needed:
                only = [i == index for i in range(len(case.args))]
                (alone,) = case.op.backward_overload(only, grads, *case.args)
                assert (alone.dtype, alone.shape) == (arg.dtype, arg.shape)
                torch.testing.assert_close(alone, next(together))


@cases("fp32", where=by_default, fast=typical)
def test_opcheck(case: Case) -> None:
    torch.library.opcheck(case.op.overload, case.leaves)


@cases("fp32", where=lambda case: by_default(case) and differentiable(case), fast=typical)
def test_opcheck_of_the_backward(case: Case) -> None:
    grads = [torch.ones_like(out) for out in as_tuple(case.op(*case.args))]
    torch.library.opcheck(case.op.backward_overload, (case.needs, grads, *case.args))


@cases(
    "fp32",
    "bf16",
    "fp16",
    where=lambda case: case.sample.startswith("typical") and by_default(case),
    fast=typical_in_one_dtype,
)
def test_compiles_without_graph_breaks(case: Case) -> None:
    torch.compiler.reset()
    compiled = torch.compile(lambda *args: case.op(*args), fullgraph=True, backend="aot_eager")
    assert_same(compiled, case)


@pytest.mark.slow
@cases("fp32", "bf16", where=lambda case: case.sample.startswith("typical") and by_default(case))
def test_compiles_with_inductor(case: Case) -> None:
    torch.compiler.reset()
    compiled = torch.compile(lambda *args: case.op(*args), fullgraph=True)
    assert_same(compiled, case)


@cases(
    "fp32",
    where=lambda case: case.sample.startswith("typical") and by_default(case),
    fast=typical,
)
def test_exports(case: Case) -> None:
    class Module(torch.nn.Module):
        def forward(self, *args: Any) -> Any:
            return case.op(*args)

    exported = torch.export.export(Module(), case.args)
    assert case.op.overload in [node.target for node in exported.graph.nodes]
    assert_equal(exported.module()(*case.args), case.op(*case.args))


@cases("fp32", "bf16", "fp16", where=invariant_in_python)
def test_rows_do_not_depend_on_the_batch(case: Case) -> None:
    names = list(case.op.signature.parameters)
    rows = len(case.args[names.index(case.op.row_args[0])])
    with prefer(case.provider):
        whole = as_tuple(case.op(*case.args))
        for row in range(rows):
            alone = as_tuple(
                case.op(
                    *(
                        arg[row : row + 1] if name in case.op.row_args and arg is not None else arg
                        for name, arg in zip(names, case.args, strict=True)
                    )
                )
            )
            assert_equal(alone, tuple(out[row : row + 1] for out in whole))


@cases("fp32", "bf16", "fp16", where=by_default)
def test_cost_is_between_output_bytes_and_all_bytes(case: Case) -> None:
    cost = case.op.cost(*case.args)
    outputs = sum(out.nbytes for out in as_tuple(case.op(*case.args)))
    inputs = sum(tensor.nbytes for tensor in tensors(case.args))
    written = sum(tensor.nbytes for tensor in case.op.mutated_tensors(case.args))
    assert outputs < cost.bytes <= inputs + outputs + written
    assert cost.flops >= 0


def on_meta(arg: Any) -> Any:
    return arg.to("meta") if isinstance(arg, Tensor) else arg


def assert_same(compiled: Callable[..., Any], case: Case) -> None:
    """Check that the compiled function is bitwise equal to the op, forward and backward."""
    ours, theirs = case.leaves, case.leaves
    expected, actual = as_tuple(case.op(*ours)), as_tuple(compiled(*theirs))
    assert_equal(actual, expected)
    if case.op.gradient:
        grads = [torch.ones_like(out) for out in expected]
        torch.autograd.backward(expected, grads)
        torch.autograd.backward(actual, grads)
        for one, other, needed in zip(ours, theirs, case.needs, strict=True):
            if needed:
                assert_equal(one.grad, other.grad)


def assert_equal(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
