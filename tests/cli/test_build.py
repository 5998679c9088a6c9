from __future__ import annotations

import json
from pathlib import Path

import pytest

from ingot.core.device import detect
from tests.cli.conftest import Run

pytestmark = pytest.mark.skipif(detect().compiler is None, reason="no C++ compiler")


def test_output_lists_built_and_existing_kernels(ingot: Run, tmp_path: Path) -> None:
    first, second = (ingot("build", "activation", INGOT_ISA="portable") for _ in range(2))
    assert first.returncode == second.returncode == 0, first.stderr
    assert "activation   built in " in first.stdout
    assert "1 built, 0 up to date" in first.stdout
    assert "activation   up to date" in second.stdout
    for result in (first, second):
        assert "for the tier portable" in result.stdout
        assert result.stdout.endswith(f"\nin {tmp_path}/ingot/kernels\n")
    assert len(list((tmp_path / "ingot" / "kernels").glob("*.so"))) == 1
    found = json.loads(ingot("build", "activation", "--json", INGOT_ISA="portable").stdout)
    assert found["tier"] == "portable"
    assert found["libraries"][0]["seconds"] is None
    assert Path(found["libraries"][0]["path"]).exists()


def test_unknown_family_suggests_the_nearest(cli: Run) -> None:
    result = cli("build", "activations")
    assert result.returncode == 2
    assert "did you mean 'activation'?" in result.stderr


@pytest.mark.parametrize(
    ("variables", "error"),
    [
        ({"CXX": "", "PATH": "/nowhere"}, "error: no C++ compiler"),
        ({"INGOT_CXXFLAGS": "-include absent.h"}, "absent.h: No such file"),
        ({"INGOT_ISA": "avx22"}, "error: unknown INGOT_ISA 'avx22'"),
        ({"XDG_CACHE_HOME": "/dev/null"}, "error: cannot write /dev/null/ingot/kernels"),
    ],
)
def test_failed_build_has_a_hint(ingot: Run, variables: dict[str, str], error: str) -> None:
    result = ingot("build", "activation", **variables)
    assert result.returncode == 2
    assert error in result.stderr.replace("\n", " ")
    assert "hint: " in result.stderr
    assert "Traceback" not in result.stderr
