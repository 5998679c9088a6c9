from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from ingot import ops

Run = Callable[..., subprocess.CompletedProcess[str]]


def test_json_has_a_row_for_every_op(ingot: Run) -> None:
    rows = json.loads(ingot("ops", "--json").stdout)
    assert len(rows) == len(ops.registry()) >= 25
    for row in rows:
        assert {p["name"] for p in row["providers"]} == set(ops.registry()[row["op"]].providers)
        assert row["tolerance"]["forward"] > 0
        assert row["cost"]["bytes"]
        assert row["cost"]["flops"]


def test_the_table_fits_a_terminal_and_names_every_op(ingot: Run) -> None:
    result = ingot("ops")
    assert result.returncode == 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert {line.split()[0] for line in result.stdout.splitlines() if line.strip()} >= set(
        ops.registry()
    )


def test_one_op_is_shown_with_its_reference(ingot: Run) -> None:
    text = ingot("ops", "silu").stdout
    assert "silu(x: Tensor) -> Tensor" in text
    assert "Elfwing et al. 2017" in text
    assert "return x * torch.sigmoid(x)" in text
    assert json.loads(ingot("ops", "silu", "--json").stdout)["op"] == "silu"


def test_a_family_is_shown_as_a_table(ingot: Run) -> None:
    rows = json.loads(ingot("ops", "NORM", "--json").stdout)
    assert {row["family"] for row in rows} == {"norm"}
    assert "add_layer_norm" in ingot("ops", "norm").stdout


def test_a_pipe_gets_whole_lines(ingot: Run) -> None:
    lines = ingot("ops", COLUMNS="").stdout.splitlines()
    assert any("linear_swiglu" in line and "4 rows up_weight" in line for line in lines)


def test_a_full_disk_is_said(ingot: Run, tmp_path: Path) -> None:
    command = Path(sys.executable).parent / "ingot"
    piped = ["bash", "-c", f"{command} ops > /dev/full"]
    result = subprocess.run(piped, capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr == "error: no space left to write to\n"


def test_an_unknown_op_suggests_the_nearest(ingot: Run) -> None:
    result = ingot("ops", "rmsnorm")
    assert result.returncode == 2
    assert "did you mean 'rms_norm'?" in result.stderr
