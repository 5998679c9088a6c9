from __future__ import annotations

import pytest

from ingot.kernels.triton.target import CHIPS, TARGETS


@pytest.mark.parametrize(
    ("target", "registers", "shared_bytes", "num_warps", "expected"),
    [
        ("sm_80", 32, 0, 8, 1.0),
        ("sm_80", 255, 0, 8, 0.125),  # one program of 8 warps: 65536 // (256 * 32) // 8
        ("sm_90", 128, 0, 4, 0.25),
        ("sm_90", 32, 100 * 1024, 4, 0.125),  # two programs by shared memory
        ("sm_120", 32, 0, 4, 1.0),  # 48 warps, 12 programs
        ("gfx942", 64, 0, 4, 1.0),  # 512 // 64 = 8 waves on each of 4 SIMDs
        ("gfx942", 128, 0, 4, 0.5),
        ("gfx942", 128, 64 * 1024, 4, 0.125),
    ],
)
def test_occupancy(
    target: str, registers: int, shared_bytes: int, num_warps: int, expected: float
) -> None:
    assert TARGETS[target].occupancy(registers, shared_bytes, num_warps) == expected


def test_roofline_time_is_the_larger_of_traffic_and_arithmetic() -> None:
    chip = CHIPS["A100"]
    assert chip.seconds(2_039_000_000, 0) == pytest.approx(1e-3)
    assert chip.seconds(0, 312_000_000_000) == pytest.approx(1e-3)
    assert chip.bound_by(2_039_000_000, 1) == "bandwidth"
    assert chip.bound_by(1, 312_000_000_000) == "tensor cores"
