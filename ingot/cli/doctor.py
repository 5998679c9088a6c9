"""`ingot doctor`: the machine, its measured peaks, and issues."""

from __future__ import annotations

import json as json_format
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

import tyro

import ingot
from ingot.cli.tables import new_grid
from ingot.core.device import Device, detect
from ingot.core.log import stdout
from ingot.kernels.triton import MIN_CAPABILITY, supported
from ingot.kernels.triton.target import TARGETS

if TYPE_CHECKING:
    from ingot.bench.peaks import Peak, Peaks

_SHOWN_VERSIONS = ("torch", "triton", "numpy")
_TESTED_TORCH = "2.13"


@dataclass(frozen=True)
class Issue:
    """Something missing or unusual, and what to do about it."""

    message: str
    hint: str


def doctor(
    json: tyro.conf.FlagCreatePairsOff[bool] = False,
    refresh: tyro.conf.FlagCreatePairsOff[bool] = False,
) -> None:
    """Show versions, CPU, memory, GPUs and compiler, the machine's measured peaks, and issues with
    hints.

    The peaks are measured once and cached until the machine changes.

    Examples: `ingot doctor`, `ingot doctor --refresh` to measure again, `ingot doctor --json`
    for scripts.

    Args:
        json: Print JSON instead of text.
        refresh: Measure the peaks again even if they are cached.
    """
    from ingot.bench.machine import peaks

    device, measured = detect(), peaks(refresh)
    issues = find_issues(device, measured, _installed())
    if json:
        print(json_format.dumps(report(device, measured, issues), indent=2))  # noqa: T201
    else:
        _print_screen(device, measured, issues)


def report(device: Device, measured: Peaks, issues: list[Issue]) -> dict[str, Any]:
    """Return everything that `--json` prints."""
    matmul = measured.matmul
    return {
        "versions": _versions(),
        "fingerprint": device.fingerprint,
        **asdict(device),
        "measured": measured.measured.isoformat(timespec="seconds"),
        "read_bandwidth_gbs": measured.read_bandwidth.value,
        "matmul_gflops": {dtype: peak and peak.value for dtype, peak in matmul.items()},
        "spread": {
            "read_bandwidth_gbs": [measured.read_bandwidth.low, measured.read_bandwidth.high],
            "matmul_gflops": {
                dtype: peak and [peak.low, peak.high] for dtype, peak in matmul.items()
            },
        },
        "issues": [asdict(issue) for issue in issues],
    }


def find_issues(device: Device, measured: Peaks, installed: frozenset[str]) -> list[Issue]:
    """List the issues of this machine; `installed` names packages and programs."""
    checks = (
        *_software_issues(device),
        *_cpu_issues(device, measured),
        *_gpu_issues(device, installed),
    )
    return [Issue(message, hint) for applies, message, hint in checks if applies]


_Check = tuple[bool, str, str]
"""Whether an issue applies, its message and its hint."""


def _software_issues(device: Device) -> Iterator[_Check]:
    cxx, isa = os.environ.get("CXX", ""), os.environ.get("INGOT_ISA", "")
    yield (
        not device.torch.startswith(_TESTED_TORCH),
        f"torch {device.torch} is not the version that ingot is tested with",
        f"pip install 'torch=={_TESTED_TORCH}.*'",
    )
    yield (
        device.compiler is None,
        "no C++ compiler: ops fall back to PyTorch, which is not batch-invariant",
        "install g++ 12 or newer, or set CXX",
    )
    yield (
        bool(isa),
        f"INGOT_ISA restricts the CPU kernels to the tier {isa}",
        "unset it, unless you compare tiers",
    )
    yield (
        bool(cxx) and (device.compiler is None or shutil.which(cxx) != device.compiler.path),
        f"CXX is '{cxx}', which is not a C++ compiler",
        "set it to the path of a compiler, without arguments, or unset it",
    )


def _cpu_issues(device: Device, measured: Peaks) -> Iterator[_Check]:
    speeds = {"reading": measured.read_bandwidth, **measured.matmul}
    unsteady = [name for name, peak in speeds.items() if peak and peak.typical < 0.7 * peak.value]
    yield (
        device.cpu.architecture in ("x86_64", "AMD64") and device.cpu.isa == ("portable",),
        "the CPU does not report AVX2",
        "if this is a virtual machine, give it the host's CPU model",
    )
    yield (
        _threads() < device.cpu.cores,
        f"torch uses {_threads()} of {device.cpu.cores} cores",
        "unset OMP_NUM_THREADS, or do not call torch.set_num_threads",
    )
    yield (
        bool(unsteady),
        f"the machine was busy while measuring: {', '.join(unsteady)} reached the peak rarely",
        "stop other programs, then run `ingot doctor --refresh`",
    )


def _gpu_issues(device: Device, installed: frozenset[str]) -> Iterator[_Check]:
    old = [gpu.name for gpu in device.gpus if not supported(gpu.capability)]
    untuned = [
        f"{gpu.name} ({gpu.capability})"
        for gpu in device.gpus
        if gpu.name not in old and gpu.capability and gpu.capability not in TARGETS
    ]
    yield (
        not device.gpus and "nvidia-smi" in installed,
        "there is an NVIDIA driver, but torch sees no GPU",
        "install a CUDA build of torch",
    )
    yield (
        not device.gpus and "rocm-smi" in installed,
        "there is an AMD driver, but torch sees no GPU",
        "install a ROCm build of torch",
    )
    yield (
        bool(old),
        f"{', '.join(old)}: too old for Triton, ops fall back to PyTorch",
        f"use a GPU of sm_{MIN_CAPABILITY} or newer",
    )
    yield (
        bool(untuned),
        f"{', '.join(untuned)}: the GPU kernels have no configurations for this architecture",
        "run `ingot tune`",
    )
    yield (
        bool(device.gpus) and "triton" not in installed,
        "Triton is not installed: ops on the GPU fall back to PyTorch",
        "pip install 'ingot[gpu]'",
    )


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def _installed() -> frozenset[str]:
    packages = {name for name in _SHOWN_VERSIONS if _version(name)}
    return frozenset(packages | {name for name in ("nvidia-smi", "rocm-smi") if shutil.which(name)})


def _versions() -> dict[str, str | None]:
    known = {"ingot": ingot.__version__, "python": platform.python_version()}
    return known | {name: _version(name) for name in _SHOWN_VERSIONS}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _print_screen(device: Device, measured: Peaks, issues: list[Issue]) -> None:
    console = stdout()
    console.print(new_grid([*_facts(device), ("", ""), *_speeds(measured)]), highlight=False)
    console.print()
    for issue in issues:
        console.print(f"[bold yellow]![/] {issue.message}\n  hint: {issue.hint}", highlight=False)
    if not issues:
        console.print("[bold green]no issues found[/]")


def _facts(device: Device) -> list[tuple[str, str]]:
    cpu, compiler = device.cpu, device.compiler
    caches = (("L1d", cpu.l1d), ("L2", cpu.l2), ("L3", cpu.l3))
    versions = ", ".join(f"{name} {version}" for name, version in _versions().items() if version)
    return [
        ("versions", versions),
        ("system", f"{device.system} {cpu.architecture}, fingerprint {device.fingerprint}"),
        ("CPU", f"{cpu.name}, {cpu.cores} cores, {cpu.threads} threads"),
        ("ISA tiers", " > ".join(cpu.isa) + (f"; int8: {', '.join(cpu.int8)}" if cpu.int8 else "")),
        ("caches", ", ".join(f"{name} {_size(size)}" for name, size in caches if size)),
        ("memory", _size(device.memory)),
        ("GPUs", ", ".join(f"{gpu.name} ({gpu.capability})" for gpu in device.gpus) or "none"),
        ("compiler", f"{compiler.name} {compiler.version}" if compiler else "none"),
    ]


def _speeds(measured: Peaks) -> list[tuple[str, str]]:
    when = measured.measured.astimezone().strftime("%Y-%m-%d %H:%M")
    rows = [("measured", f"{when} (measure again with --refresh)")]
    rows.append(("reading", _speed(measured.read_bandwidth, "GB/s", 1)))
    for dtype, peak in measured.matmul.items():
        text = _speed(peak, "GFLOPS", 0) if peak else f"none: {measured.missing[dtype]}"
        rows.append((f"{dtype} matmul", text))
    return rows


def _speed(peak: Peak, unit: str, digits: int) -> str:
    value, low, high = (f"{rate:,.{digits}f}" for rate in (peak.value, peak.low, peak.high))
    return f"{value} {unit} at peak, usually {low} to {high}"


def _size(size: int) -> str:
    """Format a size in binary units: 48 KiB, 2 MiB, 23.54 GiB."""
    units = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
    unit, one = next((unit for unit in units.items() if size >= unit[1]), ("B", 1))
    return f"{size / one:.4g} {unit}"
