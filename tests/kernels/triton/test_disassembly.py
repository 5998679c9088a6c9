from __future__ import annotations

from ingot.kernels.triton.disassembly import parse_gcn, parse_sass

SASS = """
        /*0180*/               @P1 LDG.E.128 R12, desc[UR6][R18.64] ;
        /*0190*/                   LDG.E.U16 R12, desc[UR6][R18.64] ;
        /*01b0*/               @!P0 STG.E.64 desc[UR6][R18.64+0x1000], R8 ;
        /*01c0*/                   LDGSTS.E.BYPASS.128 [R1], desc[UR6][R2.64] ;
        /*01d0*/                   STL.64 [R1+0x8], R2 ;
        /*01e0*/                   LDL R2, [R1] ;
        /*01f0*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24, gsb0 ;
        /*0200*/              @UP0 UTMALDG.2D [UR8], [UR4] ;
        /*0210*/                   UTCHMMA gdesc[UR8], gdesc[UR10], tmem[UR9], tmem[UR12] ;
"""
GCN = """
\tglobal_load_dwordx4 v[0:3], v[4:5], off
\tbuffer_load_dwordx4 v5, s[0:3], 0 offen lds
\tbuffer_store_short v1, v2, s[0:3], 0 offen
\tv_mfma_f32_32x32x8_bf16 a[0:15], v[0:1], v[2:3], a[0:15]
    .sgpr_spill_count: 7
    .vgpr_count:     58
    .vgpr_spill_count: 3
"""


def test_sass_statistics() -> None:
    stats = parse_sass(SASS, 40)
    assert (stats.registers, stats.spills, stats.async_copies) == (40, 2, 2)
    assert stats.loads == {16: 1, 128: 2}
    assert stats.stores == {64: 1}
    assert stats.tensor_ops == {"HGMMA.64x128x16.F32.BF16": 1, "UTCHMMA": 1}


def test_gcn_statistics() -> None:
    stats = parse_gcn(GCN)
    assert (stats.registers, stats.spills, stats.async_copies) == (58, 3, 1)
    assert stats.loads == {128: 2}
    assert stats.stores == {16: 1}
    assert list(stats.tensor_ops) == ["v_mfma_f32_32x32x8_bf16"]
