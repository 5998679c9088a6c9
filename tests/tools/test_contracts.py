"""The import contract, on the package as it is and on one with a violation planted."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def lint(directory: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for name in ("ingot", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_the_package_keeps_the_contract(copy: Path) -> None:
    result = lint(copy)
    assert result.returncode == 0, result.stdout
    assert "1 kept, 0 broken" in result.stdout


@pytest.mark.parametrize(
    ("file", "line", "complaint"),
    [
        (
            "ops/norm.py",
            "from ingot.kernels import aten",
            "ingot.ops.norm imports ingot.kernels.aten",
        ),
        ("core/paths.py", "import ingot.ops.norm", "ingot.core.paths imports ingot.ops.norm"),
        ("kernels/aten/norm.py", "import ingot.cli", "ingot.kernels.aten.norm imports ingot.cli"),
        ("core/paths.py", "import ingot", "ingot.core.paths imports ingot"),
        ("training/step.py", "import ingot.serving", "ingot.training.step imports ingot.serving"),
        (
            "utils/strings.py",
            "",
            "ingot.utils.strings is in a room that the contract does not list",
        ),
    ],
)
def test_a_violation_breaks_it(copy: Path, file: str, line: str, complaint: str) -> None:
    path = copy / "ingot" / file
    for room in ("serving", path.parent.name):
        if not (copy / "ingot" / room).exists() and path.parent.parent.name == "ingot":
            (copy / "ingot" / room).mkdir()
            (copy / "ingot" / room / "__init__.py").touch()
    text = path.read_text() if path.exists() else ""
    path.write_text(f"{text}\n{line}\n")
    result = lint(copy)
    assert result.returncode == 1
    assert complaint in " ".join(result.stdout.split())
