"""Errors that a user can act on.

Such an error has a message and a hint. Code raises `IngotError` or a subclass; the command line
prints both parts and exits with status 2. A bug in ingot remains an ordinary exception with its
traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class IngotError(Exception):
    """An error with a message (the violated condition) and a hint (what to do about it).

    >>> raise IngotError("no compiler found", hint="install g++ 12 or newer")
    Traceback (most recent call last):
    ...
    ingot.core.errors.IngotError: no compiler found
      hint: install g++ 12 or newer
    """

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(f"{message}\n  hint: {hint}")
        self.message = message
        self.hint = hint


class UnknownName(IngotError):
    """A name that is not valid; the hint suggests the nearest valid one.

    >>> raise UnknownName("verb", "docter", ["doctor", "ops"])
    Traceback (most recent call last):
    ...
    ingot.core.errors.UnknownName: unknown verb 'docter'
      hint: did you mean 'doctor'? valid: doctor, ops
    """

    def __init__(self, kind: str, name: str, valid: Iterable[str]) -> None:
        options = sorted(valid)
        close = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
        suggestion = f"did you mean '{close[0]}'? " if close else ""
        # Among many options the suggestion alone is printed: a list of sixty is not read.
        listing = "" if close and len(options) > 30 else f"valid: {', '.join(options)}"
        super().__init__(f"unknown {kind} '{name}'", hint=(suggestion + listing).rstrip())
        self.name = name


class ConfigError(IngotError):
    """A configuration value that is missing, of the wrong type or out of bounds."""


class OpError(IngotError):
    """An op that is declared or called in an unsupported way."""


class DataError(IngotError):
    """Data that is missing, corrupt or different from its description."""
