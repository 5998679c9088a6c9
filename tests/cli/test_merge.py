from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ingot.cli.merge import merge
from ingot.interop import hf
from tests import adapters, models


@pytest.fixture
def small(tmp_path: Path) -> Path:
    base = models.small(tmp_path / "small")
    adapters.save(hf.load(base), tmp_path / "adapter", seed=1)
    return base


def test_the_cost_is_printed(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    merge(tmp_path / "adapter", tmp_path / "merged", base=str(small))
    lines = capsys.readouterr().out
    assert "merged rank 4 in 14 layers" in lines
    assert "KL(adapter || merged) over 512 positions: mean" in lines
    merge(tmp_path / "adapter", tmp_path / "again", base=str(small), json=True)
    assert json.loads(capsys.readouterr().out)["drift"]["positions"] == 512


def test_the_command_explains_what_is_missing(ready: Any, small: Path, tmp_path: Path) -> None:
    found = ready("merge", str(tmp_path / "adapter"), str(tmp_path / "merged"))
    assert found.returncode == 2
    assert "--base" in found.stderr
