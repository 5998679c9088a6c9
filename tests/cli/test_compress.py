from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ingot.cli.compress import compress
from tests import models


def test_size_and_cost_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = models.small(tmp_path / "small")
    compress(str(small), tmp_path / "int4", to="int4")
    lines = capsys.readouterr().out
    assert "smaller) in" in lines
    assert "KL(original || int4) over 512 positions: mean" in lines
    compress(str(small), tmp_path / "int8", json=True)
    assert json.loads(capsys.readouterr().out)["drift"]["positions"] == 512


def test_an_unsupported_group_is_an_error_with_a_hint(ready: Any, tmp_path: Path) -> None:
    small = models.small(tmp_path / "small")
    found = ready("compress", str(small), str(tmp_path / "out"), "--to", "int4", "--group", "48")
    assert found.returncode == 2
    assert "group must be one of 32, 64, 128" in found.stderr
