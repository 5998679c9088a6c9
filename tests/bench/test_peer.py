"""Real processes: the talk, faults of all kinds, sleep, and that nobody stays behind."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from time import monotonic

import pytest

from ingot.bench import peer
from ingot.bench.peer import Failure, Process

from .conftest import TensorMaker


def run(make: TensorMaker, tmp_path: Path, load: str = "pass", generate: str = "pass") -> Process:
    return make("fake", load, generate).start(tmp_path, tmp_path)


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def sleeps(pid: int) -> bool:
    """Whether it is stopped, which the kernel does a moment after the signal."""
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
    assert ended, "it still runs"


def test_it_says_hello_and_answers(make: TensorMaker, tmp_path: Path) -> None:
    with run(make, tmp_path) as process:
        hello = process.start()
        assert (hello.version, hello.dtype) == ("1.0", "bf16")
        assert 0 < hello.ready < 60
        for first in (5, 7):
            answer = process.ask([[first, 1, 1], [9, 1, 1]], new=3)
            assert answer.tokens == [[first, first + 1, first + 2], [9, 10, 11]]
            assert answer.first_token_seconds == 0.001
            assert 0 < answer.seconds_total < 10
        assert (process.memory() or 0) > 2**20


def test_what_we_set_for_our_own_threads_is_not_for_others(
    make: TensorMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "10000")
    monkeypatch.setenv("PASSED_ON", "1")
    with run(make, tmp_path) as process:
        process.start()
        known = Path(f"/proc/{process.pid}/environ").read_text()
    assert "PASSED_ON=1" in known
    assert "GOMP_SPINCOUNT" not in known


def test_what_its_libraries_print_does_not_disturb(make: TensorMaker, tmp_path: Path) -> None:
    chatter = "print('INFO loading'); os.system('echo INFO from C')"
    with run(make, tmp_path, load=chatter, generate=chatter) as process:
        process.start()
        assert process.ask([[1]], new=1).tokens == [[1]]
    assert "INFO from C" in (tmp_path / "fake.log").read_text()


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        ("raise ValueError('no such model')", "exited with 1: ValueError: no such model"),
        ("os._exit(3)", "exited with 3: it said nothing"),
        ("os.kill(os.getpid(), signal.SIGILL)", "died of SIGILL"),
        ("time.sleep(60)", "no answer within 2 s"),
    ],
)
def test_a_start_that_fails(make: TensorMaker, tmp_path: Path, load: str, reason: str) -> None:
    with run(make, tmp_path, load=load) as process, pytest.raises(Failure, match=reason):
        process.start(timeout=2)


@pytest.mark.parametrize(
    ("generate", "reason"),
    [
        ("os._exit(3)", "exited with 3"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "died of SIGSEGV"),
        ("time.sleep(60)", "no answer within 2 s"),
        ("raise MemoryError('too large')", "^MemoryError: too large$"),
        ("return 0.001, [[1, 2]]", r"asked for 1 x 3 tokens and gave \[2\]"),
        ("return 0.001, [[1, 2, 3, 4]]", r"gave \[4\]"),
        ("return 0.001, [[1, 2, 3]] * 2", r"gave \[3, 3\]"),
        ("return 0.001, [[1, 2, -3]]", "does not keep to the protocol"),
        ("return 0.001, [[1, 2, 'x']]", "does not keep to the protocol"),
        ("return float('nan'), [[1, 2, 3]]", "does not keep to the protocol"),
        ("return -1.0, [[1, 2, 3]]", "does not keep to the protocol"),
        ("os.write(3, b'hello\\n'); [os.write(i, b'x\\n') for i in range(3, 9)]", "protocol"),
    ],
)
def test_an_answer_that_fails(
    make: TensorMaker, tmp_path: Path, generate: str, reason: str
) -> None:
    with run(make, tmp_path, generate=generate) as process:
        process.start()
        with pytest.raises(Failure, match=reason):
            process.ask([[1, 1]], new=3, timeout=2)


def test_a_process_that_died_meanwhile(make: TensorMaker, tmp_path: Path) -> None:
    with run(make, tmp_path) as process:
        process.start()
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(Failure, match="died of SIGKILL"):
            process.ask([[1]], new=1)


def test_a_line_without_end(
    make: TensorMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "_LONGEST_LINE", 1000)
    with run(make, tmp_path) as process:
        process.start()
        with pytest.raises(Failure, match="without end"):
            process.ask([[1]], new=10_000)


def test_it_sleeps_unless_it_is_asked(make: TensorMaker, tmp_path: Path) -> None:
    child = tmp_path / "child"
    start = f"c = subprocess.Popen(['sleep', '600']); open({str(child)!r}, 'w').write(str(c.pid))"
    with run(make, tmp_path, load=start) as process:
        process.start()
        assert sleeps(process.pid)
        assert sleeps(int(child.read_text()))
        process.ask([[1]], new=1)
        assert sleeps(process.pid)
    wait_for_end(int(child.read_text()))


def test_nobody_stays_behind_when_we_are_killed(make: TensorMaker, tmp_path: Path) -> None:
    system = make("fake")
    code = f"""
from pathlib import Path
from ingot.bench.peer import Process
here = Path({str(tmp_path)!r})
command = [{sys.executable!r}, "-m", "peers.fake", str(here), str(here)]
with Process(command, Path({str(system.folder.parent)!r}), here / "fake.log") as process:
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
        assert sleeps(theirs)
        ours.kill()
    wait_for_end(theirs)
