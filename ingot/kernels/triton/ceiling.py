"""How much of the tensor cores' peak the main loop of a product could reach, on sm_90.

Two things lower it that the code shows. An instruction reads its operands from shared memory, 128
bytes a clock, while the tensor cores of a multiprocessor do 2048 multiply-adds a clock (989.4
TFLOPS over 132 of them at 1.83 GHz): narrow instructions wait for their operands. And instructions
may compute what is not needed, or the same thing twice. What the code does not show, waiting for
global memory, exponentials between the products, the ends of loops, is left out: so it is a
ceiling.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass

from ingot.kernels.triton.disassembly import _tool as tool  # pyright: ignore[reportPrivateUsage]

_MULTIPLY_ADDS = 2048  # a clock and multiprocessor
_SHARED_BYTES = 128  # a clock and multiprocessor
_GROUP = 4  # warps that multiply together
_PRODUCT = re.compile(r"\bHGMMA\.(\d+)x(\d+)x(\d+)\.\S+ R\w+, (gdesc|R)")
_LABEL = re.compile(r"^(\.L_x_\d+):", re.M)
_BRANCH = re.compile(r"\bBRA `\((\.L_x_\d+)\)")


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """Of the innermost loop with the most products."""

    products: int
    """Instructions of the tensor cores that a warp group issues in an iteration."""
    async_copies: int
    """Asynchronous copies that a thread starts in an iteration."""
    share: float
    """Of the peak."""


def disassemble(binary: bytes) -> str:
    """The text of a kernel for NVIDIA's GPUs."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        return tool("nvdisasm", "-c", file.name)


def ceiling(sass: str, warps: int, needed: int) -> Ceiling:
    """What a disassembled kernel could reach, if an iteration needs so many multiply-adds.

    >>> loop = ".L_x_1:\\n HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24 ;\\n BRA `(.L_x_1) ;"
    >>> ceiling(loop, warps=4, needed=64 * 128 * 16).share
    1.0
    """
    body = max(_loops(sass), key=lambda text: len(_PRODUCT.findall(text)), default="")
    products = _PRODUCT.findall(body)
    clocks = 0.0
    for rows, columns, inner, left in products:
        m, n, k = int(rows), int(columns), int(inner)
        read = 2 * n * k + (2 * m * k if left == "gdesc" else 0)
        clocks += max(m * n * k / _MULTIPLY_ADDS, read / _SHARED_BYTES)
    groups = warps // _GROUP
    share = needed / (clocks * groups * _MULTIPLY_ADDS) if clocks else 0.0
    return Ceiling(
        products=len(products),
        async_copies=len(re.findall(r"\bLDGSTS\b", body)),
        share=min(share, 1.0),
    )


def _loops(sass: str) -> list[str]:
    """The text of each loop: from a label to the branch back to it, the innermost ones."""
    sites = {match[1]: match.start() for match in _LABEL.finditer(sass)}
    spans = [
        (sites[match[1]], match.end())
        for match in _BRANCH.finditer(sass)
        if sites.get(match[1], len(sass)) < match.start()
    ]
    return [
        sass[a:b]
        for a, b in spans
        if not any(a <= c and d <= b and (c, d) != (a, b) for c, d in spans)
    ]
