"""Names for things that are expensive to import.

A registry maps a name to a thing that is imported, or made, when it is first asked for.
Listing the names imports nothing, so a catalogue of GPU kernels can be printed on a laptop.

>>> decoders: Registry[type] = Registry("decoder")
>>> decoders.register("json", "json.decoder:JSONDecoder")
>>> list(decoders), decoders.get("json").__name__
(['json'], 'JSONDecoder')
"""

from __future__ import annotations

import pkgutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Generic, TypeVar

from ingot.core.errors import UnknownName

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps names to things of type T, each resolved once, on first use."""

    def __init__(self, kind: str) -> None:
        """Make an empty registry; `kind` says in error messages what a name stands for."""
        self._kind = kind
        self._entries: dict[str, _Entry[T]] = {}

    def register(
        self, name: str, target: str | None = None, *, factory: Callable[[], T] | None = None
    ) -> None:
        """Give `name` to what stands at "package.module:attribute", or to what `factory` makes."""
        if (target is None) == (factory is None):
            raise ValueError(f"{self._kind} '{name}': give either a target or a factory")
        if target is not None:
            if ":" not in target:
                raise ValueError(f"'{target}' is not of the form 'package.module:attribute'")
            factory = partial(pkgutil.resolve_name, target)
        assert factory is not None
        # setdefault and not a test before: two threads may register one name.
        entry = _Entry(factory)
        if self._entries.setdefault(name, entry) is not entry:
            raise ValueError(f"{self._kind} '{name}' is registered already")

    def get(self, name: str) -> T:
        """Return the thing called `name`; the first call resolves it."""
        if name not in self._entries:
            raise UnknownName(self._kind, name, self._entries)
        return self._entries[name].resolve()

    def __contains__(self, name: object) -> bool:
        """Say whether the name is registered, without resolving it."""
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names in order of registration, without resolving any."""
        return iter(list(self._entries))

    def __len__(self) -> int:
        """Count the names."""
        return len(self._entries)


class _Entry(Generic[T]):
    """One factory, run at most once to success.

    The lock is the entry's own: a factory may get other names, and two threads that resolve
    different names do not wait for each other.
    """

    def __init__(self, factory: Callable[[], T]) -> None:
        self._factory: Callable[[], T] | None = factory
        self._lock = threading.RLock()

    def resolve(self) -> T:
        with self._lock:
            if self._factory is not None:
                self._value = self._factory()
                self._factory = None
            return self._value
