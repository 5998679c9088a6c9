"""Statistics of machine code: resources of a compiled kernel and its instruction mix.

NVIDIA code is disassembled with the tools that ship with Triton (`nvdisasm`, `cuobjdump`). AMD's
compiler emits assembly that ends with the resource usage.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from ingot.core.errors import IngotError

_SASS = re.compile(r"^\s*(?:/\*[0-9a-f]+\*/)?\s*(?:@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]*)", re.M)
_GCN = re.compile(r"^\s+([a-z][a-z0-9_]+)\b(.*)$", re.M)
# The tensor-core mnemonics of each generation: mma, wgmma, tcgen05, MFMA.
_TENSOR_OP = re.compile(r"^(HMMA|IMMA|QMMA|BMMA|HGMMA|QGMMA|IGMMA|UTC[A-Z]*MMA|v_s?mfmac?_)")
_GCN_BITS = {
    **{"dword": 32, "dwordx2": 64, "dwordx3": 96, "dwordx4": 128},
    **{"ushort": 16, "short": 16, "sbyte": 8, "ubyte": 8, "byte": 8},
}
_REINSTALL = "run `pip install --force-reinstall 'ingot[gpu]'`"


@dataclass(frozen=True, kw_only=True)
class CodeStats:
    """Resources and instruction counts of a compiled kernel."""

    registers: int
    spills: int
    """Spill instructions (NVIDIA) or spilled registers (AMD)."""
    loads: dict[int, int] = field(default_factory=dict[int, int])
    """Global loads by width in bits."""
    stores: dict[int, int] = field(default_factory=dict[int, int])
    """Global stores by width in bits."""
    tensor_ops: dict[str, int] = field(default_factory=dict[str, int])
    """Tensor-core instructions by name."""
    async_copies: int = 0
    """Asynchronous copies from global to shared memory."""


def read_cubin(binary: bytes) -> CodeStats:
    """Return the statistics of a kernel for NVIDIA GPUs."""
    with _cubin_file(binary) as path:
        usage = _run_tool("cuobjdump", "-res-usage", path)
        # Without data flow analysis (-ndf) it takes 0.7 of the time.
        sass = _run_tool("nvdisasm", "-c", "-ndf", path)
    registers = re.search(r"REG:(\d+)", usage)
    if registers is None:
        raise IngotError(
            "cuobjdump: no register count in its output",
            hint="report this together with the output of `ingot doctor`",
        )
    return parse_sass(sass, int(registers[1]))


def disassemble(binary: bytes) -> str:
    """Return the disassembly of a kernel for NVIDIA GPUs, with labels."""
    with _cubin_file(binary) as path:
        return _run_tool("nvdisasm", "-c", path)


def parse_sass(text: str, registers: int) -> CodeStats:
    """Return the statistics of disassembled NVIDIA code.

    >>> parse_sass("  /*01b0*/  @P0 LDG.E.128 R8, desc[UR6][R18.64] ;", 32).loads
    {128: 1}
    """
    names = Counter(_SASS.findall(text))
    return CodeStats(
        registers=registers,
        spills=_count(names, "LDL") + _count(names, "STL"),
        loads=_sass_widths(names, "LDG", "LDGSTS"),
        stores=_sass_widths(names, "STG"),
        tensor_ops=_tensor_ops(names),
        async_copies=_count(names, "LDGSTS") + _count(names, "UTMALDG"),
    )


def parse_gcn(text: str) -> CodeStats:
    """Return the statistics of AMD assembly.

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
        loads=_gcn_widths(names, "load"),
        stores=_gcn_widths(names, "store"),
        tensor_ops=_tensor_ops(names),
        async_copies=sum(name.endswith("_lds") or " lds" in rest for name, rest in lines),
    )


def _count(names: Counter[str], mnemonic: str) -> int:
    return sum(count for name, count in names.items() if name.split(".")[0] == mnemonic)


def _tensor_ops(names: Counter[str]) -> dict[str, int]:
    return {name: count for name, count in sorted(names.items()) if _TENSOR_OP.match(name)}


def _sass_widths(names: Counter[str], *mnemonics: str) -> dict[int, int]:
    widths: Counter[int] = Counter()
    for name, count in names.items():
        mnemonic, *flags = name.split(".")
        if mnemonic in mnemonics:
            bits = next((int(f) for f in flags if f in ("64", "128", "256")), 32)
            narrow = next((int(f[1:]) for f in flags if f in ("U8", "S8", "U16", "S16")), bits)
            widths[narrow] += count
    return dict(sorted(widths.items()))


def _gcn_widths(names: Counter[str], direction: str) -> dict[int, int]:
    widths: Counter[int] = Counter()
    for name, count in names.items():
        match = re.fullmatch(rf"(?:global|buffer|flat)_{direction}_(?:lds_)?(\w+)", name)
        if match:
            widths[_GCN_BITS.get(match[1].split("_")[0], 32)] += count
    return dict(sorted(widths.items()))


@contextmanager
def _cubin_file(binary: bytes) -> Generator[str]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        yield file.name


def _run_tool(name: str, *arguments: str) -> str:
    command = [_tool_path(name), *arguments]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise IngotError(f"{name} failed: {run.stderr.strip()[:200]}", hint=_REINSTALL)
    return run.stdout


@cache
def _tool_path(name: str) -> str:
    spec = find_spec("triton")
    package = Path(spec.origin or "").parent if spec else Path()
    path = package / "backends/nvidia/bin" / name
    if not path.exists():
        raise IngotError(f"Triton's installation does not contain {name}", hint=_REINSTALL)
    return str(path)
