"""Real processes: the protocol, failures of all kinds, stopping, and that none is left running."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from time import monotonic

import pytest

from ingot.bench import subprocess_system
from ingot.bench.subprocess_system import SystemFailure, SystemProcess

from .conftest import Make


def run(make: Make, tmp_path: Path, load: str = "pass", generate: str = "pass") -> SystemProcess:
    return make("fake", load, generate).start(tmp_path, tmp_path)


@pytest.fixture(autouse=True)
def short_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess_system, "_EXIT_SECONDS", 0.5)


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def is_stopped(pid: int) -> bool:
    """Whether it is stopped; the kernel stops it a moment after the signal."""
    end = monotonic() + 5
    while state(pid) != "T" and monotonic() < end:
        os.sched_yield()
    return state(pid) == "T"


def wait_for_end(pid: int) -> None:
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended, _, _ = select.select([watched], [], [], 10)
    os.close(watched)
    assert ended, "process is still running"


def test_process_reports_ready_and_generates(make: Make, tmp_path: Path) -> None:
    with run(make, tmp_path) as process:
        ready = process.start()
        assert (ready.version, ready.dtype) == ("1.0", "bf16")
        assert 0 < ready.load_seconds < 60
        for first in (5, 7):
            generation = process.generate([[first, 1, 1], [9, 1, 1]], output_len=3)
            assert generation.tokens == [[first, first + 1, first + 2], [9, 10, 11]]
            assert generation.ttft_seconds == 0.001
            assert 0 < generation.total_seconds < 10
        assert (process.memory_bytes() or 0) > 2**20


def test_peak_memory_counts_what_was_freed(make: Make, tmp_path: Path) -> None:
    with run(make, tmp_path, load="b'x' * 2**28") as process:
        process.start()
        assert 2**20 < (process.memory_bytes() or 0) < 2**28 < (process.peak_memory_bytes() or 0)
    assert process.peak_memory_bytes() is None


def test_converting_a_model_takes_no_memory_of_the_system(make: Make, tmp_path: Path) -> None:
    system = make("fake", load="assert model.name == 'converted'")
    script = system.folder / "fake.py"
    prepare = "def prepare(model, cache):\n    b'x' * 2**28\n    return cache / 'converted'\n"
    script.write_text(script.read_text().replace("serve(load)", f"{prepare}serve(load, prepare)"))
    with system.start(tmp_path, tmp_path) as process:
        process.start()
        assert 2**20 < (process.peak_memory_bytes() or 0) < 2**28


def test_own_thread_setting_is_not_inherited(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "10000")
    monkeypatch.setenv("PASSED_ON", "1")
    with run(make, tmp_path) as process:
        process.start()
        known = Path(f"/proc/{process.pid}/environ").read_text()
    assert "PASSED_ON=1" in known
    assert "GOMP_SPINCOUNT" not in known


def test_output_of_libraries_is_not_part_of_the_protocol(make: Make, tmp_path: Path) -> None:
    chatter = "print('INFO loading'); os.system('echo INFO from C')"
    with run(make, tmp_path, load=chatter, generate=chatter) as process:
        process.start()
        assert process.generate([[1]], output_len=1).tokens == [[1]]
    assert "INFO from C" in (tmp_path / "fake.log").read_text()


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        ("raise ValueError('no such model')", "^ValueError: no such model$"),
        (
            "print('(Worker) ERROR OSError: no kernel'); raise ValueError('see the root cause')",
            "^ValueError: see the root cause First error: OSError: no kernel",
        ),
        ("os._exit(3)", "exited with 3: no output"),
        ("os.kill(os.getpid(), signal.SIGILL)", "killed by SIGILL"),
        ("time.sleep(60)", "no message within 2 s"),
    ],
)
def test_failed_start_raises_with_the_reason(
    make: Make, tmp_path: Path, load: str, reason: str
) -> None:
    with run(make, tmp_path, load=load) as process, pytest.raises(SystemFailure, match=reason):
        process.start(timeout=2)


@pytest.mark.parametrize(
    ("generate", "reason"),
    [
        ("os._exit(3)", "exited with 3"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV"),
        ("time.sleep(60)", "no message within 2 s"),
        ("raise MemoryError('too large')", "^MemoryError: too large$"),
        ("return 0.001, [[1, 2]]", r"expected 1 x 3 tokens, got lengths \[2\]"),
        ("return 0.001, [[1, 2, 3, 4]]", r"got lengths \[4\]"),
        ("return 0.001, [[1, 2, 3]] * 2", r"got lengths \[3, 3\]"),
        ("return 0.001, [[1, 2, -3]]", "invalid message"),
        ("return 0.001, [[1, 2, 'x']]", "invalid message"),
        ("return float('nan'), [[1, 2, 3]]", "invalid message"),
        ("return -1.0, [[1, 2, 3]]", "invalid message"),
        (
            "os.write(3, b'ready\\n'); [os.write(i, b'x\\n') for i in range(3, 9)]",
            "invalid message",
        ),
    ],
)
def test_failed_generation_raises_with_the_reason(
    make: Make, tmp_path: Path, generate: str, reason: str
) -> None:
    with run(make, tmp_path, generate=generate) as process:
        process.start()
        with pytest.raises(SystemFailure, match=reason):
            process.generate([[1, 1]], output_len=3, timeout=2)


def test_killed_process_raises_with_its_signal(make: Make, tmp_path: Path) -> None:
    with run(make, tmp_path) as process:
        process.start()
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(SystemFailure, match="killed by SIGKILL"):
            process.generate([[1]], output_len=1)


def test_overlong_message_raises(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess_system, "_MAX_LINE_BYTES", 1000)
    with run(make, tmp_path) as process:
        process.start()
        with pytest.raises(SystemFailure, match="longer than 1000 bytes"):
            process.generate([[1]], output_len=10_000)


def test_process_group_is_stopped_while_idle(make: Make, tmp_path: Path) -> None:
    child = tmp_path / "child"
    start = f"c = subprocess.Popen(['sleep', '600']); open({str(child)!r}, 'w').write(str(c.pid))"
    with run(make, tmp_path, load=start) as process:
        process.start()
        assert is_stopped(process.pid)
        assert is_stopped(int(child.read_text()))
        process.generate([[1]], output_len=1)
        assert is_stopped(process.pid)
    wait_for_end(int(child.read_text()))


def test_no_process_is_left_when_the_parent_is_killed(make: Make, tmp_path: Path) -> None:
    system = make("fake")
    code = f"""
from pathlib import Path
from ingot.bench.subprocess_system import SystemProcess
here = Path({str(tmp_path)!r})
command = [{sys.executable!r}, "-m", "peers.fake", str(here), str(here)]
with SystemProcess(command, Path({str(system.folder.parent)!r}), here / "fake.log") as process:
    process.start()
    print(process.pid, flush=True)
    input()
"""
    ours = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with ours:
        assert ours.stdout
        theirs = int(ours.stdout.readline())
        assert is_stopped(theirs)
        ours.kill()
    wait_for_end(theirs)
