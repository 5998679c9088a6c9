from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ingot.core.device import detect

Run = Callable[..., subprocess.CompletedProcess[str]]

pytestmark = pytest.mark.skipif(detect().compiler is None, reason="no C++ compiler")


def test_it_says_what_was_built_and_what_was_there(ingot: Run, tmp_path: Path) -> None:
    first, second = (ingot("build", "activation", INGOT_ISA="portable") for _ in range(2))
    assert first.returncode == second.returncode == 0, first.stderr
    assert "activation   built in " in first.stdout
    assert "1 built, 0 there already" in first.stdout
    assert "activation   there already" in second.stdout
    for result in (first, second):
        assert "for the tier portable" in result.stdout
        assert result.stdout.endswith(f"\nin {tmp_path}/ingot/kernels\n")
    assert len(list((tmp_path / "ingot" / "kernels").glob("*.so"))) == 1
    found = json.loads(ingot("build", "activation", "--json", INGOT_ISA="portable").stdout)
    assert found["tier"] == "portable"
    assert found["libraries"][0]["seconds"] is None
    assert Path(found["libraries"][0]["path"]).exists()


def test_an_unknown_family_suggests_the_nearest(ingot: Run) -> None:
    result = ingot("build", "activations")
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
def test_what_prevents_it_is_said_with_a_hint(
    ingot: Run, variables: dict[str, str], error: str
) -> None:
    result = ingot("build", "activation", **variables)
    assert result.returncode == 2
    assert error in result.stderr.replace("\n", " ")
    assert "hint: " in result.stderr
    assert "Traceback" not in result.stderr
