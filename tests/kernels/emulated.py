"""Tests of an ISA tier whose instructions this processor lacks, with them emulated in software.

    python -m tests.kernels.emulated amx tests/kernels/test_batch_invariance.py
    python -m tests.kernels.emulated avx512_bf16 tests/kernels -k blocked

emulated.h replaces the instructions of AMX and AVX512-BF16; the kernels around them are those that
ship. The remaining arguments are pytest's. Nothing is run if the processor has the tier, which its
own tests cover, or if it lacks AVX-512, which is not emulated.
"""

from __future__ import annotations

import os
import sys
import zlib
from pathlib import Path

from ingot.core import device
from ingot.kernels.cpu.build import TIER_FLAGS

HEADER = Path(__file__).with_name("emulated.h")
TIERS = tuple(TIER_FLAGS)
_emulated = os.environ.get("INGOT_EMULATED")

if _emulated:  # as a plugin of pytest, also in the processes of xdist
    _tiers = TIERS[: TIERS.index(_emulated) + 1][::-1]
    device.isa_tiers = lambda flags: _tiers


def main() -> int:
    """Run pytest with a tier emulated."""
    tier, *arguments = sys.argv[1:]
    if tier not in TIERS[4:]:
        sys.exit(f"expected one of {', '.join(TIERS[4:])}, got '{tier}'")
    own = device.detect().cpu.isa
    if tier in own:
        return skip(f"this processor has {tier}")
    if "avx512_vnni" not in own:
        return skip("this processor lacks AVX-512 or VNNI")
    os.environ["INGOT_EMULATED"] = os.environ["INGOT_ISA"] = tier
    checksum = zlib.crc32(HEADER.read_bytes())  # in the name of the built library
    os.environ["INGOT_CXXFLAGS"] = f"-include {HEADER} -DINGOT_EMULATED={checksum}"
    command = [sys.executable, "-m", "pytest", "-p", "tests.kernels.emulated", *arguments]
    os.execv(sys.executable, command)


def skip(reason: str) -> int:
    """Say why nothing is run."""
    sys.stdout.write(f"skipped: {reason}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
