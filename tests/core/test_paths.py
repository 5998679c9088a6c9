"""Files and directories shared by real processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ingot.core import paths
from ingot.core.errors import IngotError


def start(script: str, *args: object) -> subprocess.Popen[str]:
    """Start a process that reports for duty and then waits for the word to go."""
    prelude = "import sys; print('ready', flush=True); sys.stdin.readline()\n"
    imports = "from pathlib import Path; from ingot.core import paths\n"
    command = [sys.executable, "-c", imports + prelude + script, *map(str, args)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def go(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()


def finish(processes: list[subprocess.Popen[str]]) -> list[str]:
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes)
    return outputs


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    return tmp_path


def test_places_default_to_the_home_directory(home: Path) -> None:
    assert paths.cache() == home / ".cache" / "ingot"
    assert paths.cache("kernels", "a.so") == home / ".cache" / "ingot" / "kernels" / "a.so"
    assert paths.runs() == home / ".local" / "share" / "ingot" / "runs"
    assert list(home.iterdir()) == []


def test_xdg_variables_move_them(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "c"))
    monkeypatch.setenv("XDG_DATA_HOME", str(home / "d"))
    assert paths.cache("x") == home / "c" / "ingot" / "x"
    assert paths.runs() == home / "d" / "ingot" / "runs"
    assert paths.evals("x") == home / "d" / "ingot" / "evals" / "x"


@pytest.mark.parametrize("value", ["", "relative/cache", "./x", "~/cache"])
def test_relative_xdg_variables_are_ignored(
    home: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    monkeypatch.setenv("XDG_DATA_HOME", value)
    assert paths.cache() == home / ".cache" / "ingot"
    assert paths.runs() == home / ".local" / "share" / "ingot" / "runs"


@pytest.mark.parametrize("name", ["smol", "../../etc", "a/b\0c", "", "...", "ä" * 300, "x" * 300])
def test_a_run_stays_in_its_place_whatever_its_name(home: Path, name: str) -> None:
    run = paths.create_run_dir(name)
    assert run.is_dir()
    assert run.resolve().parent == paths.runs().resolve()
    assert re.fullmatch(r"\d{8}-\d{6}-[A-Za-z0-9]([A-Za-z0-9._-]{0,62}[A-Za-z0-9])?", run.name)


def test_processes_that_start_runs_at_once_get_distinct_directories(home: Path) -> None:
    script = "for _ in range(25): print(paths.create_run_dir('same').name)"
    processes = [start(script) for _ in range(4)]
    go(processes)
    names = [name for output in finish(processes) for name in output.split()]
    assert len(names) == len(set(names)) == 100
    assert sorted(names) == sorted(path.name for path in paths.runs().iterdir())


def test_a_reader_never_sees_a_torn_file(tmp_path: Path) -> None:
    path, size = tmp_path / "weights", 1 << 20
    paths.write_atomic(path, b"0" * size)
    script = "for _ in range(40): paths.write_atomic(Path(sys.argv[1]), sys.argv[2] * (1 << 20))"
    writers = [start(script, path, letter) for letter in "abcd"]
    go(writers)
    seen: set[bytes] = set()
    while any(writer.poll() is None for writer in writers):
        content = path.read_bytes()
        assert content == content[:1] * size
        seen.add(content[:1])
    finish(writers)
    assert len(seen) > 1, "the reader saw no write happen"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file_and_no_temporary_one(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("old")
    # A file size limit makes the kernel refuse the write halfway, as a full disk would.
    script = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    paths.write_atomic(Path(sys.argv[1]), b"x" * 100_000)
except Exception as error:
    print(type(error).__name__, error)
"""
    process = start(script, path)
    go([process])
    assert finish([process])[0].startswith(f"IngotError cannot write {path}: File too large")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_block_that_fails_replaces_nothing(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    with paths.atomic_file(path) as temporary:
        temporary.write_text("old")
    with pytest.raises(TypeError), paths.atomic_file(path) as temporary:
        temporary.write_bytes("half")  # pyright: ignore[reportArgumentType]
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_atomic_write_makes_parents_and_honours_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / ("n" * 255)
    old = os.umask(0o027)
    try:
        paths.write_atomic(path, "naïve\r\n")
    finally:
        os.umask(old)
    assert path.read_bytes() == "naïve\r\n".encode()
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_directory_appears_whole(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "model"
    with paths.atomic_directory(path, num_bytes=3) as temporary:
        (temporary / "part").write_text("one")
        assert not path.exists()
    assert [entry.name for entry in path.parent.iterdir()] == ["model"]
    assert (path / "part").read_text() == "one"


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_a_directory_that_fails_does_not_appear(tmp_path: Path, error: type[BaseException]) -> None:
    def fail() -> None:
        with paths.atomic_directory(tmp_path / "model") as temporary:
            (temporary / "part").write_text("one")
            raise error

    with pytest.raises(error):
        fail()
    assert not list(tmp_path.iterdir())


def test_a_directory_replaces_nothing_but_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    with paths.atomic_directory(tmp_path / "empty") as temporary:
        (temporary / "part").touch()
    assert (tmp_path / "empty" / "part").exists()
    for path in (tmp_path / "full", tmp_path / "full" / "mine"):
        with pytest.raises(IngotError, match="exists already"), paths.atomic_directory(path):
            pass
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["empty", "full"]


def test_a_directory_too_large_for_the_disk_is_not_begun(tmp_path: Path) -> None:
    with (
        pytest.raises(IngotError, match="not enough free space"),
        paths.atomic_directory(tmp_path / "model", num_bytes=1 << 60),
    ):
        pass
    assert not list(tmp_path.iterdir())


def test_a_lock_admits_one_process_at_a_time(tmp_path: Path) -> None:
    counter = tmp_path / "deep" / "counter"
    script = """
path = Path(sys.argv[1])
for _ in range(60):
    with paths.lock(path):
        path.write_text(str(int(path.read_text() if path.exists() else 0) + 1))
"""
    processes = [start(script, counter) for _ in range(4)]
    go(processes)
    finish(processes)
    assert counter.read_text() == "240"


def test_a_lock_is_released_when_the_work_fails(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), paths.lock(tmp_path / "x"):
        (tmp_path / "missing").read_text()
    with paths.lock(tmp_path / "x"):
        pass


def test_an_unwritable_place_is_explained(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "file").write_text("in the way")
    monkeypatch.setenv("XDG_DATA_HOME", str(home / "file"))
    inside = home / "file" / "x"
    with pytest.raises(IngotError, match=r"(?s)cannot write .*runs: .*XDG_DATA_HOME"):
        paths.create_run_dir("x")
    with pytest.raises(IngotError, match=r"cannot write .*file/x: "):
        paths.write_atomic(inside, b"")
    with pytest.raises(IngotError, match=r"cannot write .*file/x: "), paths.lock(inside):
        pass


def test_a_directory_without_permission_is_explained(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    # Root may write anywhere, so the script changes to uid 65534, which cannot import modules.
    script = """
import filelock, os
if os.getuid() == 0:
    os.setuid(65534)
for write in (lambda p: paths.write_atomic(p, b""), lambda p: paths.lock(p).__enter__()):
    try:
        write(Path(sys.argv[1]))
    except Exception as error:
        print(type(error).__name__, error.message)
"""
    process = start(script, tmp_path / "x")
    go([process])
    expected = f"IngotError cannot write {tmp_path / 'x'}: Permission denied\n"
    assert finish([process])[0] == expected * 2
    tmp_path.chmod(0o700)


def test_code_is_trusted_where_only_its_owner_can_write(tmp_path: Path) -> None:
    directory = tmp_path / "deep" / "kernels"
    old = os.umask(0)
    try:
        assert paths.ensure_trusted(directory) == directory
    finally:
        os.umask(old)
    assert directory.stat().st_mode & 0o777 == 0o755
    directory.chmod(0o775)  # a group of one, on many systems
    assert paths.ensure_trusted(directory) == directory


def test_code_is_not_trusted_where_others_can_write(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(IngotError, match=r"other users can write to .*(?s:.)*XDG_CACHE_HOME"):
        paths.ensure_trusted(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives directories away")
def test_code_is_not_trusted_in_the_directory_of_another_user(tmp_path: Path) -> None:
    os.chown(tmp_path, 65534, -1)
    with pytest.raises(IngotError, match="other users can write"):
        paths.ensure_trusted(tmp_path)
