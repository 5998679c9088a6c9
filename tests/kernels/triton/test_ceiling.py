from __future__ import annotations

import pytest

from ingot.kernels.triton.ceiling import ceiling

LOOP = """
 BRA `(.L_x_0) ;
.L_x_1:
 LDGSTS.E.BYPASS.128 [R99], desc[UR14][R10.64], P6 ;
{instructions}
 @!P6 BRA `(.L_x_1) ;
.L_x_0:
 HGMMA.64x256x16.F32.BF16 R24, gdesc[UR8], R24 ;
"""


def loop(*instructions: str) -> str:
    return LOOP.format(instructions="\n".join(f" {line} ;" for line in instructions))


def test_instructions_outside_of_loops_do_not_count() -> None:
    bound = ceiling(loop("HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24"), 4, 64 * 128 * 16)
    assert (bound.mma_instructions, bound.async_copies, bound.fraction) == (1, 1, 1.0)


def test_narrow_instruction_is_limited_by_shared_memory() -> None:
    # 16 clocks of arithmetic, 24 of reading 3072 bytes; from registers 8 of reading.
    shared = ceiling(loop("HGMMA.64x32x16.F32.BF16 R24, gdesc[UR8], R24"), 4, 64 * 32 * 16)
    assert shared.fraction == pytest.approx(16 / 24)
    registers = ceiling(loop("HGMMA.64x32x16.F32.BF16 R24, R88, gdesc[UR8]"), 4, 64 * 32 * 16)
    assert registers.fraction == 1.0


def test_redundant_instructions_lower_the_ceiling() -> None:
    instruction = "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24"
    assert ceiling(loop(instruction), 8, 64 * 128 * 16).fraction == 0.5


def test_kernel_without_tensor_core_instructions_has_ceiling_zero() -> None:
    assert ceiling("", 4, 1).fraction == 0.0
