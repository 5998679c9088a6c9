"""Modules with a mistake planted into their source, for the tests of the tests."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

from hypothesis import Phase, settings

EFFORT = settings(
    # Hypothesis also tries constants of the imported modules, so how soon a fault is found depends
    # on the other tests of the run: one was found after more than 400 examples.
    max_examples=2000,
    stateful_step_count=40,
    phases=[Phase.generate],
    database=None,
    derandomize=True,
    report_multiple_bugs=False,
)


def execute(module: ModuleType, old: str, new: str) -> ModuleType:
    """A copy of the module in which `old` is replaced by `new`."""
    assert module.__file__
    source = Path(module.__file__).read_text()
    assert old in source
    if old:
        source = source.replace(old, new)
    copy = ModuleType(f"planted_{module.__name__.rpartition('.')[2]}")
    sys.modules[copy.__name__] = copy  # where dataclasses look for their types
    exec(compile(source, copy.__name__, "exec"), copy.__dict__)
    return copy
