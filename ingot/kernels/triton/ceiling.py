"""Upper bound on the tensor-core utilization of a GEMM main loop, read from its sm_90 code.

Two losses are visible in the code. First, an instruction reads its operands from shared memory at
128 bytes per clock, while the tensor cores of an SM perform 2048 multiply-adds per clock (989.4
TFLOPS / 132 SMs / 1.83 GHz): narrow instructions wait for their operands. Second, instructions may
compute values that are not needed, or the same values twice. Losses that the code does not show
(global memory latency, exponentials between the dots, loop prologues) are ignored, so the result is
an upper bound.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_MULTIPLY_ADDS = 2048  # per clock and SM
_SHARED_BYTES = 128  # per clock and SM
_WARPS_PER_GROUP = 4  # warps that execute one HGMMA together
_HGMMA = re.compile(r"\bHGMMA\.(\d+)x(\d+)x(\d+)\.\S+ R\w+, (gdesc|R)")
_LABEL = re.compile(r"^(\.L_x_\d+):", re.M)
_BRANCH = re.compile(r"\bBRA `\((\.L_x_\d+)\)")


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """The innermost loop with the most tensor-core instructions, and its utilization bound."""

    mma_instructions: int
    """Tensor-core instructions that a warp group issues per iteration."""
    async_copies: int
    """Asynchronous copies that a thread issues per iteration."""
    fraction: float
    """Upper bound as a fraction of the tensor cores' peak."""


def ceiling(sass: str, num_warps: int, multiply_adds: int) -> Ceiling:
    """Return the bound for a disassembled kernel whose loop needs this many multiply-adds.

    >>> loop = ".L_x_1:\\n HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24 ;\\n BRA `(.L_x_1) ;"
    >>> ceiling(loop, num_warps=4, multiply_adds=64 * 128 * 16).fraction
    1.0
    """
    body = max(_loops(sass), key=lambda text: len(_HGMMA.findall(text)), default="")
    instructions = _HGMMA.findall(body)
    clocks = 0.0
    for *shape, left_operand in instructions:
        m, n, k = map(int, shape)
        operand_bytes = 2 * n * k + (2 * m * k if left_operand == "gdesc" else 0)
        clocks += max(m * n * k / _MULTIPLY_ADDS, operand_bytes / _SHARED_BYTES)
    num_groups = num_warps // _WARPS_PER_GROUP
    fraction = multiply_adds / (clocks * num_groups * _MULTIPLY_ADDS) if clocks else 0.0
    return Ceiling(
        mma_instructions=len(instructions),
        async_copies=len(re.findall(r"\bLDGSTS\b", body)),
        fraction=min(fraction, 1.0),
    )


def _loops(sass: str) -> list[str]:
    """Return the text of each innermost loop, from its label to the branch back to it."""
    labels = {match[1]: match.start() for match in _LABEL.finditer(sass)}
    spans = [
        (labels[match[1]], match.end())
        for match in _BRANCH.finditer(sass)
        if labels.get(match[1], len(sass)) < match.start()
    ]
    return [
        sass[a:b]
        for a, b in spans
        if not any(a <= c and d <= b and (c, d) != (a, b) for c, d in spans)
    ]
