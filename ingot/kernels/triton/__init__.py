"""The `triton` provider: kernels for NVIDIA and AMD GPUs.

None of this has run on a GPU. What can be known without one is known and gated: their numbers, in
Triton's interpreter; that every kernel compiles to machine code for every target of `target.py`,
without spills, within shared memory, on the tensor cores. `ingot kernels` prints it.

Each family has its file here, with the basename that it has in `ops`. A kernel is declared once
(`kernel.py`): the function, the configurations it may be compiled in, what bounds it. An op is
given its kernels once (`provider.py`), with the arguments of a representative call. Tests,
compilation, the table and dispatch are made from these two declarations.

Arithmetic is in float32, storage in float32, float16 or bfloat16. Exact means here that a row's
configuration never depends on how many rows there are, and that nothing is split along what is
added up, or at sites that are fixed.

Triton is imported by the modules in here, not by this one.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

from ingot.core.errors import IngotError

GPU = "cuda"  # ROCm's devices, too, are that to torch
OLDEST = 80  # compute capability of NVIDIA's that Triton compiles for


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU: for tests, at a snail's pace."""
    return os.environ.get("TRITON_INTERPRET", "0") in ("1", "true", "on")


def supported(capability: str | None) -> bool:
    """Whether Triton compiles for a device of this architecture; one that is not known, it may.

    >>> supported("sm_75"), supported("sm_89"), supported("gfx942")
    (False, True, True)
    """
    if capability is None or not capability.startswith("sm_"):
        return True
    return int(capability.removeprefix("sm_")) >= OLDEST


def require_triton() -> None:
    """Raise what to do about it where Triton is not installed."""
    if find_spec("triton") is None:
        raise IngotError("Triton is not installed", hint="pip install 'ingot[gpu]'")


@cache
def available() -> bool:
    """Whether kernels of this provider can run in this process."""
    if find_spec("triton") is None:
        return False
    if interpreting():
        return True
    import torch

    return torch.cuda.is_available()
