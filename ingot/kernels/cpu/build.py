"""Build the C++ kernels on first use and load them.

    library("norm")          the loaded library of a family, built if necessary; None if that fails
    build(["norm", "rope"])  build several families in parallel without loading them
    load()                   build and load all of them before the first call

Installing ingot compiles nothing. The first call of an op compiles its family's source file with
the system's compiler, against torch's stable ABI, for the best ISA tier of this CPU (or the tier in
`INGOT_ISA`). The file name of a library contains a hash of sources, compiler, flags and torch, so
that a stale one is never loaded.

If several processes need the same library, one builds it while the others wait for its lock. A
library is renamed into place and has a checksum: one that a full disk or a crash has damaged is
rebuilt instead of mapped into the process, where a missing page would be a SIGBUS. Threads need no
lock, since loading a library twice is harmless. A build deletes libraries unused for a month.
Nothing is loaded from a directory that other users can write to. Without a compiler, or if it
fails, the op falls back to the next provider with one warning.

`build` compiles the headers once, into a precompiled header that all families share: those of the
standard library and of the intrinsics take most of the time of a small family.
"""

# pyright: basic
from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ingot.core import paths
from ingot.core.device import Compiler, Device, detect
from ingot.core.errors import IngotError
from ingot.core.log import logger
from ingot.kernels.cpu import tuning
from ingot.ops.arguments import tensors
from ingot.ops.dispatch import PREFER_DEPTH
from ingot.ops.gradient import Backward
from ingot.ops.record import Op, registry

HERE = Path(__file__).parent
FAMILIES = tuple(sorted(path.stem for path in HERE.glob("*.cpp")))
# The slowest to compile come first, so that no core is idle at the end of a build.
_SLOWEST = ("linear", "loss", "attention", "sample", "lora", "norm")
# -ffp-contract=off: see vector.h. errno and traps would prevent vectorization and are not used.
FLAGS = (
    *("-std=c++20", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    *("-fvisibility=hidden", "-shared", "-fPIC", "-pthread"),
)
# Flags that a tier adds to the previous one; `ingot.core.device` detects the tiers.
_ADDED_FLAGS = {
    "portable": (),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx512": (
        *(f"-mavx512{part}" for part in ("f", "bw", "cd", "dq", "vl")),
        "-mprefer-vector-width=512",
    ),
    "avx512_vnni": ("-mavx512vnni",),
    "avx512_bf16": ("-mavx512bf16",),
    "amx": ("-mamx-tile", "-mamx-bf16"),
}
TIER_FLAGS = dict(zip(_ADDED_FLAGS, accumulate(_ADDED_FLAGS.values()), strict=True))

_MAX_UNUSED_S = 30 * 24 * 3600

_LIBRARY = torch.library.Library("ingot_cpu", "DEF")
_libraries: dict[str, ctypes.CDLL | None] = {}  # by family; None if it cannot be built
_thread_pools: list[ctypes.c_void_p] = []
_thread_pool_lock = threading.Lock()
_log = logger(__name__)


class BuildError(IngotError):
    """The compiler is missing, or it failed."""


@dataclass(frozen=True, kw_only=True)
class Built:
    """A family's library on disk."""

    family: str
    path: Path
    seconds: float | None
    """Compile time; None if the library was up to date."""


def build(
    families: Sequence[str] = FAMILIES, done: Callable[[str], None] = lambda family: None
) -> list[Built]:
    """Build these families, one per core at a time; call `done` after each.

    Raises a BuildError for the first that fails.
    """
    device = detect()
    cores = device.cpu.cores
    libraries = {family: _path(family, device) for family in families}
    missing = sorted((f for f, path in libraries.items() if not _is_intact(path)), key=_rank)
    # While one core compiles the header, the others compile the fastest families without it.
    precompile = len(missing) > cores
    without_header = missing[len(missing) - (cores - 1) :] if precompile else missing
    with ExitStack() as stack, ThreadPoolExecutor(cores) as pool:
        header: Future[Path | None] | None = None
        if precompile:
            home = paths.ensure_trusted(paths.cache("kernels"))
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="pch-", dir=home))
            header = pool.submit(_precompile, device, Path(directory))

        def one(family: str) -> Built:
            if family in missing:
                included = header.result() if header and family not in without_header else None
                built = _find_or_build(family, device, included)
            else:
                built = Built(family=family, path=libraries[family], seconds=None)
            done(family)
            return built

        order = sorted(
            families, key=lambda f: (f not in without_header, f not in missing, _rank(f))
        )
        futures = {family: pool.submit(one, family) for family in order}
        return [futures[family].result() for family in families]


def load() -> None:
    """Build and load all kernels, which otherwise happens at the first call of each family.

    For SmolLM2, loading takes half of the time to the first token.
    """
    for built in build():
        _libraries[built.family] = _open(built.path)
    for op in registry().values():
        op.providers  # noqa: B018  imports their modules


def library(family: str) -> ctypes.CDLL | None:
    """Load the library of a family; return None, with a warning, if it cannot be built."""
    if family not in _libraries:
        device = detect()  # outside: an invalid INGOT_ISA is an error, not a reason to fall back
        try:
            _libraries[family] = _open(_find_or_build(family, device).path)
        except (IngotError, OSError) as error:
            _warn(str(error))
            _libraries[family] = None
    return _libraries[family]


def _open(path: Path) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(path))
    loaded.ingot_connect(ctypes.byref(PREFER_DEPTH), _thread_pool(loaded), tuning.memory())
    return loaded


def _thread_pool(loaded: ctypes.CDLL) -> ctypes.c_void_p:
    """Return the thread pool of all libraries, created by the first one that is loaded."""
    with _thread_pool_lock:
        if not _thread_pools:
            loaded.ingot_create_thread_pool.restype = ctypes.c_void_p
            _thread_pools.append(ctypes.c_void_p(loaded.ingot_create_thread_pool()))
        return _thread_pools[0]


def cpu(
    op: Op[..., Any],
    *,
    supports_dtypes: Callable[..., bool] | None = None,
    backward: Callable[..., bool] | None = None,
) -> None:
    """Register the C++ kernel with the op's name as its `cpu` provider.

    `supports_dtypes` returns whether it supports the dtypes of a call, by default all but float16
    and float64. `backward` returns whether the library has the gradient of a call; otherwise the
    next provider computes it.
    """
    kernel = _declare(op.overload)

    def supports(*args: Any) -> bool:
        on_cpu = all(tensor.device.type == "cpu" for tensor in tensors(args))
        has_dtypes = supports_dtypes(*args) if supports_dtypes else _has_supported_dtypes(args)
        return on_cpu and has_dtypes and library(op.family) is not None

    gradient = _gradient(op, backward) if backward else None
    op.provide("cpu", kernel, batch_invariant=True, supports=supports, backward=gradient)


def in_bf16(x: Tensor, *_: object) -> bool:
    """Return whether a call is in bfloat16: in float32, MKL's GEMMs of the gradients are faster."""
    return x.dtype == torch.bfloat16


def _gradient(op: Op[..., Any], supports: Callable[..., bool]) -> Backward:
    kernel = _declare(op.backward_overload)

    def backward(needs: list[bool], grads: list[Tensor], *args: Any) -> Sequence[Tensor | None]:
        if not supports(*args):
            others = [p for p in op.providers.values() if p.name != "cpu" and p.supports(*args)]
            return next(p.backward for p in others if p.backward)(needs, grads, *args)
        gradients = iter(kernel(needs, grads, *args))
        return [next(gradients) if needed else None for needed in needs]

    return backward


def _declare(overload: Any) -> Any:
    """Declare the schema of a kernel or a gradient in `ingot_cpu` and return its overload."""
    schema = str(overload._schema).removeprefix("ingot::")
    _LIBRARY.define(schema)
    return getattr(torch.ops.ingot_cpu, schema.partition("(")[0]).default


@cache
def _warn(reason: str) -> None:
    """Warn once per reason, even if it applies to every family."""
    _log.warning("falling back to PyTorch's kernels, results are not batch-invariant: %s", reason)


def _has_supported_dtypes(args: tuple[Any, ...]) -> bool:
    return all(t.dtype not in (torch.float16, torch.float64) for t in tensors(args))


def _rank(family: str) -> int:
    return _SLOWEST.index(family) if family in _SLOWEST else len(_SLOWEST)


def _path(family: str, device: Device) -> Path:
    """Return the path that the library of a family has or will have."""
    if device.compiler is None:
        raise BuildError("no C++ compiler", hint="install g++ 12 or newer, or set CXX")
    home = paths.ensure_trusted(paths.cache("kernels"))
    tier = device.cpu.isa[0]
    key = _key(family, _command(device.compiler, tier), device.compiler, device.torch)
    return home / f"{family}-{tier}-{key}.so"


def _find_or_build(family: str, device: Device, header: Path | None = None) -> Built:
    """Return the library of a family; compile it, with a precompiled header if given."""
    path = _path(family, device)
    seconds = None
    if not _is_intact(path):
        with paths.lock(path):
            if not _is_intact(path):  # another process may have built it in the meantime
                assert device.compiler is not None
                command = _command(device.compiler, device.cpu.isa[0])
                if header:
                    command += ["-include", str(header)]
                seconds = _compile(command, HERE / f"{family}.cpp", path)
    return Built(family=family, path=path, seconds=seconds)


def _precompile(device: Device, directory: Path) -> Path | None:
    """Compile all headers; return the file to include, or None if that is not possible."""
    if device.compiler is None or device.compiler.name != "gcc":
        return None
    header = directory / "kernels.h"
    header.write_text(f'#include "{HERE / "matmul.h"}"\n')
    compiled = header.with_suffix(".h.gch")
    flags = _command(device.compiler, device.cpu.isa[0])
    flags = [flag for flag in flags if not flag.startswith(("-shared", "-Wl", "-L", "-l"))]
    command = [*flags, "-x", "c++-header", str(header), "-o", str(compiled)]
    if subprocess.run(command, capture_output=True).returncode:
        compiled.unlink(missing_ok=True)
        return None
    return header


def _command(compiler: Compiler, tier: str) -> list[str]:
    torch_home = Path(torch.__file__).parent
    extra = shlex.split(os.environ.get("INGOT_CXXFLAGS", ""))
    return [
        *(compiler.path, *FLAGS, *TIER_FLAGS[tier], *extra),
        f"-isystem{torch_home / 'include'}",
        "-Wl,--no-as-needed",  # the source follows its libraries
        *(f"-L{torch_home / 'lib'}", "-ltorch_cpu", f"-Wl,-rpath,{torch_home / 'lib'}"),
    ]


def _sources(source: Path) -> list[Path]:
    """Return a source file and the headers of this directory that it includes, transitively."""
    sources = [source]
    for path in sources:  # grows while it is iterated
        sources += [
            HERE / name for name in _includes(path.read_text()) if HERE / name not in sources
        ]
    return [source, *sorted(sources[1:])]


@cache  # families share most headers
def _includes(source: str) -> list[str]:
    return re.findall(r'^#include "(.+)"', source, re.MULTILINE)


def _key(family: str, command: list[str], compiler: Compiler, torch_version: str) -> str:
    digest = hashlib.sha256()
    for source in _sources(HERE / f"{family}.cpp"):
        digest.update(source.read_bytes())
    environment = (*command, compiler.name, compiler.version, torch_version)
    digest.update("\0".join(environment).encode())
    return digest.hexdigest()[:16]


def _compile(command: list[str], source: Path, path: Path) -> float:
    """Compile a source into a library and return the elapsed seconds."""
    _log.info("building %s", path.name)
    start = time.monotonic()
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        run = subprocess.run([*command, str(source), "-o", str(temporary)], capture_output=True)
        if run.returncode:
            raise _failure(command[0], source, run)
        library = temporary.read_bytes()
        paths.write_atomic(_checksum_path(path), hashlib.sha256(library).hexdigest())
        paths.write_atomic(path, library)
    finally:
        temporary.unlink(missing_ok=True)
    _delete_unused(path.parent)
    return time.monotonic() - start


def _failure(compiler: str, source: Path, run: subprocess.CompletedProcess[bytes]) -> BuildError:
    output = run.stderr.decode(errors="replace").strip() or f"exit status {run.returncode}"
    full, lines = os.strerror(errno.ENOSPC), output.splitlines()
    first = next((line for line in lines if full in line or "error" in line), output)[:500]
    if full in output:
        hint = "free space there and in TMPDIR, or set XDG_CACHE_HOME to another directory"
    else:
        hint = "set CXX to another compiler (g++ 12 is tested), or report this"
    return BuildError(f"{compiler} cannot compile {source.name}: {first}", hint=hint)


def _delete_unused(home: Path) -> None:
    """Delete by age: the libraries of other clones and environments are in the same directory."""
    oldest = time.time() - _MAX_UNUSED_S
    for path in home.iterdir():
        with suppress(OSError):
            if path.stat().st_mtime < oldest:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _checksum_path(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _is_intact(path: Path) -> bool:
    """Return whether the library matches its checksum; if so, mark it as used."""
    try:
        if hashlib.sha256(path.read_bytes()).hexdigest() != _checksum_path(path).read_text():
            return False
    except (OSError, UnicodeDecodeError):
        return False
    with suppress(OSError):  # a cache may be read-only
        for file in (path, _checksum_path(path)):
            os.utime(file)
    return True
