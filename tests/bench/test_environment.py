from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ingot.bench.environment import Environment, peers_folder


@pytest.fixture
def pins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A requirements file, with a separate cache and without a network."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    path = tmp_path / "tiny.txt"
    path.write_text("# nothing\n")
    return path


def package(folder: Path, broken: str = "") -> Path:
    """A source package without build dependencies: it is its own build backend."""
    folder.mkdir()
    (folder / "pyproject.toml").write_text(
        "[build-system]\nrequires = []\nbuild-backend = 'backend'\nbackend-path = ['.']\n"
    )
    (folder / "backend.py").write_text(
        f"""
import zipfile
def build_wheel(directory, config_settings=None, metadata_directory=None):
    {broken or "pass"}
    name = "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(f"{{directory}}/{{name}}", "w") as wheel:
        info = "tiny-1.0.dist-info"
        wheel.writestr("tiny.py", "import sys")
        wheel.writestr(f"{{info}}/METADATA", "Metadata-Version: 2.1\\nName: tiny\\nVersion: 1.0\\n"
                       "Requires-Dist: there-is-no-such-package\\n")
        wheel.writestr(f"{{info}}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\n"
                       "Tag: py3-none-any\\n")
        wheel.writestr(f"{{info}}/RECORD", "")
    return name
"""
    )
    return folder


def test_failed_installation_keeps_the_reason_until_it_succeeds(pins: Path, tmp_path: Path) -> None:
    """Then it is installed once and without dependencies."""
    flag = tmp_path / "flag"
    pins.write_text(str(package(tmp_path / "source", broken=f"open({str(flag)!r})")))
    environment = Environment("tiny", pins)
    assert environment.unavailable_reason() == (
        "not installed: run `python benchmarks/install_peers.py tiny`"
    )
    environment.install()
    reason = environment.unavailable_reason() or ""
    assert reason.startswith("installation failed: error: ")
    assert "install.log" in reason
    assert "No such file" in environment.log.read_text()
    flag.touch()
    environment.install()
    assert environment.unavailable_reason() is None
    subprocess.run([environment.python, "-c", "import tiny"], check=True)
    environment.log.write_text("unchanged")
    environment.install()
    assert environment.log.read_text() == "unchanged"


def test_changed_requirements_are_another_environment(pins: Path) -> None:
    before = Environment("tiny", pins).path
    pins.write_text("# something\n")
    assert Environment("tiny", pins).path != before


def test_every_system_has_a_script_and_pinned_requirements() -> None:
    lists = sorted(peers_folder().glob("*.txt"))
    assert {pins.stem for pins in lists} == {"llamacpp", "openvino", "transformers", "vllm"}
    for pins in lists:
        assert pins.with_suffix(".py").exists()
        lines = [line for line in pins.read_text().splitlines() if not line.startswith("#")]
        assert all("==" in line for line in lines), pins
