from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ingot.cli.compress import compress
from ingot.core import lineage
from ingot.interop import hf
from tests import models


def test_the_table_has_the_figures_of_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = models.small(tmp_path / "small")
    compress(str(small), tmp_path / "int4", to="int4")
    out = capsys.readouterr().out
    assert "KL in nats, over 512 positions" in out
    rows = {name: cells for name, *cells in (re.split(r"  +", x.strip()) for x in out.splitlines())}
    (step,) = lineage.read(tmp_path / "int4").steps
    original, quantized, drift = step["original"], step["quantized"], step["drift"]
    pairs = {
        "weights on disk, MB": (original["bytes"] / 1e6, quantized["bytes"] / 1e6),
        "bits per weight, quantized": (
            original["bits_per_weight"],
            quantized["bits_per_weight"],
        ),
        "perplexity": (original["perplexity"], quantized["perplexity"]),
        **{
            f"tokens/s, batch {n}": (original["tokens_per_s"][n], quantized["tokens_per_s"][n])
            for n in ("1", "8", "32")
        },
    }
    for name, (before, after) in pairs.items():
        shown = [float(cell.strip("x").replace(",", "")) for cell in rows[name]]
        assert shown == [
            pytest.approx(x, rel=1e-3, abs=0.05) for x in (before, after, after / before)
        ]
    assert float(rows["KL to the original, mean"][0]) == pytest.approx(drift["kl_mean"], rel=1e-2)
    assert float(rows["KL to the original, p99"][0]) == pytest.approx(drift["kl_p99"], rel=1e-2)
    assert rows["top-1 agreement"] == [f"{drift['argmax_agreement']:.1%}"]


def test_json_has_the_figures_of_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = models.small(tmp_path / "small")
    compress(str(small), tmp_path / "int8", method="rtn", json=True)
    report = json.loads(capsys.readouterr().out)
    (step,) = lineage.read(tmp_path / "int8").steps
    assert report["drift"]["positions"] == 512
    for name in ("format", "method", "original", "quantized", "drift"):
        assert report[name] == step[name], name
    assert len(report["sensitivities"]) == 4 * hf.describe(small).config.layers


def test_an_unsupported_group_is_an_error_with_a_hint(ready: Any, tmp_path: Path) -> None:
    small = models.small(tmp_path / "small")
    found = ready("compress", str(small), str(tmp_path / "out"), "--to", "int4", "--group", "48")
    assert found.returncode == 2
    assert "group must be one of 32, 64, 128" in found.stderr
