"""The machine this process runs on, and the device that a setting names.

    device = detect()
    device.cpu.isa[0]      # the best instruction set the kernels may use, e.g. "amx"
    device.cpu.cores       # the number of threads worth starting
    device.fingerprint     # the key under which measured peaks and tuned kernels are stored
    resolve("auto")        # the torch.device to compute on

A `Device` holds only properties that do not change from one process to the next: not the free
memory, not the current frequency. Everything that influences a measured peak is included, also
the torch version (it brings oneDNN and OpenMP), and all of it enters the fingerprint. Python's
version does not: kernels use torch's stable ABI, and no peak is measured in Python.

Affinity (taskset, Slurm) or a cgroup (containers) may restrict a process. The counts here are those
that this process may use.

Parsers take text, so that tests can pass the files of other machines.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ingot.core.errors import IngotError, UnknownName

if TYPE_CHECKING:
    import torch

DeviceType: TypeAlias = Literal["cpu", "cuda"]
"""Device types with kernels of ingot's own; torch calls ROCm's GPUs "cuda", too."""
FUSED_OPTIMIZER_DEVICES = frozenset({"cpu", "cuda", "mps", "xpu"})
"""Device types for which torch has fused optimizers."""
PINNED_MEMORY_DEVICES = frozenset({"cuda", "xpu"})
"""Device types to which copies from page-locked memory are asynchronous."""
CUDA_GRAPH_DEVICES = frozenset({"cuda"})
"""Device types on which steps are captured as CUDA graphs."""

# CPU flags that each tier needs in addition to the previous one; "portable" needs none.
_TIERS: dict[str, frozenset[str]] = {
    "portable": frozenset(),
    "avx2": frozenset({"avx2", "fma", "f16c"}),
    "avx512": frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
    "avx512_vnni": frozenset({"avx512_vnni"}),
    "avx512_bf16": frozenset({"avx512_bf16"}),
    "amx": frozenset({"amx_tile", "amx_bf16"}),
}
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_INT8 = ("amx_int8", "avx512_vnni", "avx_vnni")
_TORCH_NAMES = {"fma3": "fma"} | {
    f"avx512_{x}": f"avx512{x}" for x in ("f", "bw", "cd", "dq", "vl")
}


_COMPILER_VERSIONS = {
    "clang": ("__clang_major__", "__clang_minor__", "__clang_patchlevel__"),
    "gcc": ("__GNUC__", "__GNUC_MINOR__", "__GNUC_PATCHLEVEL__"),
}


@dataclass(frozen=True, kw_only=True)
class Cpu:
    """The processor, as far as this process may use it. Cache sizes are bytes per core."""

    name: str
    architecture: str
    cores: int
    threads: int
    isa: tuple[str, ...]
    """Available tiers, best first: of amx, avx512_bf16, avx512_vnni, avx512, avx2,
    portable."""
    int8: tuple[str, ...]
    """Instructions for int8 dot products: of amx_int8, avx512_vnni, avx_vnni."""
    l1d: int | None
    l2: int | None
    l3: int | None


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """An accelerator, as torch reports it."""

    type: str
    name: str
    memory: int | None
    capability: str | None
    """The architecture that kernels are compiled for: "sm_90", "gfx942"."""


@dataclass(frozen=True, kw_only=True)
class Compiler:
    """The C++ compiler that builds the CPU kernels."""

    path: str
    name: str
    version: str


@dataclass(frozen=True, kw_only=True)
class Device:
    """Everything about the machine."""

    cpu: Cpu
    memory: int
    gpus: tuple[Gpu, ...]
    compiler: Compiler | None
    system: str
    torch: str

    @property
    def fingerprint(self) -> str:
        """Return a short hash of all properties."""
        facts = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(facts.encode()).hexdigest()[:16]


@cache
def detect() -> Device:
    """Inspect the machine; cached, because it imports torch and runs the compiler."""
    import torch

    membership = _read(Path("/proc/self/cgroup"))
    quota, limit = cgroup_limits(Path("/sys/fs/cgroup"), membership)
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Device(
        cpu=_detect_cpu(torch.cpu.get_capabilities(), quota),
        memory=min(installed, limit or installed),
        gpus=detect_gpus(),
        compiler=detect_compiler(os.environ.get("CXX")),
        system=platform.system(),
        torch=str(torch.__version__),
    )


@dataclass(frozen=True, kw_only=True)
class Processor:
    """The processor as the system reports it, without the limits of this process."""

    name: str
    flags: frozenset[str]
    core_of: Mapping[int, tuple[str, str]]
    """Logical CPU -> (socket, core)."""


def parse_cpuinfo(text: str) -> Processor:
    """Parse Linux's /proc/cpuinfo.

    On ARM it has neither model names nor cores: the part number is the name, and each CPU a core.
    """
    blocks = [dict(_pairs(block)) for block in text.strip().split("\n\n")]
    cpus = [block for block in blocks if "processor" in block]
    first = cpus[0] if cpus else {}
    part = " ".join(first[key] for key in ("CPU implementer", "CPU part") if key in first)
    return Processor(
        name=first.get("model name") or part or "unknown",
        flags=frozenset((first.get("flags") or first.get("Features") or "").split()),
        core_of={
            int(cpu["processor"]): (cpu.get("physical id", ""), cpu.get("core id", f"#{index}"))
            for index, cpu in enumerate(cpus)
        },
    )


def parse_capabilities(capabilities: Mapping[str, Any]) -> Processor:
    """Parse `torch.cpu.get_capabilities()`, for systems without /proc/cpuinfo."""
    threads: int = capabilities.get("num_logical_cores") or os.cpu_count() or 1
    cores: int = capabilities.get("num_physical_cores") or threads
    return Processor(
        name=capabilities.get("cpu_name") or platform.processor() or "unknown",
        flags=frozenset(_TORCH_NAMES.get(k, k) for k, v in capabilities.items() if v is True),
        core_of={cpu: ("", str(cpu % cores)) for cpu in range(threads)},
    )


def isa_tiers(flags: Collection[str]) -> tuple[str, ...]:
    """List the tiers that these CPU flags allow, best first.

    >>> isa_tiers({"avx2", "fma", "f16c", "avx512_bf16"})
    ('avx2', 'portable')
    """
    tiers: list[str] = []
    for tier, needs in _TIERS.items():
        if not needs.issubset(flags):
            break
        tiers.insert(0, tier)
    return tuple(tiers)


def limit_isa_tiers(tiers: tuple[str, ...], wanted: str | None) -> tuple[str, ...]:
    """Return the tiers up to the one that INGOT_ISA names, for tests and comparisons.

    >>> limit_isa_tiers(("avx512", "avx2", "portable"), "avx2")
    ('avx2', 'portable')
    """
    if not wanted:
        return tiers
    if wanted not in _TIERS:
        raise UnknownName("INGOT_ISA", wanted, _TIERS)
    if wanted not in tiers:
        raise IngotError(
            f"INGOT_ISA: expected a tier of this CPU, got '{wanted}'",
            hint=f"choose one of {', '.join(tiers)}, or unset it",
        )
    return tiers[tiers.index(wanted) :]


def count_usable_cores(
    core_of: Mapping[int, tuple[str, str]], allowed: Iterable[int], quota: float | None
) -> tuple[int, int]:
    """Return the (cores, threads) of a process that is bound to some CPUs and a CPU quota.

    A quota of 2.5 CPUs gives 2: the system would stop a third thread halfway through each period,
    and all others would wait for it at the end of a parallel loop.
    """
    cpus = [cpu for cpu in allowed if cpu in core_of]
    cores, threads = len({core_of[cpu] for cpu in cpus}), len(cpus)
    most = threads if quota is None else int(quota)
    return max(1, min(cores, most)), max(1, min(threads, most))


def parse_size(text: str) -> int:
    """Parse a size as Linux writes it.

    >>> parse_size("48K"), parse_size("2M"), parse_size("512")
    (49152, 2097152, 512)
    """
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    return int(text.rstrip("KMG")) * units.get(text[-1:], 1)


def read_data_caches(directory: Path) -> dict[str, int]:
    """Return the bytes of each cache level from a CPU's directory in /sys; empty if unavailable."""
    indices = directory.glob("index*")
    data = [index for index in indices if _read(index / "type") in ("Data", "Unified")]
    sizes = {_read(index / "level"): _read(index / "size") for index in data}
    return {level: parse_size(size) for level, size in sizes.items() if size}


def cgroup_limits(root: Path, membership: str) -> tuple[float | None, int | None]:
    """Return the (CPUs, bytes of memory) to which cgroups, v1 or v2, limit the process.

    `membership` is the text of /proc/self/cgroup. Limits of parent groups apply, too.
    """
    groups = {group for line in membership.splitlines() for group in _cgroups(root, line)}
    quotas = [quota for group in groups if (quota := _cpu_quota(group)) is not None]
    memory = [int(text) for group in groups if (text := _memory_limit(group)) not in ("", "max")]
    return min(quotas, default=None), min(memory, default=None)


def request_amx() -> bool:
    """Request permission to use the AMX tile registers, for the whole process.

    Linux denies it if a thread has a signal stack (`sigaltstack`) too small for the registers.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.syscall(arch_prctl, request_permission, tile_data) == 0


def detect_gpus() -> tuple[Gpu, ...]:
    """Return the accelerators that torch sees.

    Reading their properties initializes the driver in this process, but creates no context on a
    device (`torch.accelerator.get_memory_info` would).
    """
    import torch

    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return ()
    module = torch.get_device_module(accelerator)
    indices = range(torch.accelerator.device_count())
    if not hasattr(module, "get_device_properties"):  # mps
        return tuple(_gpu(accelerator.type, None, hip=False) for _ in indices)
    hip = torch.version.hip is not None
    return tuple(_gpu(accelerator.type, module.get_device_properties(i), hip) for i in indices)


def resolve(device: str | torch.device = "auto") -> torch.device:
    """Return the device that a setting names, after checking that torch can compute on it.

    This is the only place where a device is chosen. "auto" is the accelerator that torch sees,
    or else the CPU. Other names are torch's: "cpu", "cuda" (also for ROCm), "xpu", "mps" and the
    name of a backend registered as PrivateUse1. An accelerator is returned with its index, so
    that the result equals the `device` of tensors on it: "cuda" becomes `cuda:0`.

    >>> resolve("cpu")
    device(type='cpu')
    """
    import torch

    if str(device) == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        device = accelerator.type if accelerator else "cpu"
    name = str(device)
    kind, colon, index = name.partition(":")
    if kind not in (names := _device_names()) or (colon and not index.isdecimal()):
        raise UnknownName("device", name, ("auto", *names))
    if kind == "cpu":
        return torch.device("cpu")
    module: Any = torch.get_device_module(kind)
    if not module.is_available():
        raise _unavailable(kind)
    if (count := module.device_count()) <= int(index or 0):
        raise IngotError(
            f"device {name}: index out of range, torch sees {count}",
            hint=f"choose {kind}:0" + (f" to {kind}:{count - 1}" if count > 1 else ""),
        )
    if not index and hasattr(module, "current_device"):
        index = module.current_device()
    return torch.device(kind, int(index or 0))


def _device_names() -> list[str]:
    """Return the names of device types that can compute, unlike "meta"."""
    import torch

    backend: str = torch._C._get_privateuse1_backend_name()  # pyright: ignore
    names = ["cpu", "cuda", "xpu", "mps", "hpu", "mtia", backend]
    return [name for name in names if hasattr(getattr(torch, name, None), "is_available")]


def _unavailable(kind: str) -> IngotError:
    """Return the error for a device type that torch knows but cannot use on this machine."""
    import torch

    hidden = [name for name in _VISIBLE if name in os.environ]
    if kind != "cuda":
        return IngotError(
            f"device {kind}: not available to torch {torch.__version__}",
            hint=f"install a build of torch for {kind} and its driver, or choose another device",
        )
    if torch.version.cuda is None and torch.version.hip is None:
        return IngotError(
            f"device cuda: torch {torch.__version__} was built without GPU support",
            hint="install a build of torch for CUDA or ROCm: https://pytorch.org/get-started",
        )
    if hidden:
        return IngotError(
            f"device cuda: torch sees no GPU, and {hidden[0]} is '{os.environ[hidden[0]]}'",
            hint="unset it, or name a GPU in it",
        )
    tool = "rocm-smi" if torch.version.hip else "nvidia-smi"
    return IngotError(
        "device cuda: torch sees no GPU",
        hint=f"check that `{tool}` lists one; if not, install the driver",
    )


def detect_compiler(preferred: str | None) -> Compiler | None:
    """Find a C++ compiler: `preferred` ($CXX) if it is an executable, or else a usual name."""
    for command in filter(None, (preferred, "g++", "clang++", "c++")):
        path = shutil.which(command)
        macros = path and _output([path, "-dM", "-E", "-x", "c++", os.devnull])
        if path and (compiler := parse_compiler(path, macros or "")):
            return compiler
    return None


def parse_compiler(path: str, macros: str) -> Compiler | None:
    """Parse the predefined macros of a compiler; None if it is neither GCC nor clang.

    The output of `--version` is not enough: `false --version` has one, too.

    >>> macros = "#define __GNUC__ 12\\n#define __GNUC_MINOR__ 2\\n#define __GNUC_PATCHLEVEL__ 0"
    >>> parse_compiler("/usr/bin/c++", macros)
    Compiler(path='/usr/bin/c++', name='gcc', version='12.2.0')
    """
    defined = dict(re.findall(r"^#define (\w+) (.*)$", macros, re.MULTILINE))
    # clang also defines the macros of GCC, so it is checked first.
    for name, parts in _COMPILER_VERSIONS.items():
        if defined.keys() >= set(parts):
            return Compiler(path=path, name=name, version=".".join(defined[p] for p in parts))
    return None


def _detect_cpu(capabilities: Mapping[str, Any], quota: float | None) -> Cpu:
    cpuinfo = _read(Path("/proc/cpuinfo"))
    processor = parse_cpuinfo(cpuinfo) if cpuinfo else parse_capabilities(capabilities)
    allowed = os.sched_getaffinity(0) if sys.platform == "linux" else processor.core_of
    cores, threads = count_usable_cores(processor.core_of, allowed, quota)
    flags = processor.flags
    if "amx_tile" in flags and not request_amx():
        flags = frozenset(flag for flag in flags if not flag.startswith("amx"))
    first = min(allowed, default=0)
    caches = read_data_caches(Path(f"/sys/devices/system/cpu/cpu{first}/cache"))
    return Cpu(
        name=processor.name,
        architecture=platform.machine(),
        cores=cores,
        threads=threads,
        isa=limit_isa_tiers(isa_tiers(flags), os.environ.get("INGOT_ISA")),
        int8=tuple(flag for flag in _INT8 if flag in flags),
        l1d=caches.get("1") or capabilities.get("l1d_cache_size"),
        l2=caches.get("2") or capabilities.get("l2_cache_size"),
        l3=caches.get("3") or capabilities.get("l3_cache_size"),
    )


def _gpu(kind: str, properties: Any, hip: bool) -> Gpu:
    capability: str | None = None
    if hip:
        capability = properties.gcnArchName.partition(":")[0]  # "gfx942:sramecc+:xnack-"
    elif hasattr(properties, "major"):
        capability = f"sm_{properties.major}{properties.minor}"
    return Gpu(
        type=kind,
        name=getattr(properties, "name", kind),
        memory=getattr(properties, "total_memory", None),
        capability=capability,
    )


def _cgroups(root: Path, membership: str) -> list[Path]:
    """Return the directories of one line of /proc/self/cgroup, up to the controller's root."""
    _, controllers, path = membership.split(":", 2)
    mounts = [root / name for name in controllers.split(",") if name in ("", "cpu", "memory")]
    parts = Path(path).parts[1:]
    return [mount.joinpath(*parts[:n]) for mount in mounts for n in range(len(parts) + 1)]


def _cpu_quota(group: Path) -> float | None:
    v1 = f"{_read(group / 'cpu.cfs_quota_us')} {_read(group / 'cpu.cfs_period_us')}"
    quota, _, period = (_read(group / "cpu.max") or v1).partition(" ")
    return None if quota in ("", "max", "-1") else int(quota) / int(period)


def _memory_limit(group: Path) -> str:
    return _read(group / "memory.max") or _read(group / "memory.limit_in_bytes")


def _pairs(block: str) -> list[tuple[str, str]]:
    parts = [line.partition(":") for line in block.splitlines()]
    return [(key.strip(), value.strip()) for key, _, value in parts]


def _read(path: Path) -> str:
    """Return the text of a file, or "" if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
