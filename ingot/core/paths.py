"""Directories of ingot's files, and atomic writes to them.

Directories follow the XDG base directory specification: `$XDG_CACHE_HOME` for files that can be
created again, `$XDG_DATA_HOME` for files that cannot, `$XDG_STATE_HOME` for what a server remembers
over a restart. As the specification demands, a variable that holds a relative path is ignored.

Several processes share these directories (ranks, trials, servers):

    write_atomic      replaces a file; a reader never sees half of it
    atomic_directory  creates a directory that appears when it is complete
    create_run_dir    creates a directory that no other process uses
    lock              serializes work among processes
    ensure_trusted    rejects a directory of code that other users can write to
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from ingot.core.errors import IngotError


def cache(*parts: str) -> Path:
    """Return a path below ingot's cache directory; nothing is created."""
    return _xdg("XDG_CACHE_HOME", ".cache").joinpath("ingot", *parts)


def runs() -> Path:
    """Return the directory of all runs; nothing is created."""
    return _xdg("XDG_DATA_HOME", ".local/share") / "ingot" / "runs"


def evals(*parts: str) -> Path:
    """Return a path below the directory of evaluation results; nothing is created."""
    return (_xdg("XDG_DATA_HOME", ".local/share") / "ingot" / "evals").joinpath(*parts)


def models(*parts: str) -> Path:
    """Return a path below the directory that holds downloaded models; nothing is created."""
    return (_xdg("XDG_DATA_HOME", ".local/share") / "ingot" / "models").joinpath(*parts)


def state(*parts: str) -> Path:
    """Return a path below ingot's state directory; nothing is created."""
    return (_xdg("XDG_STATE_HOME", ".local/state") / "ingot").joinpath(*parts)


def find_runs(name: str) -> list[Path]:
    """Return the directories that `create_run_dir` has created for this name, oldest first.

    Their order is that of the date and the counter in their names, which survive copying.
    """
    pattern = re.compile(rf"(\d{{8}}-\d{{6}})-{re.escape(sanitize(name))}(?:-(\d+))?")
    paths = runs().iterdir() if runs().is_dir() else iter(())
    matches = [(match, path) for path in paths if (match := pattern.fullmatch(path.name))]
    return [path for _, path in sorted(matches, key=lambda m: (m[0][1], int(m[0][2] or 0)))]


def create_run_dir(name: str) -> Path:
    """Create a directory for one run, which no other process uses."""
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{sanitize(name)}"
    parent = runs()
    with _os_errors_as_ingot_errors(parent):
        parent.mkdir(parents=True, exist_ok=True)
        counter = 0
        while True:
            path = parent / (f"{stem}-{counter}" if counter else stem)
            try:
                path.mkdir()  # succeeds in one process only
                return path
            except FileExistsError:
                counter += 1


def write_atomic(path: Path, data: bytes | str) -> None:
    """Replace the file at `path` atomically: a reader sees either the old or the new content.

    Missing parent directories are created. After a power failure the file is complete, too, but may
    be the old one: the file is synced, the directory entry is not.
    """
    with atomic_file(path) as temporary:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)


@contextmanager
def atomic_file(path: Path) -> Generator[Path]:
    """Yield a temporary path; what was written to it replaces `path` when the block ends.

    For content that is too large for `write_atomic`. If the block raises an exception, the old file
    remains.
    """
    with _os_errors_as_ingot_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Not tempfile, which creates files of mode 0600 regardless of the umask.
        temporary = path.parent / f".{secrets.token_hex(8)}.tmp"
        try:
            temporary.touch(exist_ok=False)
            yield temporary
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


@contextmanager
def atomic_directory(path: Path, num_bytes: int = 0) -> Generator[Path]:
    """Create a directory that appears at `path` when it is complete, or not at all.

    Yields a temporary directory next to `path`, which is renamed at the end, or removed if the
    block raises an exception. If `path` exists, it must be an empty directory. `num_bytes` is the
    size of what will be written, if known: too little free space is then an error at once.
    """
    with _os_errors_as_ingot_errors(path):
        if path.exists() and not (path.is_dir() and not any(path.iterdir())):
            raise IngotError(
                f"{path}: exists already",
                hint="name a directory that does not exist yet, or delete that one",
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(path.parent).free < num_bytes:
            raise IngotError(
                f"{path}: not enough free space, {num_bytes / 1e9:.1f} GB needed",
                hint="make room, or choose a directory on another disk",
            )
        temporary = path.parent / f".{path.name[:64]}.{secrets.token_hex(8)}.tmp"
        temporary.mkdir()
        try:
            yield temporary
            temporary.replace(path)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def ensure_trusted(directory: Path) -> Path:
    """Create the directory if it is missing; raise an error if other users can write to it.

    Its owner must be this user or root. Group write permission is accepted: on many systems each
    user has a group.
    """
    with _os_errors_as_ingot_errors(directory):
        directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        status = directory.stat()
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & stat.S_IWOTH:
        raise IngotError(
            f"{directory}: other users can write to it, so code in it is not run",
            hint="remove their permission (chown, chmod o-w), or set XDG_CACHE_HOME to another "
            "directory",
        )
    return directory


@contextmanager
def lock(path: Path) -> Generator[None]:
    """Hold an exclusive lock on `path` among all processes of this machine; wait for it.

    The lock file is `<path>.lock`, so `path` itself need not exist.
    """
    import filelock

    guard = filelock.FileLock(f"{path}.lock")
    with _os_errors_as_ingot_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        guard.acquire()
    try:
        yield
    finally:
        guard.release()


def sanitize(name: str) -> str:
    """Return a name that is valid for a directory.

    >>> sanitize("../SmolLM2 135M (bf16)"), sanitize("///")
    ('SmolLM2-135M-bf16', 'run')
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:64].strip("-.") or "run"


def _xdg(variable: str, default: str) -> Path:
    path = Path(os.environ.get(variable, ""))
    return path if path.is_absolute() else Path.home() / default


@contextmanager
def _os_errors_as_ingot_errors(path: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise IngotError(
            f"cannot write {path}: {error.strerror or error}",
            hint="make room or grant write access, or choose another directory (for caches "
            "and runs: XDG_CACHE_HOME and XDG_DATA_HOME)",
        ) from error
