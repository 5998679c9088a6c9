"""Where a peer lives: a virtual environment of its own, since each pins half of PyPI.

    environment = Environment("vllm", clone() / "vllm.txt")
    environment.make()              # downloads and may compile: minutes
    environment.python              # its interpreter

`benchmarks/peers/NAME.txt` lists every package with its version, and is installed as it stands,
without looking for dependencies: what is not listed is not there. An environment lies in the
cache under the hash of this list and of the Python version, so a changed list makes another, and
none is ever changed. What could not be installed leaves the reason.
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


def clone() -> Path:
    """`benchmarks/peers` of the clone that ingot is installed from."""
    path = Path(__file__).parents[2] / "benchmarks/peers"
    if not path.is_dir():
        raise IngotError(
            "the scripts of the peers are not installed with the package",
            hint="clone the repository, pip install -e . in it, and run it again",
        )
    return path


@dataclass(frozen=True)
class Environment:
    """The virtual environment of one peer, which may be there or not."""

    name: str
    pins: Path

    @property
    def path(self) -> Path:
        """The directory, in the cache."""
        made_of = sys.version.encode() + self.pins.read_bytes()
        return paths.cache("peers", f"{self.name}-{hashlib.sha256(made_of).hexdigest()[:12]}")

    @property
    def python(self) -> Path:
        """The interpreter."""
        return self.path / "bin/python"

    @property
    def log(self) -> Path:
        """What pip said."""
        return self.path / "install.log"

    def missing(self) -> str | None:
        """Why it is not there; None if it is."""
        if self._state == "complete":
            return None
        if self._state:
            return f"cannot be installed: {self._state}"
        return f"not installed: run `python benchmarks/install_peers.py {self.name}`"

    def make(self) -> None:
        """Install it, unless it is there; try again what failed before.

        Where it cannot be installed, `missing` tells the reason from then on.
        """
        with paths.lock(self.path):
            if self._state == "complete":
                return
            shutil.rmtree(self.path, ignore_errors=True)
            paths.ensure_trusted(self.path)
            paths.write_atomic(self.path / "state", self._installed() or "complete")

    @property
    def _state(self) -> str:
        file = self.path / "state"
        return file.read_text() if file.exists() else ""

    def _installed(self) -> str | None:
        """The reason of a failure, which is pip's last error."""
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
