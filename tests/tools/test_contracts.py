"""The import contracts, on the package as it is and on copies with planted violations."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.contracts import find_cycles

ROOT = Path(__file__).parent.parent.parent
FORBIDDEN = {
    "ops/norm.py": ("from ingot.kernels import aten", "ingot.ops.norm imports ingot.kernels.aten"),
    "core/paths.py": ("import ingot.ops.norm", "ingot.core.paths imports ingot.ops.norm"),
    "kernels/aten/norm.py": ("import ingot.cli", "ingot.kernels.aten.norm imports ingot.cli"),
    "core/log.py": ("import ingot", "ingot.core.log imports ingot"),
    "training/step.py": ("import ingot.serving", "ingot.training.step imports ingot.serving"),
    "utils/strings.py": ("", "ingot.utils.strings is in a package that the contract does not list"),
}
CYCLES = {
    "bench/a.py": "import ingot.bench.b",
    "bench/b.py": "def late():\n    from ingot.bench import c",
    "bench/c.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import ingot.bench.a",
}


def lint(directory: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for name in ("ingot", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def append(path: Path, line: str) -> None:
    if not path.parent.exists():
        path.parent.mkdir()
        (path.parent / "__init__.py").touch()
    text = path.read_text() if path.exists() else ""
    path.write_text(f"{text}\n{line}\n")


def test_package_keeps_the_contracts(copy: Path) -> None:
    result = lint(copy)
    assert result.returncode == 0, result.stdout
    assert "2 kept, 0 broken" in result.stdout


def test_forbidden_imports_are_found(copy: Path) -> None:
    for file, (line, _) in FORBIDDEN.items():
        append(copy / "ingot" / file, line)
    result = lint(copy)
    assert result.returncode == 1
    text = " ".join(result.stdout.split())
    for _, complaint in FORBIDDEN.values():
        assert complaint in text


def test_cycle_of_eager_lazy_and_type_checking_imports_is_found(copy: Path) -> None:
    for file, line in CYCLES.items():
        append(copy / "ingot" / file, line)
    result = lint(copy)
    assert result.returncode == 1
    text = " ".join(result.stdout.split())
    assert "No import cycles BROKEN" in text
    assert "Which package may import which KEPT" in text
    cycle = "ingot.bench.a -> ingot.bench.b -> ingot.bench.c -> ingot.bench.a"
    assert f"import cycle: {cycle}" in text


@pytest.mark.parametrize(
    ("graph", "cycles"),
    [
        ({"a": "b", "b": "c", "c": ""}, []),
        ({"a": "a"}, [["a", "a"]]),
        ({"a": "b", "b": "ac", "c": "d", "d": "c"}, [["a", "b", "a"], ["c", "d", "c"]]),
        ({"a": "bd", "b": "c", "c": "a", "d": "a"}, [["a", "d", "a"]]),
        ({"a": "b", "b": "c", "c": "b"}, [["b", "c", "b"]]),
    ],
)
def test_each_component_has_its_shortest_cycle(
    graph: dict[str, str], cycles: list[list[str]]
) -> None:
    assert find_cycles(graph, lambda node: graph[node]) == cycles
