from __future__ import annotations

import json
import subprocess
from collections.abc import Callable

import pytest

pytest.importorskip("triton", reason="GPU kernels need Triton, if only to be compiled")

Run = Callable[..., subprocess.CompletedProcess[str]]
COLUMNS_IN_JSON = {"kernel", "target", "config", "registers", "spills", "shared_bytes", "occupancy"}


def test_json_rows(ingot: Run) -> None:
    result = ingot("kernels", "silu", "--target", "sm_90", "gfx942", "--default-configs", "--json")
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout)
    assert {row["target"] for row in rows} == {"sm_90", "gfx942"}
    for row in rows:
        assert COLUMNS_IN_JSON | {"uses_tensor_cores"} <= set(row)
        assert row["spills"] == 0
        assert not row["uses_tensor_cores"]
        assert 0 < row["occupancy"] <= 1


def test_tables(ready: Run) -> None:
    result = ready("kernels", "silu", "--target", "sm_90", "--default-configs", COLUMNS="200")
    assert result.returncode == 0, result.stderr
    assert "silu.forward.activation.0" in result.stdout
    assert "0 with spills, 0 violations" in result.stdout
    assert "H100" in result.stdout


def test_accuracy_in_the_interpreter(ready: Run) -> None:
    result = ready("kernels", "philox_uniform", "--accuracy", "--json")
    assert result.returncode == 0, result.stderr
    (row,) = json.loads(result.stdout)
    assert row["op"] == "philox_uniform"
    assert float(row["forward"]) <= 1
    assert row["cases"] > 10


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("silo",), "did you mean 'silu'?"),
        (("silu", "--target", "sm_91"), "did you mean 'sm_90'?"),
    ],
)
def test_unknown_name_suggests_the_closest_one(
    ready: Run, arguments: tuple[str, ...], error: str
) -> None:
    result = ready("kernels", *arguments)
    assert result.returncode == 2
    assert error in result.stderr
    assert "Traceback" not in result.stderr


def test_compiling_in_the_interpreter_is_an_error(ready: Run) -> None:
    result = ready("kernels", "silu", TRITON_INTERPRET="1")
    assert result.returncode == 2
    assert "hint: unset TRITON_INTERPRET" in result.stderr
