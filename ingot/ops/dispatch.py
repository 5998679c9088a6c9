"""Dispatch: which provider computes a call.

Each package `ingot.kernels.<provider>` is a provider and declares its `PRIORITY`, an integer; the
available provider with the highest priority that supports a call computes it. The reference has
priority 0 and supports every call. A package may define `available()`; its modules are imported
only if that returns True, so Triton is not imported without a GPU.

Contexts change the order: `prefer` puts one provider first, `batch_invariant` the batch-invariant
ones. `ingot.kernels` is imported at the first call of an op, not with `ingot.ops`.
"""

# pyright: basic
from __future__ import annotations

import ctypes
import importlib
import importlib.util
import pkgutil
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from ingot.core.errors import UnknownName
from ingot.ops.gradient import Backward

REFERENCE = "reference"
KERNELS = "ingot.kernels"

# Number of active `prefer` contexts in all threads. C++ kernels read it, and call Python unless
# it is 0.
PREFER_DEPTH = ctypes.c_int(0)
# `prefer` and `batch_invariant` in this context. Autograd saves them for the backward.
PREFERRED: ContextVar[str | None] = ContextVar("preferred", default=None)
BATCH_INVARIANT: ContextVar[bool] = ContextVar("batch_invariant", default=False)
_depth_lock = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class Override:
    """Calls for which a provider precedes all others, and the reason.

    It has no effect in `batch_invariant()`.

    >>> Override(when=lambda x: x.is_cuda, reason="cuBLAS").reason
    'cuBLAS'
    """

    when: Callable[..., bool]
    """Takes the op's arguments."""
    reason: str


@dataclass(frozen=True, kw_only=True)
class Provider:
    """An implementation of an op."""

    name: str
    forward: Callable[..., Any]
    batch_invariant: bool
    """The bits of a row do not depend on the other rows of the call."""
    supports: Callable[..., bool]
    """Takes the op's arguments."""
    backward: Backward | None
    """Takes which arguments need a gradient, the gradients of the outputs, and the arguments. If
    None, the next provider's is used."""
    preferred_for: Override | None = None


def always(*args: object) -> bool:
    """Return True: the provider supports every call."""
    return True


@cache
def provider_names() -> tuple[str, ...]:
    """Return the names of all providers by priority, those that cannot run here included.

    >>> provider_names()[-1]
    'reference'
    """
    packages = importlib.import_module(KERNELS).__path__
    names = [module.name for module in pkgutil.iter_modules(packages) if module.ispkg]
    return (*sorted(names, key=_priority, reverse=True), REFERENCE)


def _priority(provider: str) -> int:
    return importlib.import_module(f"{KERNELS}.{provider}").PRIORITY


def check_provider(name: str) -> None:
    """Raise an error if no provider has this name."""
    if name not in provider_names():
        raise UnknownName("provider", name, provider_names())


def import_providers(family: str) -> None:
    """Import the modules that register the kernels of a family and can run in this process."""
    for name in provider_names()[:-1]:
        package = importlib.import_module(f"{KERNELS}.{name}")
        module = f"{KERNELS}.{name}.{family}"
        if getattr(package, "available", always)() and importlib.util.find_spec(module):
            importlib.import_module(module)


def candidates(providers: Mapping[str, Provider], args: tuple[Any, ...]) -> Iterator[Provider]:
    """Yield the providers that support a call, best first; a provider may be repeated."""
    first = providers.get(PREFERRED.get() or "")
    if first and first.supports(*args):
        yield first
    able = [p for p in providers.values() if p.supports(*args)]
    if BATCH_INVARIANT.get() or torch.is_inference_mode_enabled():
        yield from (p for p in able if p.batch_invariant)
    yield from (p for p in able if p.preferred_for and p.preferred_for.when(*args))
    yield from able


@contextmanager
def prefer(provider: str) -> Generator[None]:
    """Use this provider for every call it supports, for example to find the kernel that is wrong.

    This includes the backward of ops called in the context.

    >>> from ingot import ops
    >>> with prefer("reference"):
    ...     ops.silu(torch.zeros(1))
    tensor([0.])
    """
    check_provider(provider)
    with saved_contexts(provider, BATCH_INVARIANT.get()):
        yield


@contextmanager
def batch_invariant() -> Generator[None]:
    """Prefer batch-invariant providers, even where another provider is declared faster.

    This includes the backward of ops called in the context. Inference mode, which all serving
    uses, implies it. On a CPU nothing changes: batch-invariant providers come first in any case.

    >>> from ingot import ops
    >>> with batch_invariant():
    ...     ops.silu(torch.zeros(1))
    tensor([0.])
    """
    token = BATCH_INVARIANT.set(True)
    try:
        yield
    finally:
        BATCH_INVARIANT.reset(token)


@contextmanager
def saved_contexts(preferred: str | None, batch_invariant: bool) -> Generator[None]:
    """Apply the saved values of `PREFERRED` and `BATCH_INVARIANT`."""
    tokens = PREFERRED.set(preferred), BATCH_INVARIANT.set(batch_invariant)
    _add_depth(1 if preferred else 0)
    try:
        yield
    finally:
        _add_depth(-1 if preferred else 0)
        PREFERRED.reset(tokens[0])
        BATCH_INVARIANT.reset(tokens[1])


def _add_depth(change: int) -> None:
    with _depth_lock:
        PREFER_DEPTH.value += change
