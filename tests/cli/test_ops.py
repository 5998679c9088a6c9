from __future__ import annotations

import json
import subprocess
from collections.abc import Callable

from ingot import ops

Run = Callable[..., subprocess.CompletedProcess[str]]


def test_json_has_a_row_for_every_op(ingot: Run) -> None:
    rows = json.loads(ingot("ops", "--json").stdout)
    assert len(rows) == len(ops.catalogue()) >= 25
    for row in rows:
        assert {p["name"] for p in row["providers"]} == set(ops.catalogue()[row["op"]].providers)
        assert row["tolerance"]["forward"] > 0
        assert row["cost"]["bytes"]
        assert row["cost"]["flops"]


def test_the_table_fits_a_terminal_and_names_every_op(ingot: Run) -> None:
    result = ingot("ops")
    assert result.returncode == 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert {line.split()[0] for line in result.stdout.splitlines() if line.strip()} >= set(
        ops.catalogue()
    )


def test_one_op_is_shown_with_its_reference(ingot: Run) -> None:
    text = ingot("ops", "silu").stdout
    assert "ingot::silu(Tensor x) -> Tensor" in text
    assert "return x * torch.sigmoid(x)" in text
    assert json.loads(ingot("ops", "silu", "--json").stdout)["op"] == "silu"


def test_an_unknown_op_suggests_the_nearest(ingot: Run) -> None:
    result = ingot("ops", "rmsnorm")
    assert result.returncode == 2
    assert "did you mean 'rms_norm'?" in result.stderr
