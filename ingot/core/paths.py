"""Directories of ingot's files, and atomic writes to them.

Directories follow the XDG base directory specification: `$XDG_CACHE_HOME` for files that can be
created again, `$XDG_DATA_HOME` for files that cannot. As the specification demands, a variable
that holds a relative path is ignored.

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
    """Return the directory that holds the runs; nothing is created."""
    return _xdg("XDG_DATA_HOME", ".local/share") / "ingot" / "runs"


def models(*parts: str) -> Path:
    """Return a path below the directory that holds downloaded models; nothing is created."""
    return (_xdg("XDG_DATA_HOME", ".local/share") / "ingot" / "models").joinpath(*parts)


def find_runs(name: str) -> list[Path]:
    """Return the directories that `create_run_dir` has created for this name, oldest first.

    Their order is that of the date and the counter in their names, which survive copying.
    """
    pattern = re.compile(rf"(\d{{8}}-\d{{6}})-{re.escape(_sanitize(name))}(?:-(\d+))?")
    paths = runs().iterdir() if runs().is_dir() else iter(())
    matches = [(match, path) for path in paths if (match := pattern.fullmatch(path.name))]
    return [path for _, path in sorted(matches, key=lambda m: (m[0][1], int(m[0][2] or 0)))]


def create_run_dir(name: str) -> Path:
    """Create a directory for one run, distinct from every other process's."""
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{_sanitize(name)}"
    parent = runs()
    with _os_errors_as_ingot_errors(parent):
        parent.mkdir(parents=True, exist_ok=True)
        counter = 0
        while True:
            path = parent / (f"{stem}-{counter}" if counter else stem)
            try:
                path.mkdir()  # the kernel lets exactly one process succeed
                return path
            except FileExistsError:
                counter += 1


def write_atomic(path: Path, data: bytes | str) -> None:
    """Replace the file at `path` in one step; a reader sees the old content or the new.

    Missing parent directories are created. After a power cut the file is whole too, though it
    may be the old one: the file is synced, the directory entry is not.
    """
    with atomic_file(path) as temporary:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)


@contextmanager
def atomic_file(path: Path) -> Generator[Path]:
    """A path to write a new file to, which replaces the one at `path` when the block ends.

    As `write_atomic`, for what is too large to be had in one piece. If the block fails, the old
    file stays.
    """
    with _os_errors_as_ingot_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Not tempfile: it makes files of mode 0600 whatever the umask says.
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
    """Fill a directory that appears at `path` when all of it is there, or not at all.

    Yields a temporary directory beside `path`; at the end it is renamed, and if anything fails
    it is removed. What is at `path` already must be an empty directory. `num_bytes` is what
    will be written, if known: nothing is begun that cannot be finished.
    """
    with _os_errors_as_ingot_errors(path):
        if path.exists() and not (path.is_dir() and not any(path.iterdir())):
            raise IngotError(
                f"{path} exists already",
                hint="name a directory that does not exist yet, or delete that one first",
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(path.parent).free < num_bytes:
            raise IngotError(
                f"{path} needs {num_bytes / 1e9:.1f} GB, more than is free there",
                hint="make room, or choose a place on another disk",
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
    """Make the directory if it is missing; refuse one that another user can write to.

    Its owner must be this user or root. A group may write: many systems give each user one.
    """
    with _os_errors_as_ingot_errors(directory):
        directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        status = directory.stat()
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & stat.S_IWOTH:
        raise IngotError(
            f"other users can write to {directory}, so nothing is run from there",
            hint="take the right from them (chown, chmod o-w), or choose another place by "
            "XDG_CACHE_HOME",
        )
    return directory


@contextmanager
def lock(path: Path) -> Generator[None]:
    """Hold the only lock on `path` among all processes of this machine; wait until it is free.

    The lock is on `<path>.lock` beside it, so `path` itself need not exist.
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


def _xdg(variable: str, default: str) -> Path:
    path = Path(os.environ.get(variable, ""))
    return path if path.is_absolute() else Path.home() / default


def _sanitize(name: str) -> str:
    """Make a name fit for a directory.

    >>> _sanitize("../SmolLM2 135M (bf16)"), _sanitize("///")
    ('SmolLM2-135M-bf16', 'run')
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:64].strip("-.") or "run"


@contextmanager
def _os_errors_as_ingot_errors(path: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise IngotError(
            f"cannot write {path}: {error.strerror or error}",
            hint="make room or grant write access there, or choose another place (for caches "
            "and runs by XDG_CACHE_HOME and XDG_DATA_HOME)",
        ) from error
