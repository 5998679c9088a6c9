"""Every CPU kernel under AddressSanitizer and UndefinedBehaviorSanitizer.

    python -m tests.kernels.sanitize            this CPU's best tier
    python -m tests.kernels.sanitize portable   another

The kernels are built once more, with both sanitizers, into a cache of their own, and run over the
samples of all ops in float32 and bfloat16, gradients too, then over the strange calls of
test_fuzz.py. The sanitizers must be loaded before anything else, so this starts a second process
with them preloaded. A read or write out of bounds, a misaligned access, a signed overflow ends it
with a report.

torch takes its memory by posix_memalign, which AddressSanitizer replaces, so what lies just
outside of a tensor is known to it. But it does not watch the intrinsics that load in part (AVX-512)
or by tile (AMX). So every sample also runs in memory that ends where a forbidden page begins, and
the portable tier, which does without intrinsics, goes through the same logic in plain sight.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ingot import ops
from ingot.core import paths
from ingot.core.device import detect
from ingot.ops.arguments import as_tuple, map_tensors
from ingot.ops.dispatch import prefer
from ingot.ops.inputs import TensorMaker
from ingot.ops.record import Op

FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -O1"
OPTIONS = {
    # Python leaks on purpose at exit. torch's own libraries are not built for these checks.
    "ASAN_OPTIONS": "detect_leaks=0:detect_odr_violation=0:alloc_dealloc_mismatch=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}
FUZZ = Path(__file__).with_name("test_fuzz.py")
DTYPES = (torch.float32, torch.bfloat16)


def main() -> None:
    """Start the process that is watched, or be it."""
    if os.environ.get("LD_PRELOAD"):
        watched()
        return
    compiler = detect().compiler
    assert compiler is not None, "no C++ compiler"
    environment = {
        **os.environ,
        **OPTIONS,
        "INGOT_CXXFLAGS": FLAGS,
        "INGOT_ISA": sys.argv[1] if sys.argv[1:] else os.environ.get("INGOT_ISA", ""),
        "XDG_CACHE_HOME": str(paths.cache("sanitized")),
    }
    # Built by a process of its own: a compiler under the sanitizers is slow.
    build = "from ingot.kernels.cpu.build import build; build()"
    subprocess.run([sys.executable, "-c", build], env=environment, check=True)
    names = ("libasan.so", "libubsan.so", "libstdc++.so")  # the last for their exceptions
    environment["LD_PRELOAD"] = ":".join(_library(compiler.path, name) for name in names)
    fuzz = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FUZZ)]
    for command in ([sys.executable, __file__], fuzz):
        subprocess.run(command, env=environment, check=True)


def watched() -> None:
    """Call every kernel on every sample, as it comes and in guarded memory."""
    start, calls = time.monotonic(), 0
    for op in ops.registry().values():
        if "cpu" in op.providers:
            calls += sum(1 for args in _calls(op) for _ in _run(op, args))
    assert calls, "no kernel was called"
    tier, seconds = detect().cpu.isa[0], time.monotonic() - start
    print(f"{calls} calls of {tier} kernels, nothing to report, {seconds:.0f} s")  # noqa: T201


def _calls(op: Op[..., Any]) -> Iterator[tuple[Any, ...]]:
    for dtype in DTYPES:
        for sample in op.samples(TensorMaker(dtype)):
            args = op.with_defaults(sample.args)
            yield args
            yield tuple(map_tensors(_tight, arg) for arg in args)
            yield tuple(map_tensors(_guarded, arg) for arg in args)


def _run(op: Op[..., Any], args: tuple[Any, ...]) -> Iterator[None]:
    for threads in (1, 2):
        torch.set_num_threads(threads)
        with prefer("cpu"):
            assert op.select(*args).name == "cpu", op
            outputs = as_tuple(op(*args))
            if op.providers["cpu"].backward:
                needs = [isinstance(arg, Tensor) and arg.is_floating_point() for arg in args]
                op.backward_overload(needs, [_guarded(torch.ones_like(o)) for o in outputs], *args)
        yield


def _tight(arg: Any) -> Any:
    """A tensor whose last element is the last of its memory, even where it has gaps."""
    return _copied(arg, lambda count, dtype: torch.empty(count, dtype=dtype))


def _guarded(arg: Any) -> Any:
    """A tensor whose last element is the last of a page, before one that must not be touched."""
    return _copied(arg, _before_a_forbidden_page)


def _copied(arg: Any, memory: Callable[[int, torch.dtype], Tensor]) -> Any:
    if not isinstance(arg, Tensor) or arg.numel() == 0:
        return arg
    needed = 1 + sum((size - 1) * step for size, step in zip(arg.shape, arg.stride(), strict=True))
    return memory(needed, arg.dtype).as_strided(arg.shape, arg.stride()).copy_(arg)


def _before_a_forbidden_page(count: int, dtype: torch.dtype) -> Tensor:
    size = count * dtype.itemsize
    usable = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = mmap.mmap(-1, usable + mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    libc = ctypes.CDLL(None)
    assert libc.mprotect(ctypes.c_void_p(address + usable), mmap.PAGESIZE, 0) == 0
    return torch.frombuffer(pages, dtype=dtype, count=count, offset=usable - size)


def _library(compiler: str, name: str) -> str:
    command = [compiler, f"-print-file-name={name}"]
    path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return str(Path(path).resolve())


if __name__ == "__main__":
    main()
