"""The interpreter process of the tests: it also injects faults into kernels, and runs code.

Starting such a process takes seconds, so all tests of a pytest process share one.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import tempfile
from typing import Any
from unittest import mock

import ingot.kernels.triton as package
from ingot.kernels.triton import config_store
from ingot.kernels.triton import interpreter as served
from ingot.kernels.triton.provider import HERE, triton_ops
from ingot.ops.record import registry

_files: list[Any] = []


def call_with_fault(
    module: str, old: str, new: str, op: str, query: str, arguments: dict[str, Any]
) -> Any:
    """Call the served function `query` with text in the source of a module replaced."""
    triton_ops()
    source = (HERE / f"{module}.py").read_text()
    assert old in source, "the text to replace is not in the module"
    load(module, source.replace(old, new), op)
    try:
        return getattr(served, query)(**arguments)
    finally:
        load(module, source, op)


def load(module: str, source: str, op: str) -> None:
    """Load a module of kernels from this source, and the op's family if it is another module."""
    name = f"ingot.kernels.triton.{module}"
    file = tempfile.NamedTemporaryFile("w", suffix=".py")  # noqa: SIM115
    _files.append(file)  # the interpreter reads a function's source at its first call
    file.write(source)
    file.flush()
    spec = importlib.util.spec_from_file_location(name, file.name)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[name] = loaded
    setattr(package, module, loaded)
    spec.loader.exec_module(loaded)
    family = registry()[op].family
    if family != module:
        importlib.reload(sys.modules[f"ingot.kernels.triton.{family}"])
    registry()[op].__dict__.pop("providers", None)


def attention_mismatches(**arguments: Any) -> list[str]:
    """Call the served function, and restore the size of splits."""
    from ingot.kernels.triton import attention

    with mock.patch.object(attention, "SPLIT_SIZE", attention.SPLIT_SIZE):
        return served.attention_mismatches(**arguments)


def run_code(code: str, env: dict[str, str]) -> Any:
    """Run code with these environment variables; return what it assigns to `result`."""
    namespace: dict[str, Any] = {}
    with mock.patch.dict(os.environ, env):
        config_store.config_cache.clear()
        try:
            exec(code, namespace)
        finally:
            config_store.config_cache.clear()
    return namespace.get("result")


if __name__ == "__main__":
    served.serve((*served.FUNCTIONS, attention_mismatches, call_with_fault, run_code))
