"""A model and versions of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.serving.releases import (
    perturb,
)


@pytest.fixture(scope="module")
def folder(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and versions of it: another one, equal ones, broken ones."""
    folder = tmp_path_factory.mktemp("versions")
    for name in ("v1", "failing", "slow", "broken"):
        shutil.copytree(directory, folder / name)
    (folder / "broken" / "config.json").write_text('{"model_type": "unheard_of"}')
    perturb(folder / "v1", folder / "v2", 0.002)
    perturb(folder / "v1", folder / "drifting", 0.5)
    for name in ("failing", "slow"):  # versions of their own, with the same bits
        (folder / name / "generation_config.json").write_text(f'{{"name": "{name}"}}')
    return folder
