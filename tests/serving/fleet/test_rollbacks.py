"""The file of rolled back versions: what is read is what was written, and a broken one stops
nothing."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from ingot.serving.fleet.release import CanaryConfig
from ingot.serving.fleet.rollbacks import Rejection, RollbackFile

ROLLED_BACK = Rejection(CanaryConfig(share=0.3, max_drift=math.inf), "too slow", "rolled_back")
FAILED = Rejection(CanaryConfig(), "the memory does not suffice", "failed")


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def test_what_was_rolled_back_is_remembered(tmp_path: Path, state: Path) -> None:
    file = RollbackFile(tmp_path / "fleet.toml")
    assert file.load() == {}
    file.save({"chat": {}})
    assert not state.exists(), "there is nothing to remember"
    file.save({"chat": {"v2@12": ROLLED_BACK, "v3@34": FAILED}, "other": {"v2@12": FAILED}})
    again = RollbackFile(tmp_path / "fleet.toml")
    assert again.load() == {"chat": {"v2@12": ROLLED_BACK}}
    assert RollbackFile(tmp_path / "other" / "fleet.toml").load() == {}
    again.save({"chat": {}})
    assert RollbackFile(tmp_path / "fleet.toml").load() == {}


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"a": {"b": []}}', '{"a": {"b": [{"share": 2}, "", "rolled_back"]}}']
)
def test_a_broken_file_is_reported_and_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    file = RollbackFile(tmp_path / "fleet.toml")
    file.path.parent.mkdir(parents=True)
    file.path.write_text(text)
    assert file.load() == {}
    assert "rolled back versions are not known" in caplog.text
    file.save({"chat": {"v2@12": ROLLED_BACK}})
    assert RollbackFile(tmp_path / "fleet.toml").load() == {"chat": {"v2@12": ROLLED_BACK}}


def test_a_directory_that_cannot_be_written_is_reported_once(
    tmp_path: Path, state: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state.write_text("")
    file = RollbackFile(tmp_path / "fleet.toml")
    assert file.load() == {}
    for _ in range(3):
        file.save({"chat": {"v2@12": ROLLED_BACK}})
    assert caplog.text.count("tried again after a restart") == 1
