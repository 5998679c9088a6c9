"""Starts engine processes as copies of a process that has imported PyTorch.

Its import takes two seconds of CPU time, which is nearly all that the restart of a small model
takes, and which the other engines of the machine lack while their requests wait.

    python -m ingot.serving.workers.fork_server FD

imports what engines need, and forks a process for each message on the socket FD: `WorkerSettings`
as JSON, and with it the file descriptors of the engine's connection, of a socket for its status,
and of the weights that it shares. On the latter socket it sends the pidfd of the process, and the
exit status in the end. Only one thread is copied by a fork, so the imports must not start others.
The process exits when FD closes; engines continue, until their own connections close.

`multiprocessing` has a fork server, too, but its processes import the program's main module: a
script that serves, without a guard, would do so again in each of them.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec

from ingot.serving.workers import worker

IMPORTS = (
    "ingot.interop.classifier",
    "ingot.interop.hf",
    "ingot.interop.sentence_transformers",
    "ingot.interop.tokenizer",
    "ingot.serving.engine.engine",
    "ingot.serving.engine.inference",
    "ingot.serving.engine.pooling",
    "ingot.serving.engine.speculate",
)
_MAX_MESSAGE_BYTES = 1 << 18
_MAX_STATUS_BYTES = 16
_UNKNOWN = -1
"""Exit status of a process whose fork server has died."""


class ForkServer:
    """The fork server of this program: started when it is needed, and again when it has died."""

    command: tuple[str, ...] = (sys.executable, "-m", "ingot.serving.workers.fork_server")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def fork(self, settings: str, weights_fd: int | None) -> tuple[socket.socket, ForkedProcess]:
        """Start an engine with `WorkerSettings` as JSON; return the socket to it, and a handle.

        It may have to wait while the fork server starts.
        """
        ours, theirs = socket.socketpair()
        status, their_status = _message_pair()
        with theirs, their_status, ExitStack() as on_error:
            on_error.callback(ours.close)
            on_error.callback(status.close)
            fds = [theirs.fileno(), their_status.fileno()]
            fds += [] if weights_fd is None else [weights_fd]
            self._send(settings.encode(), fds)
            on_error.pop_all()
        return ours, ForkedProcess(status)

    def close(self) -> None:
        """End it; engines that run are not affected."""
        with self._lock:
            if self._socket is not None and self._process is not None:
                self._socket.close()
                self._process.kill()  # it may still import
                self._process.wait()
                self._socket = self._process = None

    def _send(self, content: bytes, fds: list[int]) -> None:
        with self._lock:
            if self._socket is not None:
                with suppress(ConnectionError):
                    socket.send_fds(self._socket, [content], fds)
                    return
            self._start()
            assert self._socket is not None
            socket.send_fds(self._socket, [content], fds)

    def _start(self) -> None:
        if self._socket is not None and self._process is not None:  # it has died
            self._socket.close()
            self._process.wait()
            self._socket = self._process = None
        ours, theirs = _message_pair()
        with theirs, ExitStack() as on_error:
            on_error.callback(ours.close)
            # A session of its own: Ctrl-C in the terminal is handled by this process alone.
            self._process = subprocess.Popen(
                [*self.command, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
            on_error.pop_all()
        self._socket = ours


class ForkedProcess:
    """An engine process: the child of the fork server, not of this one."""

    def __init__(self, status: socket.socket) -> None:
        self._socket = status
        self._socket.setblocking(False)
        self._pidfd: int | None = None
        self._status: int | None = None
        self._is_killed = False

    def poll(self) -> int | None:
        """Return its exit status, negative for a signal; None while it runs."""
        with suppress(BlockingIOError):
            while self._status is None and self._receive():
                pass
        return self._status

    def kill(self) -> None:
        """Kill it, if need be once it is forked."""
        self._is_killed = True
        if self.poll() is None and self._pidfd is not None:
            _send_kill(self._pidfd)

    def _receive(self) -> bool:
        """Receive a message of the fork server; return False if it has died."""
        content, fds, _, _ = socket.recv_fds(self._socket, _MAX_STATUS_BYTES, 1)
        if fds:
            (self._pidfd,) = fds
            if self._is_killed:
                _send_kill(self._pidfd)
            return True
        if not content and self._pidfd is not None and not _has_exited(self._pidfd):
            return False
        self._status = int(content) if content else _UNKNOWN
        self._socket.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
        return True


def _message_pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _send_kill(pidfd: int) -> None:
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def _has_exited(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], 0)[0])


fork_server = ForkServer()
"""That of this program."""


# In the fork server


def main(imports: Sequence[str] = IMPORTS) -> None:
    """Fork a process for each message: see above."""
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # NumPy's starts threads when it is imported
    for name in imports:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # or the next collection writes to, and so copies, all objects
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        _serve(connection)
    worker.exit_process(0)


def _serve(connection: socket.socket) -> None:
    """Fork processes, and send their status, until the other side closes."""
    running: dict[int, tuple[int, socket.socket]] = {}  # by pidfd
    poller = select.poll()
    poller.register(connection, select.POLLIN)
    while True:
        for fd, _ in poller.poll():
            if fd in running:
                pid, status = running.pop(fd)
                poller.unregister(fd)
                os.close(fd)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with suppress(ConnectionError), status:
                    status.send(str(code).encode())
                continue
            content, fds, _, _ = socket.recv_fds(connection, _MAX_MESSAGE_BYTES, 3)
            if not content:
                return
            pid = os.fork()
            if pid == 0:
                others = [status.fileno() for _, status in running.values()]
                _run(content, fds, [connection.fileno(), *running, *others])
            status = socket.socket(fileno=fds.pop(1))
            for each in fds:
                os.close(each)
            pidfd = os.pidfd_open(pid)
            with suppress(ConnectionError):
                socket.send_fds(status, [b"-"], [pidfd])
            running[pidfd] = pid, status
            poller.register(pidfd, select.POLLIN)


def _run(content: bytes, fds: list[int], inherited: list[int]) -> None:
    """Be an engine process, which does not return."""
    code = 1
    try:
        os.setsid()
        connection, status, *weights = fds
        for fd in (status, *inherited):
            os.close(fd)
        settings = msgspec.json.decode(content, type=worker.WorkerSettings)
        settings = msgspec.structs.replace(settings, weights_fd=weights[0] if weights else None)
        _set_name(Path(settings.directory).resolve().name)
        code = worker.serve(settings, socket.socket(fileno=connection))
    except BaseException:
        traceback.print_exc()
    finally:
        worker.exit_process(code)


def _set_name(model: str) -> None:
    """Show the model in `ps -o comm` and `top`."""
    with suppress(OSError):
        Path("/proc/self/comm").write_text(f"ingot {model}"[:15])


if __name__ == "__main__":
    main()
