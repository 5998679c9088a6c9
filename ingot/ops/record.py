"""The record of an op: what it computes, and everything that is derived from it.

The reference is the definition of the op in PyTorch, in any dtype. In float64 it is the oracle that
every provider is measured against. As the fallback provider it computes in float32 for
half-precision inputs and rounds its results once.
"""

# pyright: basic
from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, ParamSpec, TypeVar

from torch import Tensor
from torch.compiler import is_compiling

from ingot.core.errors import OpError
from ingot.ops import dispatch
from ingot.ops.arguments import allocate_like, copy_outputs, map_tensors, tensors, widen
from ingot.ops.autograd import needed_gradients
from ingot.ops.dispatch import Override, Provider, always, candidates
from ingot.ops.gradient import Backward, Gradient
from ingot.ops.inputs import SampleInput, TensorMaker
from ingot.ops.library import invalid_argument, outside_autocast

P = ParamSpec("P")
R = TypeVar("R", bound=Tensor | tuple[Tensor, ...] | None)

REGISTRY: dict[str, Op[..., Any]] = {}


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Lower bound on the bytes moved and the FLOPs computed by a call, whatever the provider."""

    bytes: int
    flops: int


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Allowed error, as a multiple of plain PyTorch's own at the same precision.

    Both errors are against the float64 reference (see `ingot.ops.accuracy`). A looser bound
    than the default must state its reason.
    """

    forward: float = 2.0
    backward: float = 3.0
    reason: str = ""

    def __post_init__(self) -> None:
        if (self.forward > 2.0 or self.backward > 3.0) and not self.reason:
            raise OpError(
                f"tolerance {self.forward}x/{self.backward}x is looser than 2x/3x",
                hint="tighten it, or state why in `reason`",
            )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Op(Generic[P, R]):
    """The record of one op, which is also the function to call.

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
    # The function that `overload` calls, without its Python frame: saves 0.4 us of 4.5 us per
    # call. Dynamo traces the overload only.
    _eager_call: Any = field(init=False)
    _registered: dict[str, Provider] = field(default_factory=dict[str, Provider])

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Compute the op with the best provider that supports the call."""
        try:
            if is_compiling():
                return self.overload(*args, **kwargs)
            return self._eager_call(*args, **kwargs)
        except RuntimeError as error:
            if invalid_argument(error) is None:
                raise
            bound = self.signature.bind(*args, **kwargs)
            bound.apply_defaults()
            self._raise_with_hint(bound.args)
            raise

    def __repr__(self) -> str:
        return f"<op ingot::{self.name}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _by_name, (self.name,)  # copies and pickles of a model refer to the same record

    @cached_property
    def signature(self) -> inspect.Signature:
        """Signature of the reference, which is the op's."""
        return inspect.signature(self.reference)

    @cached_property
    def providers(self) -> dict[str, Provider]:
        """All providers that can run here, by priority. Imports their modules on first access."""
        dispatch.import_providers(self.family)
        backward = self.gradient and self.gradient(self.fallback)
        self.provide(dispatch.REFERENCE, self.fallback, batch_invariant=False, backward=backward)
        names = dispatch.provider_names()
        return {name: self._registered[name] for name in names if name in self._registered}

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
        """Register a provider; called by the modules of `ingot.kernels`."""
        dispatch.check_provider(name)
        self._registered[name] = Provider(
            name=name,
            forward=forward,
            batch_invariant=batch_invariant,
            supports=supports,
            backward=backward,
            preferred_for=preferred_for,
        )

    def select(self, *args: Any) -> Provider:
        """Return the provider that computes this call."""
        return next(candidates(self.providers, self.with_defaults(args)))

    def fallback(self, *args: Any) -> Any:
        """Compute the reference as a provider: at least in float32, rounded once."""
        widened = tuple(map_tensors(widen, arg) for arg in args)
        outputs = copy_outputs(self.fake(*args), self.reference(*widened))  # pyright: ignore
        for arg, written in zip(
            self.mutated_tensors(args), self.mutated_tensors(widened), strict=True
        ):
            arg.copy_(written)
        return outputs

    def mutated_tensors(self, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """Return the tensors among the arguments that the op writes into."""
        names = self.signature.parameters
        return tensors(arg for name, arg in zip(names, args, strict=False) if name in self.mutates)

    def with_defaults(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Append the defaults: torch's dispatcher drops trailing arguments equal to them."""
        return args + self._defaults[len(args) :]

    @cached_property
    def _defaults(self) -> tuple[Any, ...]:
        return tuple(parameter.default for parameter in self.signature.parameters.values())

    # The torch ops' kernels and fakes, registered in `ingot.ops.op`.

    def forward_kernel(self, *args: Any) -> Any:
        """Check the arguments and compute the op, called by torch's dispatcher."""
        args = self.with_defaults(args)
        self.check(*args)
        return outside_autocast(next(candidates(self.providers, args)).forward, *args)

    def forward_fake(self, *args: Any) -> Any:
        """Check the arguments and allocate the outputs, called by torch's dispatcher."""
        args = self.with_defaults(args)
        devices = {tensor.device.type for tensor in tensors(args)}
        if len(devices) > 1 and "meta" in devices:
            # torch calls the fake if any tensor is on 'meta', but a fake has no values to return.
            raise OpError(
                f"{self.name}: tensors on {', '.join(sorted(devices))}",
                hint="materialize the tensors on 'meta' and set their values first",
            )
        self.check(*args)
        return self.fake(*args)

    def backward_kernel(self, needs: list[bool], grads: list[Tensor], *args: Any) -> list[Tensor]:
        """Compute the needed gradients, called by torch's dispatcher."""
        args = self.with_defaults(args)
        needs = _for_each_argument(needs, args)
        backward = next(p.backward for p in candidates(self.providers, args) if p.backward)
        gradients = outside_autocast(backward, needs, grads, *args)
        return needed_gradients(args, gradients, needs, grads)

    def backward_fake(self, needs: list[bool], grads: list[Tensor], *args: Any) -> list[Tensor]:
        """Allocate the needed gradients, called by torch's dispatcher."""
        args = self.with_defaults(args)
        flags = _for_each_argument(needs, args)
        return [allocate_like(arg) for arg, needed in zip(args, flags, strict=True) if needed]

    def _raise_with_hint(self, args: tuple[Any, ...]) -> None:
        """Repeat a call that a C++ kernel rejected, to raise an error with the op and a hint."""
        with dispatch.prefer(dispatch.REFERENCE):  # usually rejects the call with more detail
            self.forward_kernel(*args)
        try:
            self.forward_kernel(*args)  # from Python, where the message is unchanged
        except RuntimeError as error:
            condition = invalid_argument(error)
            if condition is None:
                raise
        else:
            return
        raise OpError(
            f"{self.name}: {condition}",
            hint="fix the argument, or run this call with `ingot.ops.prefer('reference')`",
        )


def _for_each_argument(needs: list[bool], args: tuple[Any, ...]) -> list[bool]:
    """Append flags for trailing arguments that torch.compile has dropped: see `with_defaults`."""
    return [*needs, *(False for _ in args[len(needs) :])]


def registry() -> dict[str, Op[..., Any]]:
    """Return every op by name, in the order of declaration.

    >>> from ingot import ops
    >>> sorted(ops.registry())[:2]
    ['adamw', 'add_layer_norm']
    """
    return dict(REGISTRY)


def _by_name(name: str) -> Op[..., Any]:
    return REGISTRY[name]
