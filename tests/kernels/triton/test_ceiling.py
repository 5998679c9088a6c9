from __future__ import annotations

import pytest

from ingot.kernels.triton.ceiling import ceiling

LOOP = """
 BRA `(.L_x_0) ;
.L_x_1:
 LDGSTS.E.BYPASS.128 [R99], desc[UR14][R10.64], P6 ;
{products}
 @!P6 BRA `(.L_x_1) ;
.L_x_0:
 HGMMA.64x256x16.F32.BF16 R24, gdesc[UR8], R24 ;
"""


def loop(*products: str) -> str:
    return LOOP.format(products="\n".join(f" {product} ;" for product in products))


def test_what_is_outside_of_loops_does_not_count() -> None:
    found = ceiling(loop("HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24"), 4, 64 * 128 * 16)
    assert (found.products, found.async_copies, found.share) == (1, 1, 1.0)


def test_a_narrow_product_waits_for_its_operands() -> None:
    # 16 clocks of arithmetic, 24 of reading 3072 bytes; from registers 8 of reading.
    shared = ceiling(loop("HGMMA.64x32x16.F32.BF16 R24, gdesc[UR8], R24"), 4, 64 * 32 * 16)
    assert shared.share == pytest.approx(16 / 24)
    registers = ceiling(loop("HGMMA.64x32x16.F32.BF16 R24, R88, gdesc[UR8]"), 4, 64 * 32 * 16)
    assert registers.share == 1.0


def test_what_is_computed_twice_counts_once() -> None:
    product = "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24"
    assert ceiling(loop(product), 8, 64 * 128 * 16).share == 0.5


def test_a_kernel_without_products_reaches_nothing() -> None:
    assert ceiling("", 4, 1).share == 0.0
