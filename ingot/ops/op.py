"""The op record: WHAT is computed, once, and everything else derived from it.

An op is a plain PyTorch function, its `reference`, with a record around it:

    @op(fake=fake_like, samples=..., tolerance=Tolerance(), cost=..., row_args=("x",))
    def silu(x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)

From that record come

- a real torch op `ingot::silu`, so that torch.compile, torch.export and autograd see it;
- a second one, `ingot::silu_backward`, opaque like the first, so that a backward written as
  a kernel can stand in for the derived one and the graph stays whole either way;
- dispatch between providers: the reference is one of them and supports every call, kernels
  under `ingot.kernels.<provider>.<family>` are the others, loaded at the first call;
- the tests, the catalogue of `ingot ops` and its docs page.

The reference is mathematics, in whatever dtype it is given. In float64 it is the oracle. As the
fallback it runs in float32 for half-precision inputs and its results are rounded once.

Ops are registered for `CompositeExplicitAutograd`, the dispatcher's weakest backend key. The C++
kernels claim the `CPU` key of the same op once they are loaded, and are from then on called
without a detour through Python: 3 us a call instead of 9.
"""

# pyright: basic
from __future__ import annotations

import ctypes
import importlib
import importlib.util
import inspect
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ingot.core.errors import OpError, UnknownName
from ingot.ops.gradient import Backward, Gradient, as_tuple, differentiate, vjp
from ingot.ops.inputs import SampleInput, TensorMaker

P = ParamSpec("P")
R = TypeVar("R", bound=Tensor | tuple[Tensor, ...] | None)

PROVIDER_PRIORITY = ("cpu", "triton", "aten", "reference")  # first that supports the call wins

# How many `prefer` are active, in all threads: C++ kernels read it, and ask Python unless it is 0.
PREFER_DEPTH = ctypes.c_int(0)

_INVALID_ARGUMENT = "invalid argument: "  # prefix of the C++ kernels' InvalidArgument

_LIBRARY = torch.library.Library("ingot", "DEF")
# The same ops without their C++ kernels, which come here when they do not know what to do.
_PYTHON = torch.library.Library("ingot_python", "DEF")
_REGISTRY: dict[str, Op[..., Any]] = {}
_depth_lock = threading.Lock()
_preferred: ContextVar[str | None] = ContextVar("preferred", default=None)
_batch_invariant: ContextVar[bool] = ContextVar("batch_invariant", default=False)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a call must at least move and compute, whoever computes it."""

    bytes: int
    flops: int


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Allowed error, as a multiple of plain PyTorch's own at the same precision.

    Both errors are against the float64 reference (see `ingot.ops.accuracy`). A looser bound
    than the default carries its reason.
    """

    forward: float = 2.0
    backward: float = 3.0
    reason: str = ""

    def __post_init__(self) -> None:
        if (self.forward > 2.0 or self.backward > 3.0) and not self.reason:
            raise OpError(
                f"tolerance {self.forward}x/{self.backward}x is looser than 2x/3x",
                hint="tighten it, or say why in `reason`",
            )


@dataclass(frozen=True, kw_only=True)
class Override:
    """Calls for which a provider comes before all others, and why.

    It has no effect in `batch_invariant()`.

    >>> Override(when=lambda x: x.is_cuda, reason="cuBLAS").reason
    'cuBLAS'
    """

    when: Callable[..., bool]
    """Takes the op's arguments."""
    reason: str


@dataclass(frozen=True, kw_only=True)
class Provider:
    """One way HOW an op is computed.

    `supports` takes the op's arguments. `backward` takes which arguments need a gradient, the
    gradients of the outputs, and the arguments; without one, the next provider's is used.
    `batch_invariant`: a row's bits do not depend on the other rows of the call.
    """

    name: str
    forward: Callable[..., Any]
    batch_invariant: bool
    supports: Callable[..., bool]
    backward: Backward | None
    preferred_for: Override | None = None


def always(*args: object) -> bool:
    """A provider that supports every call."""
    return True


@contextmanager
def prefer(provider: str) -> Generator[None]:
    """Use this provider wherever it supports the call: to find out which kernel is wrong.

    >>> with prefer("reference"):
    ...     registry()["silu"](torch.zeros(1))
    tensor([0.])
    """
    if provider not in PROVIDER_PRIORITY:
        raise UnknownName("provider", provider, PROVIDER_PRIORITY)
    with _set_preferred(provider):
        yield


@contextmanager
def _set_preferred(provider: str | None) -> Generator[None]:
    token = _preferred.set(provider)
    _add_depth(1 if provider else 0)
    try:
        yield
    finally:
        _add_depth(-1 if provider else 0)
        _preferred.reset(token)


@contextmanager
def batch_invariant() -> Generator[None]:
    """Prefer batch-invariant providers, even where another provider is declared faster.

    This includes the backward of ops called in the context. Inference mode, which all serving
    uses, implies it.

    On a CPU nothing changes: there the batch-invariant ones are first in any case.

    >>> with batch_invariant():
    ...     registry()["silu"](torch.zeros(1))
    tensor([0.])
    """
    with _set_batch_invariant(True):
        yield


@contextmanager
def _set_batch_invariant(asked: bool) -> Generator[None]:
    token = _batch_invariant.set(asked)
    try:
        yield
    finally:
        _batch_invariant.reset(token)


def _add_depth(change: int) -> None:
    with _depth_lock:
        PREFER_DEPTH.value += change


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Op(Generic[P, R]):
    """The record of one op, and the function itself: call it.

    Fields that are functions of a call take the op's own arguments.
    """

    name: str
    family: str
    reference: Callable[P, R]
    check: Callable[..., None]
    fake: Callable[..., R]
    samples: Callable[[TensorMaker], Iterator[SampleInput]]
    tolerance: Tolerance
    cost: Callable[..., Cost]
    row_args: tuple[str, ...]
    gradient: Gradient | None
    mutates: tuple[str, ...]
    decode_outputs: Callable[..., tuple[Tensor, ...]] | None
    # The torch ops. Plain attributes: Dynamo cannot trace the lock of a cached_property.
    overload: Any = field(init=False)
    backward_overload: Any = field(init=False)
    # What `overload` calls, without its Python frame: saves 0.4 us of 4.5 us per call. Dynamo
    # traces the overload only.
    _eager_call: Any = field(init=False)
    _registered: dict[str, Provider] = field(default_factory=dict[str, Provider])

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Compute it, by the best provider that supports the call."""
        try:
            if is_compiling():
                return self.overload(*args, **kwargs)
            return self._eager_call(*args, **kwargs)
        except RuntimeError as error:
            if not str(error).startswith(_INVALID_ARGUMENT):
                raise
            bound = self.signature.bind(*args, **kwargs)
            bound.apply_defaults()
            self._explain(bound.args)
            raise

    def __repr__(self) -> str:
        return f"<op ingot::{self.name}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _by_name, (self.name,)  # copies and pickles of a model keep the one record

    @cached_property
    def signature(self) -> inspect.Signature:
        """The reference's signature, which is the op's."""
        return inspect.signature(self.reference)

    @cached_property
    def providers(self) -> dict[str, Provider]:
        """All providers, best first. Imports their modules at the first call."""
        for name in PROVIDER_PRIORITY:
            if name != "reference" and _can_run(name):
                module = f"ingot.kernels.{name}.{self.family}"
                if importlib.util.find_spec(module):
                    importlib.import_module(module)
        backward = self.gradient and self.gradient(self.fallback)
        self.provide("reference", self.fallback, batch_invariant=False, backward=backward)
        return {
            name: self._registered[name] for name in PROVIDER_PRIORITY if name in self._registered
        }

    def provide(
        self,
        name: str,
        forward: Callable[..., Any],
        *,
        batch_invariant: bool,
        supports: Callable[..., bool] = always,
        backward: Backward | None = None,
        preferred_for: Override | None = None,
    ) -> None:
        """Register a provider: called by the modules under `ingot.kernels`."""
        if name not in PROVIDER_PRIORITY:
            raise UnknownName("provider", name, PROVIDER_PRIORITY)
        self._registered[name] = Provider(
            name=name,
            forward=forward,
            batch_invariant=batch_invariant,
            supports=supports,
            backward=backward,
            preferred_for=preferred_for,
        )

    def select(self, *args: Any) -> Provider:
        """The provider that serves this call."""
        return next(self._candidates(self.with_defaults(args)))

    def fallback(self, *args: Any) -> Any:
        """The reference as a provider: in float32 at least, rounded once."""
        widened = tuple(map_tensors(_widen, arg) for arg in args)
        outputs = _fill(self.fake(*args), self.reference(*widened))  # pyright: ignore
        for arg, written in zip(
            self.mutated_tensors(args), self.mutated_tensors(widened), strict=True
        ):
            arg.copy_(written)
        return outputs

    def mutated_tensors(self, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """Those of the arguments that the op writes into; of lists, what is in them."""
        names = self.signature.parameters
        return tensors(arg for name, arg in zip(names, args, strict=False) if name in self.mutates)

    def with_defaults(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments with defaults: torch's dispatcher drops those that equal them."""
        return args + self._defaults[len(args) :]

    @cached_property
    def _defaults(self) -> tuple[Any, ...]:
        return tuple(parameter.default for parameter in self.signature.parameters.values())

    def _candidates(self, args: tuple[Any, ...]) -> Iterator[Provider]:
        """All that support the call, best first; some come twice."""
        first = self.providers.get(_preferred.get() or "")
        if first and first.supports(*args):
            yield first
        able = [p for p in self.providers.values() if p.supports(*args)]
        if _batch_invariant.get() or torch.is_inference_mode_enabled():
            yield from (p for p in able if p.batch_invariant)
        yield from (p for p in able if p.preferred_for and p.preferred_for.when(*args))
        yield from able

    def _forward_kernel(self, *args: Any) -> Any:
        args = self.with_defaults(args)
        self.check(*args)
        return _outside_autocast(next(self._candidates(args)).forward, *args)

    def _explain(self, args: tuple[Any, ...]) -> None:
        """Raise what a C++ kernel refused these arguments for, with a hint."""
        with prefer("reference"):  # as a rule it refuses too, and says more
            self._forward_kernel(*args)
        try:
            self._forward_kernel(*args)  # from Python, where an error keeps its words
        except RuntimeError as error:
            if not str(error).startswith(_INVALID_ARGUMENT):
                raise
            condition = str(error).removeprefix(_INVALID_ARGUMENT).partition("\n")[0]
        else:
            return
        raise OpError(
            f"{self.name}: {condition}",
            hint="fix the argument, or run this call with `ingot.ops.prefer('reference')`",
        )

    def _forward_fake(self, *args: Any) -> Any:
        args = self.with_defaults(args)
        devices = {tensor.device.type for tensor in tensors(args)}
        if len(devices) > 1 and "meta" in devices:
            # torch comes here for a single weight without memory; a fake has no values to return.
            raise OpError(
                f"{self.name}: tensors on {', '.join(sorted(devices))}",
                hint="give the tensors on 'meta' their memory and their values first",
            )
        self.check(*args)
        return self.fake(*args)

    def _backward_kernel(self, needs: list[bool], grads: list[Tensor], *args: Any) -> list[Tensor]:
        args = self.with_defaults(args)
        backward = next(p.backward for p in self._candidates(args) if p.backward)
        found = _outside_autocast(backward, needs, grads, *args)
        taken = {grad.untyped_storage().data_ptr() for grad in grads}
        return [
            _own(gradient, arg, taken)
            for arg, gradient, needed in zip(args, found, needs, strict=True)
            if needed
        ]

    def _backward_fake(self, needs: list[bool], grads: list[Tensor], *args: Any) -> list[Tensor]:
        return [
            _empty(arg)
            for arg, needed in zip(self.with_defaults(args), needs, strict=True)
            if needed
        ]


def op(
    *,
    check: Callable[..., None],
    fake: Callable[..., R],
    samples: Callable[[TensorMaker], Iterator[SampleInput]],
    tolerance: Tolerance,
    cost: Callable[..., Cost],
    row_args: tuple[str, ...],
    gradient: Gradient | None = differentiate,
    mutates: tuple[str, ...] = (),
    decode_outputs: Callable[..., tuple[Tensor, ...]] | None = None,
) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Make the decorated function, the reference, an op.

    - `check` raises an OpError for arguments that do not fit together.
    - `fake` allocates the outputs: their shapes and dtypes, contiguous, values unset.
    - `samples` yields the inputs it is tested on; `tolerance` bounds the error on them.
    - `cost` counts bytes and FLOPs of a call.
    - `row_args` names the arguments whose first dimension is the tokens, where each row of the
      outputs depends only on the same row of these; () where that does not hold.
    - `gradient` makes the backward out of the reference; None where there is none, as with
      integer outputs.
    - `mutates` names the arguments that are written into, as a cache is. Then there is no gradient.
    - `decode_outputs` reassembles values that are stored across several arguments, so that their
      error is measured and not that of the parts.
    """

    def declare(reference: Callable[P, R]) -> Op[P, R]:
        record = Op(
            name=reference.__name__,
            family=reference.__module__.rpartition(".")[2],
            reference=reference,
            check=check,
            fake=fake,
            samples=samples,
            tolerance=tolerance,
            cost=cost,
            row_args=row_args,
            gradient=None if mutates else gradient,
            mutates=mutates,
            decode_outputs=decode_outputs,
        )
        _register(record)
        return record

    return declare


def registry() -> dict[str, Op[..., Any]]:
    """Every op by name, in the order of declaration.

    >>> sorted(registry())[:2]
    ['adamw', 'add_layer_norm']
    """
    return dict(_REGISTRY)


def fake_like(x: Tensor, *_: object) -> Tensor:
    """The fake of an op whose output looks like its first argument."""
    return _empty(x)


def tensors(args: Iterable[Any]) -> tuple[Tensor, ...]:
    """The tensors among arguments, and those in lists among them.

    >>> len(tensors((torch.zeros(1), None, [torch.zeros(1), torch.zeros(2)])))
    3
    """
    inside = (arg if isinstance(arg, list | tuple) else [arg] for arg in args)
    return tuple(value for values in inside for value in values if isinstance(value, Tensor))


def map_tensors(change: Callable[[Any], Any], arg: Any) -> Any:
    """An argument changed; of a list, each of its elements.

    >>> map_tensors(abs, [-1, 2]), map_tensors(abs, -3)
    ([1, 2], 3)
    """
    return [change(value) for value in arg] if isinstance(arg, list | tuple) else change(arg)


def accum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype arithmetic is done in: float32, or float64 where the input is."""
    return torch.promote_types(dtype, torch.float32)


def _can_run(provider: str) -> bool:
    """Whether a provider can do anything in this process; Triton needs a GPU, and is large."""
    package = importlib.import_module(f"ingot.kernels.{provider}")
    return getattr(package, "available", always)()


def _by_name(name: str) -> Op[..., Any]:
    return _REGISTRY[name]


def _outside_autocast(function: Callable[..., Any], *args: Any) -> Any:
    """Ops compute in the dtypes they are given; autocast would change them within."""
    device = tensors(args)[0].device.type
    if not torch.is_autocast_enabled(device):
        return function(*args)
    with torch.autocast(device, enabled=False):
        return function(*args)


def _register(record: Op[..., Any]) -> None:
    if any(p.kind is not p.POSITIONAL_OR_KEYWORD for p in record.signature.parameters.values()):
        raise OpError(
            f"op '{record.name}' has keyword-only or variable parameters",
            hint="make them ordinary ones; callers may still name them",
        )
    name = record.name
    schema = torch.library.infer_schema(record.reference, mutates_args=record.mutates)
    forward = _define(name, schema, record._forward_kernel, record._forward_fake)
    object.__setattr__(record, "__doc__", record.reference.__doc__)
    object.__setattr__(record, "__signature__", record.signature)
    object.__setattr__(record, "overload", forward)
    object.__setattr__(record, "_eager_call", forward._op)
    if not record.mutates:  # autograd takes no formula for an op that writes into its arguments
        _register_backward(record, schema)
    _REGISTRY[name] = record


def _register_backward(record: Op[..., Any], schema: str) -> None:
    arguments = schema[1:].rsplit(") -> ", 1)[0]
    backward = _define(
        f"{record.name}_backward",
        f"(bool[] needs, Tensor[] grads, {arguments}) -> Tensor[]",
        record._backward_kernel,
        record._backward_fake,
    )
    object.__setattr__(record, "backward_overload", backward)
    _join(record)


def _define(name: str, schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    for library in (_LIBRARY, _PYTHON):
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ingot::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.ingot, name).default


def _join(record: Op[..., Any]) -> None:
    """Tell autograd that the backward op is the gradient of the op."""

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.preferred, ctx.batch_invariant = _preferred.get(), _batch_invariant.get()
        ctx.is_tensor = [isinstance(value, Tensor) for value in inputs]
        ctx.save_for_backward(*(value for value in inputs if isinstance(value, Tensor)))
        ctx.others = [None if isinstance(value, Tensor) else value for value in inputs]

    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if record.gradient is None:
            raise OpError(
                f"op '{record.name}' has no gradient",
                hint="detach its inputs, or leave it out of what is trained",
            )
        tensors = iter(ctx.saved_tensors)
        args = [
            next(tensors) if is_tensor else other
            for is_tensor, other in zip(ctx.is_tensor, ctx.others, strict=True)
        ]
        given = ctx.needs_input_grad  # without the arguments that were left to their defaults
        needs = [*given, *(False for _ in args[len(given) :])]
        if torch.is_grad_enabled():  # create_graph=True: what follows is differentiated again
            outputs = as_tuple(record.fallback(*args))
            return tuple(vjp(outputs, grads, args, needs, create_graph=True)[: len(given)])
        # Backward may run in another thread, and after the `with prefer(...)` has ended.
        with _set_preferred(ctx.preferred), _set_batch_invariant(ctx.batch_invariant):
            found = iter(record.backward_overload(needs, [g.contiguous() for g in grads], *args))
        return tuple(next(found) if needed else None for needed in given)

    torch.library.register_autograd(
        f"ingot::{record.name}", backward, setup_context=setup, lib=_LIBRARY
    )


def _widen(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(accum_dtype(value.dtype))
    return value


def _empty(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _own(gradient: Tensor | None, arg: Tensor, taken: set[int]) -> Tensor:
    """The gradient as an op may return it: contiguous, with a storage of its own."""
    if gradient is None:
        return torch.zeros_like(arg, memory_format=torch.contiguous_format)
    gradient = gradient.contiguous()
    if gradient.untyped_storage().data_ptr() in taken:
        gradient = gradient.clone()
    taken.add(gradient.untyped_storage().data_ptr())
    return gradient


def _fill(outputs: Any, results: Any) -> Any:
    for out, result in zip(as_tuple(outputs), as_tuple(results), strict=True):
        assert out.shape == result.shape, f"fake says {out.shape}, reference {result.shape}"
        out.copy_(result)
    return outputs
