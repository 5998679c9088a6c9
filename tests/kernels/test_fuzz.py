"""Strange calls: a kernel computes what the reference computes, or Python gets an exception.

A strange call is a sample of an op with one to three of its arguments changed into what a caller
might give by mistake: other shapes, dtypes, devices, strides, nothing at all, numbers out of
range. It must never end the process, and a kernel must not accept what the reference refuses.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from ingot import ops
from ingot.core.device import detect
from ingot.ops.arguments import as_tuple
from ingot.ops.dispatch import prefer
from ingot.ops.inputs import TensorMaker
from ingot.ops.record import Op

KIND = "strange calls"
OPS = [op for op in ops.registry().values() if "cpu" in op.providers]
WILD = (-(2**63), -(2**31), -1, 2**20, 2**31 - 1, 2**31, 2**40, 2**63 - 1)

pytestmark = pytest.mark.skipif(detect().compiler is None, reason="no C++ compiler")

Change = Callable[[Tensor, int], Any]


def resized(x: Tensor, number: int) -> Tensor:
    """One dimension longer or shorter, or empty."""
    if x.dim() == 0:
        return x
    dim, size = number % x.dim(), x.shape[number % x.dim()]
    wanted = (size + 1, size - 1, 0, 1, 2 * size, size + 16)[number // 4 % 6]
    if not size or wanted <= 0:
        return x.narrow(dim, 0, 0)
    return x.index_select(dim, torch.arange(wanted, device=x.device) % size)


def reshaped(x: Tensor, number: int) -> Tensor:
    views = (x.flatten, lambda: x[None], lambda: x[..., None], lambda: x.flatten()[:1].squeeze())
    return views[number % 4]()


def converted(x: Tensor, number: int) -> Tensor:
    dtypes = (
        *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64),
        *(torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool),
    )
    x = x.real if x.is_complex() else x  # torch warns of what it would drop
    return x.to(dtypes[number % len(dtypes)])


def restrided(x: Tensor, number: int) -> Tensor:
    """The same values elsewhere, or one of them everywhere."""
    match number % 4:
        case 0:
            return x.transpose(0, -1).contiguous().transpose(0, -1) if x.dim() else x
        case 1:
            return x.flatten()[:1].view([1] * x.dim()).expand(x.shape) if x.numel() else x
        case 2:
            return torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)
        case _:
            return torch.stack([x, x], -1)[..., 0]


def transposed(x: Tensor, number: int) -> Tensor:
    return x.transpose(0, -1) if x.dim() else x


def elsewhere(x: Tensor, number: int) -> Tensor:
    return x.to("meta")


def absent(x: Tensor, number: int) -> None:
    return None


def wild(x: Tensor, number: int) -> Tensor:
    """A number out of range: an index, a length, a value."""
    x = x.clone(memory_format=torch.contiguous_format)
    if x.numel() and not x.is_meta:
        x.view(-1)[number // 8 % x.numel()] = wild_value(x.dtype, number)
    return x


def wild_value(dtype: torch.dtype, number: int) -> float:
    if dtype.is_floating_point or dtype.is_complex:
        return (torch.nan, torch.inf, -torch.inf, 1e9, -1e9)[number % 5]
    if dtype == torch.bool:
        return number % 2
    limit = torch.iinfo(dtype)
    return min(max(WILD[number % len(WILD)], limit.min), limit.max)


def in_a_list(tensors: list[Tensor], change: Change, number: int) -> list[Tensor]:
    """One of several tensors changed, or one more, or one less."""
    changed = change(tensors[number % len(tensors)], number) if tensors else torch.zeros(3)
    if changed is None or number % 8 == 0:
        return tensors[:-1]
    if number % 8 == 1 or not tensors:
        return [*tensors, changed]
    at = number % len(tensors)
    return [*tensors[:at], changed, *tensors[at + 1 :]]


CHANGES: tuple[Change, ...] = (
    *(resized, resized, reshaped, converted, restrided, transposed, elsewhere, absent, wild, wild),
)


@dataclass(frozen=True)
class Strange:
    """Which sample in which dtype, and which change of which argument with which number."""

    sample: int
    dtype: torch.dtype
    changes: tuple[tuple[int, int, int], ...]
    preferred: bool

    def unchanged(self, op: Op[..., Any]) -> list[Any]:
        samples = list(op.samples(TensorMaker(self.dtype)))
        return list(op.with_defaults(samples[self.sample % len(samples)].args))

    def args(self, op: Op[..., Any]) -> list[Any]:
        args = self.unchanged(op)
        for argument, change, number in self.changes:
            at, changed = argument % len(args), CHANGES[change % len(CHANGES)]
            if isinstance(args[at], Tensor):
                args[at] = changed(args[at], number)
            elif isinstance(args[at], list):
                args[at] = in_a_list(args[at], changed, number)
            elif isinstance(args[at], int | float):
                args[at] = type(args[at])((0, -1, 1, 7)[number % 4])
        return args


strange_calls = st.builds(
    Strange,
    sample=st.integers(0, 19),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    changes=st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, len(CHANGES) - 1), st.integers(0, 255)),
        min_size=1,
        max_size=3,
    ).map(tuple),
    preferred=st.booleans(),
)


def outcome(op: Op[..., Any], provider: str | None, args: list[Any]) -> Any:
    """What a call gives: tensors, or the exception."""
    try:
        if provider is None:
            return as_tuple(op(*args))
        with prefer(provider):
            return as_tuple(op(*args))
    except Exception as error:
        return error


QUANTIZED = ("weight", "k", "v", "k_cache", "v_cache")  # whose integers are values, not indices


def assert_sane(op: Op[..., Any], call: Strange) -> None:
    args = call.args(op)
    ours = outcome(op, "cpu" if call.preferred else None, args)
    if isinstance(ours, Exception):
        return
    if not ours:  # it writes into its arguments, and returns nothing
        refused = outcome(op, "reference", args)
        assert not isinstance(refused, Exception), f"the reference refuses: {refused}"
        return
    nothing = any(one.is_meta for one in ours) or not any(one.numel() for one in ours)
    if nothing or not all(map(finite, args)):
        return  # no values, or results of NaN inputs
    names = op.signature.parameters
    args = [a if n in QUANTIZED else widened(a) for n, a in zip(names, args, strict=True)]
    theirs = outcome(op, "reference", args)
    assert not isinstance(theirs, Exception), f"the reference refuses: {theirs}"
    exact = list(map(doubled, args))
    oracle, beside = as_tuple(op.reference(*exact)), as_tuple(op.reference(*jolted(exact, args)))
    usual = as_tuple(op.reference(*map(doubled, call.unchanged(op))))
    for one, other, truth, moved, size in zip(ours, theirs, oracle, beside, usual, strict=True):
        assert (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
        if one.is_floating_point() and one.numel():
            slack = allowance(one.dtype, truth, moved, size)
            # In float32 or in float64, for either may overflow where the other does not.
            far = ~(near(one, other, slack) | near(one, truth.to(one.dtype), slack))
            assert not far.any(), f"{one[far][:3]}, where {other[far][:3]} is right"


def finite(arg: Any) -> bool:
    return not isinstance(arg, Tensor) or arg.numel() == 0 or bool(arg.isfinite().all())


def widened(arg: Any) -> Any:
    """Integers as int64: kernels may take narrow ones where PyTorch's indexing does not."""
    integers = (torch.int8, torch.uint8, torch.int16, torch.int32)
    return arg.long() if isinstance(arg, Tensor) and arg.dtype in integers else arg


def doubled(arg: Any) -> Any:
    return arg.double() if isinstance(arg, Tensor) and arg.is_floating_point() else arg


def jolted(exact: list[Any], args: list[Any]) -> list[Any]:
    """The call with every float off by up to the spacing of its dtype."""
    random = torch.Generator().manual_seed(0)

    def one(arg: Any, given: Any) -> Any:
        if not (isinstance(arg, Tensor) and arg.is_floating_point()):
            return arg
        noise = 2 * torch.rand(arg.shape, generator=random, dtype=arg.dtype) - 1
        return arg + arg * noise * torch.finfo(given.dtype).eps

    return [one(arg, given) for arg, given in zip(exact, args, strict=True)]


def allowance(dtype: torch.dtype, truth: Tensor, moved: Tensor, usual: Tensor) -> Tensor:
    """How far off a result may be: widely, for the records' tests measure accuracy, this one finds
    what is nonsense.

    Some roundings of the largest result, or of what the unchanged call gives: gelu(-5) is 1e-6, but
    it is what 1 + erf leaves of 1. And some of what a jolt of the inputs moves in the same row: the
    norm of a constant row is made of nothing but rounding.
    """
    results = [x.to(dtype).double() for x in (truth, usual) if x.numel()]
    largest = max(1e-3, *(float(x.where(x.isfinite(), 0).abs().max()) for x in results))
    shift = (moved - truth).abs().nan_to_num(0, 0)  # a change to or from -inf is not rounding
    shift = shift.amax(-1, keepdim=True) if shift.dim() else shift
    return 64 * torch.finfo(dtype).eps * largest + 16 * shift


def near(result: Tensor, expected: Tensor, slack: Tensor) -> Tensor:
    result, expected, eps = result.double(), expected.double(), torch.finfo(result.dtype).eps
    same = (result == expected) | (result.isnan() & expected.isnan())
    off = (result - expected).abs()
    return same | (expected.isfinite() & (off <= slack + 16 * eps * expected.abs()))


each_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)


@each_op
def test_strange_calls_are_computed_or_refused(op: Op[..., Any], explore: Any) -> None:
    explore(strange_calls, lambda call: assert_sane(op, call), 60)


@pytest.mark.slow
@each_op
def test_many_strange_calls_are_computed_or_refused(op: Op[..., Any], explore: Any) -> None:
    explore(strange_calls, lambda call: assert_sane(op, call), 1500)


@each_op
def test_samples_are_among_what_is_computed(op: Op[..., Any]) -> None:
    """Or the tests above would prove little."""
    for sample in op.samples(TensorMaker(torch.float32)):
        assert op.select(*sample.args).name == "cpu"
    assert all(
        p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in op.signature.parameters.values()
    )
