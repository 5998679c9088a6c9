"""ingot: one model, from training to serving, through the same proven kernels.

`import ingot` is cheap: it imports neither torch nor anything that does. The parts load
when they are first named:

>>> import ingot
>>> ingot.ops.rms_norm.name
'rms_norm'
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ingot.interop.model import load as load

__version__ = "0.1.0"

_ROOMS = ("core", "ops", "nn", "data", "interop")


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"ingot.{name}")
    if name == "load":
        return importlib.import_module("ingot.interop.model").load
    raise AttributeError(f"module 'ingot' has no attribute '{name}'")


def __dir__() -> list[str]:
    return [*_ROOMS, "__version__", "load"]
