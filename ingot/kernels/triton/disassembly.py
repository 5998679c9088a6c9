"""Reads machine code: what a compiled kernel uses, and which instructions it is made of.

NVIDIA's is disassembled by the tools that come with Triton (`nvdisasm`, `cuobjdump`); AMD's
compiler leaves its assembly behind, with the resources written at its end.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from ingot.core.errors import IngotError

_SASS = re.compile(r"^\s*(?:/\*[0-9a-f]+\*/)?\s*(?:@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]*)", re.M)
_GCN = re.compile(r"^\s+([a-z][a-z0-9_]+)\b(.*)$", re.M)
# One a word of the matrix unit: mma, wgmma, tcgen05, MFMA.
_TENSOR = re.compile(r"^(HMMA|IMMA|QMMA|BMMA|HGMMA|QGMMA|IGMMA|UTC[A-Z]*MMA|v_s?mfmac?_)")
_BITS = {
    **{"dword": 32, "dwordx2": 64, "dwordx3": 96, "dwordx4": 128},
    **{"ushort": 16, "short": 16, "sbyte": 8, "ubyte": 8, "byte": 8},
}


@dataclass(frozen=True, kw_only=True)
class CodeStats:
    """What is in a compiled kernel."""

    registers: int
    spills: int
    """Instructions that move registers to memory and back (NVIDIA), registers so moved (AMD)."""
    loads: dict[int, int] = field(default_factory=dict[int, int])
    """Instructions that read global memory, by their width in bits; likewise those that write."""
    stores: dict[int, int] = field(default_factory=dict[int, int])
    tensor_ops: dict[str, int] = field(default_factory=dict[str, int])
    """Instructions of the tensor cores by name."""
    async_copies: int = 0
    """Instructions that copy global into shared memory asynchronously."""


def read_cubin(binary: bytes) -> CodeStats:
    """What is in a kernel for NVIDIA's GPUs."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        usage = _tool("cuobjdump", "-res-usage", file.name)
        text = _tool("nvdisasm", "-c", "-ndf", file.name)  # without data flow in 0.7 of the time
    found = re.search(r"REG:(\d+)", usage)
    if found is None:
        raise IngotError("cuobjdump names no registers", hint="report this with your Triton")
    return parse_sass(text, int(found[1]))


def parse_sass(text: str, registers: int) -> CodeStats:
    """What is in the disassembly of a kernel.

    >>> parse_sass("  /*01b0*/  @P0 LDG.E.128 R8, desc[UR6][R18.64] ;", 32).loads
    {128: 1}
    """
    names = Counter(_SASS.findall(text))
    return CodeStats(
        registers=registers,
        spills=_count(names, "LDL") + _count(names, "STL"),
        loads=_widths(names, "LDG", "LDGSTS"),
        stores=_widths(names, "STG"),
        tensor_ops=_tensor(names),
        async_copies=_count(names, "LDGSTS") + _count(names, "UTMALDG"),
    )


def parse_gcn(text: str) -> CodeStats:
    """What is in the assembly of a kernel for AMD's GPUs.

    >>> parse_gcn("\\tv_mfma_f32_32x32x8_bf16 a[0:15], v[0:1], v[2:3], 0\\n").tensor_ops
    {'v_mfma_f32_32x32x8_bf16': 1}
    """
    lines = _GCN.findall(text)
    names = Counter(name for name, _ in lines)
    resources = dict(re.findall(r"\.(\w+_count):\s+(\d+)", text))
    return CodeStats(
        registers=int(resources.get("vgpr_count", 0)),
        # Scalar registers spill into lanes of vector registers, not into memory.
        spills=int(resources.get("vgpr_spill_count", 0)),
        loads=_dwords(names, "load"),
        stores=_dwords(names, "store"),
        tensor_ops=_tensor(names),
        async_copies=sum(name.endswith("_lds") or " lds" in rest for name, rest in lines),
    )


def _count(names: Counter[str], mnemonic: str) -> int:
    return sum(count for name, count in names.items() if name.split(".")[0] == mnemonic)


def _tensor(names: Counter[str]) -> dict[str, int]:
    return {name: count for name, count in sorted(names.items()) if _TENSOR.match(name)}


def _widths(names: Counter[str], *mnemonics: str) -> dict[int, int]:
    found: Counter[int] = Counter()
    for name, count in names.items():
        mnemonic, *flags = name.split(".")
        if mnemonic in mnemonics:
            bits = next((int(f) for f in flags if f in ("64", "128", "256")), 32)
            narrow = next((int(f[1:]) for f in flags if f in ("U8", "S8", "U16", "S16")), bits)
            found[narrow] += count
    return dict(sorted(found.items()))


def _dwords(names: Counter[str], direction: str) -> dict[int, int]:
    found: Counter[int] = Counter()
    for name, count in names.items():
        match = re.fullmatch(rf"(?:global|buffer|flat)_{direction}_(?:lds_)?(\w+)", name)
        if match:
            found[_BITS.get(match[1].split("_")[0], 32)] += count
    return dict(sorted(found.items()))


def _tool(name: str, *arguments: str) -> str:
    run = subprocess.run([_path(name), *arguments], capture_output=True, text=True, check=False)
    if run.returncode:
        raise IngotError(
            f"{name} fails: {run.stderr.strip()[:200]}", hint="pip install --force 'ingot[gpu]'"
        )
    return run.stdout


@cache
def _path(name: str) -> str:
    found = find_spec("triton")
    home = Path(found.origin or "").parent if found else Path()
    path = home / "backends/nvidia/bin" / name
    if not path.exists():
        raise IngotError(f"Triton came without {name}", hint="pip install --force 'ingot[gpu]'")
    return str(path)
