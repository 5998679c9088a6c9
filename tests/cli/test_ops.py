from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from ingot import ops
from tests.cli.conftest import Run


def test_json_has_a_row_for_every_op(cli: Run) -> None:
    rows = json.loads(cli("ops", "--json").stdout)
    assert len(rows) == len(ops.registry()) >= 25
    for row in rows:
        assert {p["name"] for p in row["providers"]} == set(ops.registry()[row["op"]].providers)
        assert row["tolerance"]["forward"] > 0
        assert row["cost"]["bytes"]
        assert row["cost"]["flops"]


def test_table_fits_a_terminal_and_lists_every_op(cli: Run) -> None:
    result = cli("ops")
    assert result.returncode == 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert {line.split()[0] for line in result.stdout.splitlines() if line.strip()} >= set(
        ops.registry()
    )


def test_op_is_shown_with_its_reference(cli: Run) -> None:
    text = cli("ops", "silu").stdout
    assert "silu(x: Tensor) -> Tensor" in text
    assert "Elfwing et al. 2017" in text
    assert "return x * torch.sigmoid(x)" in text
    assert json.loads(cli("ops", "silu", "--json").stdout)["op"] == "silu"


def test_family_is_shown_as_a_table(cli: Run) -> None:
    rows = json.loads(cli("ops", "NORM", "--json").stdout)
    assert {row["family"] for row in rows} == {"norm"}
    assert "add_layer_norm" in cli("ops", "norm").stdout


def test_pipe_gets_whole_lines(ingot: Run) -> None:
    lines = ingot("ops", COLUMNS="").stdout.splitlines()
    assert any("gated_linear" in line and "4 rows up_weight" in line for line in lines)


def test_full_disk_is_an_error() -> None:
    command = Path(sys.executable).parent / "ingot"
    piped = ["bash", "-c", f"{command} ops > /dev/full"]
    result = subprocess.run(piped, capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr == "error: no space left on device\n"


def test_unknown_op_suggests_the_nearest(cli: Run) -> None:
    result = cli("ops", "rmsnorm")
    assert result.returncode == 2
    assert "did you mean 'rms_norm'?" in result.stderr
