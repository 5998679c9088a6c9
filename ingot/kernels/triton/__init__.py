"""The `triton` provider: kernels for NVIDIA and AMD GPUs.

None of these kernels has run on a GPU yet. Everything that can be checked without one is checked in
CI: accuracy, batch invariance and memory traffic in Triton's interpreter, and that every kernel
compiles for every target in `target.py` without spills, within shared memory and on the tensor
cores. `ingot kernels` prints the results.

Each op family has a file here with the same name as in `ops`. A kernel is declared once
(`kernel.py`): the function, its tuning space and its bound. An op is registered once
(`provider.py`), with the arguments of a representative call. Tests, compilation, tables and
dispatch are derived from these two declarations.

Arithmetic is in float32; tensors are float32, float16 or bfloat16. The kernels are batch-invariant:
the configuration of a launch never depends on the number of rows, and reduction dimensions are not
split, or are split at fixed positions.

The modules of this package import Triton; this one does not.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

from ingot.core.errors import IngotError

PRIORITY = 20
GPU = "cuda"  # torch's device type for ROCm as well
MIN_CAPABILITY = 80  # the oldest NVIDIA compute capability that Triton compiles for


def interpreting() -> bool:
    """Return whether kernels run in Triton's interpreter on the CPU: for tests, and very slow."""
    return os.environ.get("TRITON_INTERPRET", "0") in ("1", "true", "on")


def supported(arch: str | None) -> bool:
    """Return whether Triton compiles for a device of this architecture; True if unknown.

    >>> supported("sm_75"), supported("sm_89"), supported("gfx942")
    (False, True, True)
    """
    if arch is None or not arch.startswith("sm_"):
        return True
    return int(arch.removeprefix("sm_")) >= MIN_CAPABILITY


def require_triton() -> None:
    """Raise an error if Triton is not installed."""
    if find_spec("triton") is None:
        raise IngotError("Triton is not installed", hint="run `pip install 'ingot[gpu]'`")


@cache
def available() -> bool:
    """Return whether kernels of this provider can run in this process."""
    if find_spec("triton") is None:
        return False
    if interpreting():
        return True
    import torch

    return torch.cuda.is_available()
