"""Runs tests of real processes again that have failed, one after another.

    python -m tools.rerun

after a whole run of pytest. Such tests have deadlines, which a machine that stalls for a moment
misses. If a few of them failed and nothing else did, each has a second chance, alone, and is named
in the output. Tests of bits and of pure functions have none: those that fail sometimes have found a
race.
"""

# ruff: noqa: T201
from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

FAILED = Path(".pytest_cache/v/cache/lastfailed")
AT_MOST = 3
FOLDERS = ("bench", "benchmarks", "cli", "serving", "workflows")


def can_rerun(tests: Sequence[str]) -> bool:
    """Return whether these failures may come from a stall of the machine.

    >>> can_rerun(["tests/serving/test_device.py::test_restart[2]"])
    True
    >>> can_rerun(["tests/kernels/test_linear.py::test_bits"])
    False
    >>> can_rerun([]), can_rerun(["tests/cli/test_train.py"])
    (False, False)
    """
    folders = [Path(test.partition("::")[0]).parts[:2] for test in tests if "::" in test]
    timed = all(len(f) == 2 and f[0] == "tests" and f[1] in FOLDERS for f in folders)
    return 0 < len(tests) == len(folders) <= AT_MOST and timed


def main() -> int:
    """Run the tests that failed again, and return the exit code."""
    tests: list[str] = list(json.loads(FAILED.read_text())) if FAILED.exists() else []
    if not can_rerun(tests):
        return 1
    print("\nThese failed, and run again, alone:", *tests, sep="\n  ", flush=True)
    code = subprocess.run([sys.executable, "-m", "pytest", *tests]).returncode
    if code == 0:
        print("\nFLAKY, they passed the second time:", *tests, sep="\n  ")
    return code


if __name__ == "__main__":
    sys.exit(main())
