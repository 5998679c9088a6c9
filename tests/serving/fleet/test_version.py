"""Versions: what changes them and what does not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ingot.serving.fleet.version import version_of


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_bytes(bytes(20_000_000))
    return tmp_path / "model"


def test_a_copy_of_the_same_name_is_the_same_version(model: Path, tmp_path: Path) -> None:
    before = version_of(model, {"tp": 1})
    assert version_of(shutil.copytree(model, tmp_path / "copy" / "model"), {"tp": 1}) == before
    (model / "notes.md").write_text("not of the model")
    assert version_of(model, {"tp": 1}) == before
    assert version_of(model, {"tp": 2}) != before


@pytest.mark.parametrize("place", [0, 9_990_000, 19_999_999])
def test_other_weights_are_another_version(model: Path, place: int) -> None:
    before = version_of(model, {})
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(place // 19_531 * 19_531 if place < 19_999_999 else 1023 * 19_531 + 4000)
        file.write(b"!")
    assert version_of(model, {}) != before


def test_another_size_or_config_is_another_version(model: Path) -> None:
    versions = {version_of(model, {})}
    (model / "config.json").write_text("{ }")
    versions.add(version_of(model, {}))
    with (model / "model.safetensors").open("ab") as file:
        file.write(b"\0")
    versions.add(version_of(model, {}))
    assert len(versions) == 3


def test_a_name_is_fit_for_a_header(tmp_path: Path) -> None:
    (tmp_path / "a b\nc: é").mkdir()
    assert version_of(tmp_path / "a b\nc: é", {}).startswith("a_b_c____@".replace("____", "___"))
