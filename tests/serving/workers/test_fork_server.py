"""The fork server: its engines are processes that can be watched and killed, whatever becomes of
it."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest

from ingot.serving.workers import wire
from ingot.serving.workers.fork_server import ForkedProcess, ForkServer
from ingot.serving.workers.worker import NICENESS, WorkerSettings
from tests.serving.conftest import Served, children, runs, serving
from tests.serving.server.test_gateway import ECHO


class EchoServer(ForkServer):
    command = (sys.executable, "-m", ECHO)


@pytest.fixture
def echo() -> Iterator[EchoServer]:
    server = EchoServer()
    yield server
    server.close()


@contextmanager
def forked(echo: EchoServer, directory: Path) -> Iterator[tuple[socket.socket, ForkedProcess]]:
    """An engine, which exits in the end."""
    settings = msgspec.json.encode(WorkerSettings(directory=str(directory))).decode()
    connection, process = echo.fork(settings, None)
    with connection:
        yield connection, process
    exit_status(process)


def read(connection: socket.socket) -> wire.ToClient:
    """The first message of an engine."""
    frames = wire.Frames()
    while data := connection.recv(1 << 16):
        for content in frames.feed(data):
            return wire.to_client(content)
    raise EOFError


def wait(true: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def exit_status(process: ForkedProcess) -> int | None:
    wait(lambda: process.poll() is not None)
    return process.poll()


def number(echo: EchoServer) -> int:
    """The number of the fork server's process."""
    assert echo._process
    return echo._process.pid


def sockets(process: int) -> list[str]:
    links = [os.readlink(path) for path in Path(f"/proc/{process}/fd").iterdir()]
    return [link for link in links if link.startswith("socket:")]


def test_the_exit_status_of_an_engine(echo: EchoServer, directory: Path) -> None:
    with forked(echo, directory) as (connection, process):
        assert isinstance(read(connection), wire.EngineReady)
        assert process.poll() is None
    assert exit_status(process) == 0, "its connection was closed"
    with forked(echo, directory) as (connection, process):
        read(connection)
        process.kill()
        assert exit_status(process) == -signal.SIGKILL


def test_a_model_that_cannot_be_loaded(echo: EchoServer, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "unknown"}')
    with forked(echo, tmp_path) as (connection, process):
        assert isinstance(read(connection), wire.EngineFailed)
        assert exit_status(process) == 2
    with forked(echo, tmp_path / "missing") as (connection, process):
        with pytest.raises(EOFError):
            read(connection)
        assert exit_status(process) == 1, "an exception"


def test_an_engine_that_is_killed_before_it_is_forked(echo: EchoServer, directory: Path) -> None:
    with forked(echo, directory) as (first, other):
        read(first)
        os.kill(number(echo), signal.SIGSTOP)
        with forked(echo, directory) as (_, process):
            process.kill()
            assert process.poll() is None
            os.kill(number(echo), signal.SIGCONT)
            assert exit_status(process) == -signal.SIGKILL
        assert other.poll() is None


def test_engines_outlive_the_fork_server(echo: EchoServer, directory: Path) -> None:
    with ExitStack() as stack:
        started = [stack.enter_context(forked(echo, directory)) for _ in range(3)]
        for connection, _ in started:
            assert isinstance(read(connection), wire.EngineReady)
        engines = children(number(echo))
        os.kill(number(echo), signal.SIGKILL)
        wait(lambda: not runs(number(echo)))
        assert [process.poll() for _, process in started] == [None] * 3
        started[0][1].kill()
        started[1][0].close()
        statuses = [exit_status(process) for _, process in started[:2]]
        assert statuses == [-1, -1], "it is not known"
        assert started[2][1].poll() is None
        assert sum(map(runs, engines)) == 1
        with forked(echo, directory) as (connection, process):
            assert isinstance(read(connection), wire.EngineReady), "there is another fork server"
        assert exit_status(process) == 0


def test_an_engine_has_no_sockets_of_others(echo: EchoServer, directory: Path) -> None:
    with ExitStack() as stack:
        started = [stack.enter_context(forked(echo, directory)) for _ in range(3)]
        for connection, _ in started:
            assert isinstance(read(connection), wire.EngineReady)
        engines = children(number(echo))
        assert [len(sockets(engine)) for engine in engines] == [1, 1, 1]
        assert len({os.getsid(engine) for engine in engines}) == 3
        assert [os.readlink(f"/proc/{engine}/fd/0") for engine in engines] == ["/dev/null"] * 3
    assert not any(map(runs, engines))


def test_nothing_is_left_of_a_server_that_was_killed(directory: Path, tmp_path: Path) -> None:
    with serving(directory, tmp_path, "--replicas", "2", module=ECHO) as served:
        served.wait(lambda: len(served.workers) == 2)
        processes = [*served.fork_servers, *served.workers]
        assert len(processes) == 3
        served.process.kill()
        wait(lambda: not any(map(runs, processes)))
        served.process.wait()
        served.process.returncode = 0  # which `serving` expects


def test_the_fork_server_has_a_single_thread(served: Served) -> None:
    """The others would not be copied, and what they have locked would stay locked."""
    (process,) = served.fork_servers
    assert len(list(Path(f"/proc/{process}/task").iterdir())) == 1


@pytest.mark.parametrize(("replicas", "niceness"), [(1, 0), (2, NICENESS)])
def test_replicas_let_the_http_process_go_first(
    replicas: int, niceness: int, directory: Path, tmp_path: Path
) -> None:
    with serving(directory, tmp_path, "--replicas", str(replicas)) as served:
        served.wait(lambda: len(served.workers) == replicas)
        wait(lambda: served.metric("ingot:engine_up") == replicas)
        own = os.getpriority(os.PRIO_PROCESS, 0)
        for engine in served.workers:
            found = os.getpriority(os.PRIO_PROCESS, engine)
            assert found == min(19, own + niceness)
            group = Path(f"/proc/{engine}/autogroup")
            if niceness and group.exists():
                assert group.read_text().split()[-1] == str(found)
