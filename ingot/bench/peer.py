"""One system in a process of its own, that is asked to generate and sleeps in between.

    with Process([python, "-m", "peers.vllm", model, cache], folder, log) as vllm:
        vllm.start()
        answer = vllm.ask([[1, 2, 3]], new=8)

It speaks JSON, one object a line (`benchmarks/peers/talk.py` is its side). Nothing it says is
believed: a line that cannot be read, tokens that were not asked for, silence and death are a
`Failure` with the reason, after which the process is of no more use.

**Asleep.** Threads of some runtimes spin for a while after their work and take cores from whoever
is timed next. So all processes of a system are stopped (SIGSTOP) while it has nothing to do. They
are one process group of our session. When we die, the kernel wakes and hangs up a stopped group
that nobody is left to wake (POSIX: an orphaned process group), so none stays behind.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Annotated, Self, TypeVar

import msgspec

_LONGEST_LINE = 64 * 2**20
_Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e6)]
_Token = Annotated[int, msgspec.Meta(ge=0)]


class Failure(Exception):
    """Why a system gives no answer."""


class Hello(msgspec.Struct, frozen=True):
    """What a system says when it has loaded the model; `ready` is what that took, in seconds."""

    version: str
    dtype: str
    ready: _Seconds


class Answer(msgspec.Struct, frozen=True):
    """What a system generated, and in which time."""

    seconds_total: _Seconds
    tokens: list[list[_Token]]
    first_token_seconds: _Seconds | None = None


class _Error(msgspec.Struct):
    error: str


_Said = TypeVar("_Said", Hello, Answer)
# What we import, and what `ingot.cli` sets for our threads, is not for others.
_OURS = ("PYTHONPATH", "GOMP_SPINCOUNT")


class Process:
    """A system in a process of its own; a context, at whose end it is gone.

    `log` gets what it prints, `variables` are added to its environment.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        log: Path,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._log, self._unread = log, b""
        inherited = {key: value for key, value in os.environ.items() if key not in _OURS}
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
            self._process.stdin.close()  # which is how it is told to go
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        self._signal(signal.SIGKILL)  # and what it has started
        self._process.wait()
        self._process.stdout.close()

    def start(self, timeout: float = 900) -> Hello:
        """Wait until it has loaded the model, then let it sleep."""
        with self._awake():
            return self._heard(Hello, timeout)

    def ask(self, prompts: Sequence[Sequence[int]], new: int, timeout: float = 600) -> Answer:
        """Let it generate `new` tokens after each prompt."""
        request = msgspec.json.encode({"prompts": prompts, "new_tokens": new})
        assert self._process.stdin
        with self._awake():
            try:
                self._process.stdin.write(request + b"\n")
                self._process.stdin.flush()
            except BrokenPipeError:
                raise self._death() from None
            answer = self._heard(Answer, timeout)
        lengths = [len(tokens) for tokens in answer.tokens]
        if lengths != [new] * len(prompts):
            raise Failure(f"was asked for {len(prompts)} x {new} tokens and gave {lengths[:8]}")
        return answer

    def memory(self) -> int | None:
        """Bytes of all its processes, a shared page counted by its share; None if unknown."""
        sizes = [_proportional(directory) for directory in self._members()]
        return sum(sizes) or None

    @contextmanager
    def _awake(self) -> Generator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def _heard(self, kind: type[_Said], timeout: float) -> _Said:
        line = self._line(timeout)
        with contextlib.suppress(msgspec.DecodeError):
            raise Failure(_short(msgspec.json.decode(line, type=_Error).error))
        try:
            return msgspec.json.decode(line, type=kind)
        except msgspec.DecodeError as error:
            said = line[:60].decode(errors="replace")
            raise Failure(f"does not keep to the protocol ({error}): {said}") from None

    def _line(self, timeout: float) -> bytes:
        assert self._process.stdout
        pipe, end = self._process.stdout.fileno(), monotonic() + timeout
        while b"\n" not in self._unread:
            readable, _, _ = select.select([pipe], [], [], max(0.0, end - monotonic()))
            if not readable:
                raise Failure(f"no answer within {timeout:g} s")
            read = os.read(pipe, 2**16)
            if not read:
                raise self._death()
            self._unread += read
            if len(self._unread) > _LONGEST_LINE:
                raise Failure("an answer without end")
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _death(self) -> Failure:
        try:
            status = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return Failure(f"closed its output (see {self._log})")
        how = f"exited with {status}" if status >= 0 else f"died of {signal.Signals(-status).name}"
        lines = self._log.read_text(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
        return Failure(f"{how}: {_short(last)} (see {self._log})")

    def _members(self) -> list[Path]:
        """The directories in /proc of the processes of its group."""
        found: list[Path] = []
        for directory in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                # "pid (name) state ppid pgrp ...", and a name may have spaces.
                fields = (directory / "stat").read_text().rpartition(")")[2].split()
                if int(fields[2]) == self.pid:
                    found.append(directory)
        return found


def _proportional(directory: Path) -> int:
    with contextlib.suppress(OSError):
        for line in (directory / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def _short(text: str) -> str:
    return " ".join(text.split())[:300]
