"""Builds the C++ kernels on first use, and loads them.

    library("norm")          the loaded library of a family, built if need be; None if it cannot be
    build(["norm", "rope"])  build several at once, without loading them

Installing ingot compiles nothing. The first call of an op compiles its family's one source file
with the system's compiler, against torch's stable ABI, for the best ISA tier of this CPU (or the
one that `INGOT_ISA` names). The library is kept under a hash of all that went into it: sources,
compiler, flags and torch, so whatever changes, a stale one is never loaded.

Many processes may want the same library at once: one builds, the others wait for its lock. A
library is complete or absent, since it is renamed into place, and its checksum lies beside it:
what a full disk or a crash has damaged is built again rather than mapped into the process, where
a missing page would be a SIGBUS. Threads need no lock of their own: loading twice is loading once.
A build throws out what nobody has loaded for a month; a directory that others can write to is not
loaded from. Without a compiler, or where it fails, the op is computed by the next provider, and
one warning says so.
"""

# pyright: basic
from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
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
from ingot.ops.gradient import Backward
from ingot.ops.op import PREFER_DEPTH, Op, tensors

HERE = Path(__file__).parent
FAMILIES = tuple(sorted(path.stem for path in HERE.glob("*.cpp")))
# -ffp-contract=off: see vector.h. No errno and no traps: they cost vectors and mean nothing here.
FLAGS = (
    *("-std=c++20", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    *("-fvisibility=hidden", "-shared", "-fPIC", "-pthread"),
)
# Each tier adds to the one before it, as `ingot.core.device` asks of the CPU.
_ADDED = {
    "portable": (),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx512": (
        *(f"-mavx512{part}" for part in ("f", "bw", "cd", "dq", "vl")),
        "-mprefer-vector-width=512",
    ),
    "avx512_bf16": ("-mavx512bf16",),
    "amx": ("-mamx-tile", "-mamx-bf16"),
}
TIER_FLAGS = dict(zip(_ADDED, accumulate(_ADDED.values()), strict=True))

_KEPT = 30 * 24 * 3600  # seconds that a library is kept after its last use

_LIBRARY = torch.library.Library("ingot_cpu", "DEF")
_pools: list[ctypes.c_void_p] = []
_pooling = threading.Lock()
_log = logger(__name__)


class BuildError(IngotError):
    """The compiler refused, or there is none."""


@dataclass(frozen=True, kw_only=True)
class Built:
    """A family's library, there and whole."""

    family: str
    path: Path
    seconds: float | None
    """How long it took to compile; None where it was there already."""


def build(
    families: Sequence[str] = FAMILIES, done: Callable[[str], None] = lambda family: None
) -> list[Built]:
    """Build these families, as many at a time as there are cores; `done` hears of each.

    Raises a BuildError for the first that fails.
    """

    def one(family: str) -> Built:
        built = _built(family, detect())
        done(family)
        return built

    with ThreadPoolExecutor(detect().cpu.cores) as pool:
        return list(pool.map(one, families))


@cache
def library(family: str) -> ctypes.CDLL | None:
    """The library of a family, loaded; None, with a warning, where it cannot be built."""
    device = detect()  # outside: an INGOT_ISA that cannot be is an error, no reason to fall back
    try:
        loaded = ctypes.CDLL(str(_built(family, device).path))
    except (IngotError, OSError) as error:
        _warn(str(error))
        return None
    loaded.ingot_connect(ctypes.byref(PREFER_DEPTH), _pool(loaded))
    return loaded


def _pool(loaded: ctypes.CDLL) -> ctypes.c_void_p:
    """The threads of all libraries: those of the first one that is loaded."""
    with _pooling:
        if not _pools:
            loaded.ingot_create_thread_pool.restype = ctypes.c_void_p
            _pools.append(ctypes.c_void_p(loaded.ingot_create_thread_pool()))
        return _pools[0]


def cpu(op: Op[..., Any], *, backward: Callable[..., bool] | None = None) -> None:
    """Register the kernel of an op, of the same name in its family's library.

    `backward` says of which calls the library has the gradient too; that of others is the next
    provider's.
    """
    kernel = _declared(op.overload)

    def supports(*args: Any) -> bool:
        return _takes(args) and library(op.family) is not None

    gradient = _gradient(op, backward) if backward else None
    op.provide("cpu", kernel, batch_invariant=True, supports=supports, backward=gradient)


def in_bf16(x: Tensor, *_: object) -> bool:
    """A call in bfloat16: gradients are GEMMs, and in float32 MKL's are faster than ours."""
    return x.dtype == torch.bfloat16


def _gradient(op: Op[..., Any], supports: Callable[..., bool]) -> Backward:
    kernel = _declared(op.backward_overload)

    def backward(needs: list[bool], grads: list[Tensor], *args: Any) -> Sequence[Tensor | None]:
        if not supports(*args):
            others = [p for p in op.providers.values() if p.name != "cpu" and p.supports(*args)]
            return next(p.backward for p in others if p.backward)(needs, grads, *args)
        found = iter(kernel(needs, grads, *args))
        return [next(found) if needed else None for needed in needs]

    return backward


def _declared(overload: Any) -> Any:
    """The kernel of an op, or of a gradient, in the library."""
    schema = str(overload._schema).removeprefix("ingot::")
    _LIBRARY.define(schema)
    return getattr(torch.ops.ingot_cpu, schema.partition("(")[0]).default


@cache
def _warn(reason: str) -> None:
    """Once for each reason, though every family may have the same."""
    _log.warning("PyTorch stands in for ingot's CPU kernels, results are not exact: %s", reason)


def _takes(args: tuple[Any, ...]) -> bool:
    half_or_double = (torch.float16, torch.float64)
    return all(t.device.type == "cpu" and t.dtype not in half_or_double for t in tensors(args))


def _built(family: str, device: Device) -> Built:
    """Find the library of a family, or compile it."""
    if device.compiler is None:
        raise BuildError("no C++ compiler", hint="install g++ 12 or newer, or set CXX")
    home = paths.ensure_trusted(paths.cache("kernels"))
    command = _command(device.compiler, device.cpu.isa[0])
    key = _key(family, command, device.compiler, device.torch)
    path = home / f"{family}-{device.cpu.isa[0]}-{key}.so"
    seconds = None
    if not _whole(path):
        with paths.lock(path):
            if not _whole(path):  # somebody may have built it while we waited
                seconds = _compile(command, HERE / f"{family}.cpp", path)
    return Built(family=family, path=path, seconds=seconds)


def _command(compiler: Compiler, tier: str) -> list[str]:
    torch_home = Path(torch.__file__).parent
    extra = shlex.split(os.environ.get("INGOT_CXXFLAGS", ""))
    return [
        *(compiler.path, *FLAGS, *TIER_FLAGS[tier], *extra),
        f"-isystem{torch_home / 'include'}",
        "-Wl,--no-as-needed",  # the source comes after its libraries
        *(f"-L{torch_home / 'lib'}", "-ltorch_cpu", f"-Wl,-rpath,{torch_home / 'lib'}"),
    ]


def _key(family: str, command: list[str], compiler: Compiler, torch_version: str) -> str:
    digest = hashlib.sha256()
    for source in (HERE / f"{family}.cpp", *sorted(HERE.glob("*.h"))):
        digest.update(source.read_bytes())
    facts = (*command, compiler.name, compiler.version, torch_version)
    digest.update("\0".join(facts).encode())
    return digest.hexdigest()[:16]


def _compile(command: list[str], source: Path, path: Path) -> float:
    """Compile a source into a library, and return the seconds that took."""
    _log.info("building %s", path.name)
    start = time.monotonic()
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        run = subprocess.run([*command, str(source), "-o", str(temporary)], capture_output=True)
        if run.returncode:
            raise _failure(command[0], source, run)
        library = temporary.read_bytes()
        paths.write_atomic(_checksum(path), hashlib.sha256(library).hexdigest())
        paths.write_atomic(path, library)
    finally:
        temporary.unlink(missing_ok=True)
    _forget_unused(path.parent)
    return time.monotonic() - start


def _failure(compiler: str, source: Path, run: subprocess.CompletedProcess[bytes]) -> BuildError:
    output = run.stderr.decode(errors="replace").strip() or f"exit status {run.returncode}"
    full, lines = os.strerror(errno.ENOSPC), output.splitlines()
    first = next((line for line in lines if full in line or "error" in line), output)[:500]
    if full in output:
        hint = "make room there and in TMPDIR, or choose another place by XDG_CACHE_HOME"
    else:
        hint = "try another compiler by CXX (g++ 12 is tested), or report this"
    return BuildError(f"{compiler} cannot compile {source.name}: {first}", hint=hint)


def _forget_unused(home: Path) -> None:
    """By age: another clone or environment may need what this one does not know."""
    oldest = time.time() - _KEPT
    for path in home.iterdir():
        with suppress(OSError):
            if path.stat().st_mtime < oldest:
                path.unlink()


def _checksum(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _whole(path: Path) -> bool:
    """Whether the library is there as it was built; if so, it is marked as used."""
    try:
        if hashlib.sha256(path.read_bytes()).hexdigest() != _checksum(path).read_text():
            return False
    except (OSError, UnicodeDecodeError):
        return False
    with suppress(OSError):  # a cache may be read-only
        for file in (path, _checksum(path)):
            os.utime(file)
    return True
