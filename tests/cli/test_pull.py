"""`ingot pull` as a user sees it; downloads and faults are tested in tests/interop/test_hub.py."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Run
from tools import hub


def test_the_summary_names_the_next_command(ingot: Run, tiny: Path, tmp_path: Path) -> None:
    with hub.serving({"org/name": tiny}) as endpoint:
        variables = {"HF_ENDPOINT": endpoint, "XDG_DATA_HOME": str(tmp_path / "data")}
        result = ingot("pull", "org/name", **variables)
        assert result.returncode == 0, result.stderr
        assert "hashes checked" in " ".join(result.stdout.split())
        assert "next: ingot chat org/name" in result.stdout
        report = json.loads(ingot("pull", "org/name", "--json", **variables).stdout)
    assert report["directory"] == str(tmp_path / "data/ingot/models/org/name")
    assert report["import"]["source"] == "org/name"
