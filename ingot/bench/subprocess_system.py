"""Runs a system in its own process, which generates on request and is stopped in between.

    with SystemProcess([python, "-m", "peers.vllm", model, cache], folder, log) as vllm:
        vllm.start()
        generation = vllm.generate([[1, 2, 3]], output_len=8)

The process speaks JSON, one object per line (`benchmarks/peers/protocol.py` is its side). Its
output is validated: an unreadable line, tokens that were not requested, silence and exit raise a
`SystemFailure` with the reason. The process cannot be used after that.

**Stopped while idle.** The threads of some runtimes spin for a while after their work and take
cores from the system that is timed next. So all processes of a system are stopped (SIGSTOP) while
it is idle. They form one process group in our session. If this process dies, the kernel continues
and hangs up a stopped group that has become orphaned (POSIX), so no process is left running.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Annotated, Self, TypeVar

import msgspec

_MAX_LINE_BYTES = 64 * 2**20
_EXIT_SECONDS = 5.0  # between the request to exit and SIGKILL
_Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e6)]
_Token = Annotated[int, msgspec.Meta(ge=0)]


class SystemFailure(Exception):
    """The reason why a system gives no result."""


class SystemReady(msgspec.Struct, frozen=True):
    """First message of a system, sent when it has loaded the model."""

    version: str
    dtype: str
    load_seconds: _Seconds


class Generation(msgspec.Struct, frozen=True):
    """The tokens that a system generated, and the time it took."""

    total_seconds: _Seconds
    tokens: list[list[_Token]]
    ttft_seconds: _Seconds | None = None


class _Error(msgspec.Struct):
    error: str


_Message = TypeVar("_Message", SystemReady, Generation)
# Our import path, and the thread setting of `ingot.cli`, are not passed to other systems.
_OWN_VARIABLES = ("PYTHONPATH", "GOMP_SPINCOUNT")


class SystemProcess:
    """A system in its own process; a context manager that ends the process.

    Its stderr goes to `log`; `variables` are added to its environment.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        log: Path,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._log, self._unread = log, b""
        inherited = {key: value for key, value in os.environ.items() if key not in _OWN_VARIABLES}
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                command,
                cwd=folder,
                env={**inherited, **(variables or {})},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                process_group=0,
            )
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._signal(signal.SIGCONT)
        assert self._process.stdin
        assert self._process.stdout
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # asks it to exit
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_EXIT_SECONDS)
        self._signal(signal.SIGKILL)  # and the processes it has started
        self._process.wait()
        self._process.stdout.close()

    def start(self, timeout: float = 900) -> SystemReady:
        """Wait until it has loaded the model, then stop it."""
        with self._running():
            try:
                return self._receive(SystemReady, timeout)
            except SystemFailure as failure:
                raise SystemFailure(add_cause(str(failure), self._log)) from None

    def generate(
        self, prompts: Sequence[Sequence[int]], output_len: int, timeout: float = 600
    ) -> Generation:
        """Continue it until it has generated `output_len` tokens after each prompt."""
        request = msgspec.json.encode({"prompts": prompts, "output_len": output_len})
        assert self._process.stdin
        with self._running():
            try:
                self._process.stdin.write(request + b"\n")
                self._process.stdin.flush()
            except BrokenPipeError:
                raise self._exit_failure() from None
            generation = self._receive(Generation, timeout)
        lengths = [len(tokens) for tokens in generation.tokens]
        if lengths != [output_len] * len(prompts):
            raise SystemFailure(
                f"expected {len(prompts)} x {output_len} tokens, got lengths {lengths[:8]}"
            )
        return generation

    def memory_bytes(self) -> int | None:
        """Proportional set size of all its processes; None if unknown."""
        return self._sum_sizes("smaps_rollup", "Pss:")

    def peak_memory_bytes(self) -> int | None:
        """Sum of the peak resident set sizes of its processes; None if unknown."""
        return self._sum_sizes("status", "VmHWM:")

    def _sum_sizes(self, file: str, key: str) -> int | None:
        return sum(_read_size(directory / file, key) for directory in self._members()) or None

    @contextmanager
    def _running(self) -> Generator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def _receive(self, kind: type[_Message], timeout: float) -> _Message:
        line = self._read_line(timeout)
        with contextlib.suppress(msgspec.DecodeError):
            raise SystemFailure(_first_chars(msgspec.json.decode(line, type=_Error).error))
        try:
            return msgspec.json.decode(line, type=kind)
        except msgspec.DecodeError as error:
            text = line[:60].decode(errors="replace")
            raise SystemFailure(f"invalid message ({error}): {text}") from None

    def _read_line(self, timeout: float) -> bytes:
        assert self._process.stdout
        pipe, end = self._process.stdout.fileno(), monotonic() + timeout
        while b"\n" not in self._unread:
            readable, _, _ = select.select([pipe], [], [], max(0.0, end - monotonic()))
            if not readable:
                raise SystemFailure(f"no message within {timeout:g} s")
            chunk = os.read(pipe, 2**16)
            if not chunk:
                raise self._exit_failure()
            self._unread += chunk
            if len(self._unread) > _MAX_LINE_BYTES:
                raise SystemFailure(f"message longer than {_MAX_LINE_BYTES} bytes")
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _exit_failure(self) -> SystemFailure:
        try:
            status = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return SystemFailure(f"closed its output (see {self._log})")
        return SystemFailure(describe_exit(status, self._log))

    def _members(self) -> list[Path]:
        """Return the directories in /proc of the processes of its group."""
        members: list[Path] = []
        for directory in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                # "pid (name) state ppid pgrp ...", and a name may have spaces.
                fields = (directory / "stat").read_text().rpartition(")")[2].split()
                if int(fields[2]) == self.pid:
                    members.append(directory)
        return members


def describe_exit(status: int, log: Path) -> str:
    """Describe how a process ended: its status or signal, and the last line of its log.

    >>> describe_exit(-9, Path("/dev/null"))
    'killed by SIGKILL: no output (see /dev/null)'
    """
    how = f"exited with {status}" if status >= 0 else f"killed by {signal.Signals(-status).name}"
    lines = [line.strip() for line in log.read_text(errors="replace").split("\n")]
    last = next((line for line in reversed(lines) if line), "no output")
    return f"{how}: {_first_chars(last)} (see {log})"


def add_cause(message: str, log: Path) -> str:
    """Add the first error in the log to a message, unless it is there.

    A library that loads the model in processes of its own, like vLLM, only says that one failed.
    """
    found = re.search(r"\b\w+(Error|Exception): .+", log.read_text(errors="replace"))
    cause = _first_chars(found[0]) if found else ""
    return message if cause in message else f"{message} First error: {cause} (see {log})"


def _read_size(file: Path, key: str) -> int:
    """Return a size in a file of /proc, in bytes; 0 if it is unknown."""
    with contextlib.suppress(OSError):
        for line in file.read_text().splitlines():
            if line.startswith(key):
                return int(line.split()[1]) * 1024
    return 0


def _first_chars(text: str) -> str:
    return " ".join(text.split())[:300]
