"""`ingot doctor`: what this machine is and can do."""

from __future__ import annotations

import json as json_format
import os
import platform
import shutil
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

import tyro

import ingot
from ingot.core.device import Device, detect
from ingot.core.log import stdout
from ingot.kernels.triton import OLDEST, supported
from ingot.kernels.triton.target import TARGETS

if TYPE_CHECKING:
    from ingot.bench.peaks import Peak, Peaks

_SHOWN_VERSIONS = ("torch", "triton", "numpy")
_TESTED_TORCH = "2.13"


@dataclass(frozen=True)
class Finding:
    """Something missing or odd, and what to do about it."""

    what: str
    hint: str


def doctor(
    json: tyro.conf.FlagCreatePairsOff[bool] = False,
    refresh: tyro.conf.FlagCreatePairsOff[bool] = False,
) -> None:
    """Show versions, processor, memory, GPUs and compiler, the machine's measured peaks, and
    what is missing or odd.

    The peaks are measured once and kept until something about the machine changes.

    Examples: `ingot doctor`, `ingot doctor --refresh` to measure again, `ingot doctor --json`
    for machines.

    Args:
        json: Print JSON instead of a screen.
        refresh: Measure the peaks again, though they are known.
    """
    from ingot.bench.peaks import peaks

    device, measured = detect(), peaks(refresh)
    found = findings(device, measured, _installed())
    if json:
        print(json_format.dumps(report(device, measured, found), indent=2))  # noqa: T201
    else:
        _print_screen(device, measured, found)


def report(device: Device, measured: Peaks, found: list[Finding]) -> dict[str, Any]:
    """All of it, as `--json` prints it."""
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
        "findings": [asdict(finding) for finding in found],
    }


def findings(device: Device, measured: Peaks, installed: frozenset[str]) -> list[Finding]:
    """What is missing or odd on this machine; `installed` names packages and programs."""
    cxx, isa = os.environ.get("CXX", ""), os.environ.get("INGOT_ISA", "")
    speeds = {"reading": measured.read_bandwidth, **measured.matmul}
    old = [gpu.name for gpu in device.gpus if not supported(gpu.capability)]
    new = [
        f"{gpu.name} ({gpu.capability})"
        for gpu in device.gpus
        if gpu.name not in old and gpu.capability and gpu.capability not in TARGETS
    ]
    unsteady = [name for name, peak in speeds.items() if peak and peak.typical < 0.7 * peak.value]
    checks = (
        (
            not device.torch.startswith(_TESTED_TORCH),
            f"torch {device.torch} is not the version ingot is tested with",
            f"pip install 'torch=={_TESTED_TORCH}.*'",
        ),
        (
            device.compiler is None,
            "no C++ compiler: PyTorch stands in for ingot's kernels, inexactly",
            "install g++ 12 or newer, or set CXX",
        ),
        (
            bool(isa),
            f"INGOT_ISA holds ingot's CPU kernels to the tier {isa}",
            "unset it, unless you want to compare",
        ),
        (
            bool(cxx) and (device.compiler is None or shutil.which(cxx) != device.compiler.path),
            f"CXX is '{cxx}', which is no C++ compiler",
            "set it to the path of one, without arguments, or unset it",
        ),
        (
            device.cpu.architecture in ("x86_64", "AMD64") and device.cpu.isa == ("portable",),
            "the processor shows no AVX2",
            "if this is a virtual machine, give it the host's CPU model",
        ),
        (
            _threads() < device.cpu.cores,
            f"torch uses {_threads()} of {device.cpu.cores} cores",
            "unset OMP_NUM_THREADS, or do not call torch.set_num_threads",
        ),
        (
            not device.gpus and "nvidia-smi" in installed,
            "there is an NVIDIA driver, but torch sees no GPU",
            "install a CUDA build of torch",
        ),
        (
            not device.gpus and "rocm-smi" in installed,
            "there is an AMD driver, but torch sees no GPU",
            "install a ROCm build of torch",
        ),
        (
            bool(old),
            f"{', '.join(old)}: too old for Triton, PyTorch stands in for ingot's GPU kernels",
            f"use a GPU of sm_{OLDEST} or newer",
        ),
        (
            bool(new),
            f"{', '.join(new)}: ingot's GPU kernels have no configurations of their own for it",
            "`ingot tune` finds some",
        ),
        (
            bool(device.gpus) and "triton" not in installed,
            "a GPU without Triton: PyTorch stands in for ingot's GPU kernels",
            "pip install 'ingot[gpu]'",
        ),
        (
            bool(unsteady),
            f"measured beside other work: {', '.join(unsteady)} reached the peak only at times",
            "close what else is running, then `ingot doctor --refresh`",
        ),
    )
    return [Finding(what, hint) for odd, what, hint in checks if odd]


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


def _print_screen(device: Device, measured: Peaks, found: list[Finding]) -> None:
    from rich.table import Table

    table = Table.grid(padding=(0, 3))
    table.add_column(style="bold", no_wrap=True)
    for name, text in _facts(device):
        table.add_row(name, text)
    table.add_row("", "")
    for name, text in _speeds(measured):
        table.add_row(name, text)
    console = stdout()
    console.print(table, highlight=False)
    console.print()
    for finding in found:
        console.print(f"[bold yellow]![/] {finding.what}\n  hint: {finding.hint}", highlight=False)
    if not found:
        console.print("[bold green]nothing missing, nothing odd[/]")


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
    rows = [("measured", f"{when}; --refresh measures again")]
    rows.append(("reading", _speed(measured.read_bandwidth, "GB/s", 1)))
    for dtype, peak in measured.matmul.items():
        text = _speed(peak, "GFLOPS", 0) if peak else f"none: {measured.missing[dtype]}"
        rows.append((f"{dtype} matmul", text))
    return rows


def _speed(peak: Peak, unit: str, digits: int) -> str:
    value, low, high = (f"{rate:,.{digits}f}" for rate in (peak.value, peak.low, peak.high))
    return f"{value} {unit} at best, usually {low} to {high}"


def _size(size: int) -> str:
    """A size in binary units: 48 KiB, 2 MiB, 23.54 GiB."""
    units = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
    unit, one = next((found for found in units.items() if size >= found[1]), ("B", 1))
    return f"{size / one:.4g} {unit}"
