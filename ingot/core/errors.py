"""Errors a user can act on.

Every error a user may meet says what happened and what to do about it. Code raises a
subclass; the command line prints the two parts and exits with status 2. A bug in ingot
itself stays an ordinary exception with its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class IngotError(Exception):
    """What happened, and the remedy.

    >>> raise IngotError("no compiler found", remedy="install g++ 12 or newer")
    Traceback (most recent call last):
    ...
    ingot.core.errors.IngotError: no compiler found
      remedy: install g++ 12 or newer
    """

    def __init__(self, what: str, *, remedy: str) -> None:
        super().__init__(f"{what}\n  remedy: {remedy}")
        self.what = what
        self.remedy = remedy


class UnknownName(IngotError):
    """A name that is not among the valid ones; the remedy names the nearest.

    >>> raise UnknownName("verb", "docter", ["doctor", "ops"])
    Traceback (most recent call last):
    ...
    ingot.core.errors.UnknownName: unknown verb 'docter'
      remedy: did you mean 'doctor'? valid: doctor, ops
    """

    def __init__(self, kind: str, name: str, valid: Iterable[str]) -> None:
        options = sorted(valid)
        close = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
        hint = f"did you mean '{close[0]}'? " if close else ""
        # A hint among many options stands alone: nobody reads a list of sixty.
        listing = "" if close and len(options) > 20 else f"valid: {', '.join(options)}"
        super().__init__(f"unknown {kind} '{name}'", remedy=(hint + listing).rstrip())
        self.name = name


class ConfigError(IngotError):
    """A configuration value that is missing, of the wrong type or out of bounds."""


class OpError(IngotError):
    """An op was declared or called in a way it does not support."""


class DataError(IngotError):
    """Data that is missing, broken or not what it was said to be."""
