"""The virtual environment of a compared system; each has its own, since each pins half of PyPI.

    environment = Environment("vllm", peers_folder() / "vllm.txt")
    environment.install()           # downloads and may compile: minutes
    environment.python              # its interpreter

`benchmarks/peers/NAME.txt` lists every package with its version and is installed as it is, without
resolving dependencies. An environment is cached under the hash of this list and of the Python
version, so a changed list creates another one, and none is ever modified. If an installation fails,
the reason is kept.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ingot.core import paths
from ingot.core.errors import IngotError


def peers_folder() -> Path:
    """Return `benchmarks/peers` of the clone that ingot is installed from."""
    path = Path(__file__).parents[2] / "benchmarks/peers"
    if not path.is_dir():
        raise IngotError(
            "benchmarks/peers: not part of the installed package",
            hint="clone the repository, run `pip install -e .` in it, and try again",
        )
    return path


@dataclass(frozen=True)
class Environment:
    """The virtual environment of one system, installed or not."""

    name: str
    pins: Path

    @property
    def path(self) -> Path:
        """The directory, in the cache."""
        content = sys.version.encode() + self.pins.read_bytes()
        return paths.cache("peers", f"{self.name}-{hashlib.sha256(content).hexdigest()[:12]}")

    @property
    def python(self) -> Path:
        """The interpreter."""
        return self.path / "bin/python"

    @property
    def log(self) -> Path:
        """The output of pip."""
        return self.path / "install.log"

    def unavailable_reason(self) -> str | None:
        """Return why it cannot be used; None if it is installed."""
        if self._state == "complete":
            return None
        if self._state:
            return f"installation failed: {self._state}"
        return f"not installed: run `python benchmarks/install_peers.py {self.name}`"

    def install(self) -> None:
        """Install it, unless it is installed; retry an installation that failed.

        If it fails, `unavailable_reason` returns the reason from then on.
        """
        with paths.lock(self.path):
            if self._state == "complete":
                return
            shutil.rmtree(self.path, ignore_errors=True)
            paths.ensure_trusted(self.path)
            paths.write_atomic(self.path / "state", self._run_pip() or "complete")

    @property
    def _state(self) -> str:
        file = self.path / "state"
        return file.read_text() if file.exists() else ""

    def _run_pip(self) -> str | None:
        """Install all packages; return pip's last error if that fails."""
        pip = [str(self.python), "-m", "pip", "install", "--no-deps", "-r", str(self.pins)]
        with self.log.open("w") as log:
            for command in ([sys.executable, "-m", "venv", str(self.path)], pip):
                if subprocess.run(command, stdout=log, stderr=log).returncode:
                    break
            else:
                return None
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines()]
        errors = [line for line in lines if line.lower().startswith("error")]
        return f"{(errors or lines or ['no reason given'])[-1][:300]} (see {self.log})"
