"""An interpreter process whose kernels can be given a fault, for `Interpreter(script=...)`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import tempfile
from typing import Any

from ingot.kernels.triton.interpreter import FUNCTIONS, serve
from ingot.kernels.triton.provider import HERE, triton_ops
from ingot.ops.op import registry

_files: list[Any] = []


def inject_fault(module: str, old: str, new: str, op: str) -> None:
    """Replace text in the source of a module of kernels, and load its op family again."""
    triton_ops()
    source = (HERE / f"{module}.py").read_text()
    assert old in source, "the text to replace is not in the module"
    name = f"ingot.kernels.triton.{module}"
    file = tempfile.NamedTemporaryFile("w", suffix=".py")  # noqa: SIM115
    _files.append(file)  # the interpreter reads a function's source at its first call
    file.write(source.replace(old, new))
    file.flush()
    spec = importlib.util.spec_from_file_location(name, file.name)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    family = registry()[op].family
    if family != module:
        importlib.reload(sys.modules[f"ingot.kernels.triton.{family}"])
    registry()[op].__dict__.pop("providers", None)


if __name__ == "__main__":
    serve((*FUNCTIONS, inject_fault))
