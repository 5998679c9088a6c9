from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ingot.cli.chat import chat
from ingot.core.errors import IngotError
from ingot.interop.chat import ChatTemplate

Run = Callable[..., subprocess.CompletedProcess[str]]
COMMAND = str(Path(sys.executable).parent / "ingot")
FIGURES = r"\d+ tokens, the first after [\d.]+ s, then [\d.]+ tokens/s"


def test_it_answers_what_comes_through_a_pipe(ready: Run, smollm2: Path) -> None:
    result = ready("chat", str(smollm2), stdin="\nWhat is the capital of France?\n")
    assert result.returncode == 0, result.stderr
    assert result.stdout == "The capital of France is Paris.\n"
    assert re.fullmatch(FIGURES + "\n", result.stderr)


# A session of its own, whose terminal is stdin's, so that Ctrl-C is a signal there.
ON_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


class Terminal:
    """A process on a terminal of its own."""

    def __init__(self, *command: str, env: dict[str, str]) -> None:
        self.side, other = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", ON_TERMINAL, *command],
            env={**env, "TERM": "xterm"},
            stdin=other,
            stdout=other,
            stderr=other,
            start_new_session=True,
        )
        os.close(other)
        self.seen = ""

    def read(self, seconds: float) -> str:
        """What comes next; nothing if nothing comes in time."""
        if not select.select([self.side], [], [], seconds)[0]:
            return ""
        text = os.read(self.side, 4096).decode(errors="replace")
        self.seen += text
        return text

    def until(self, pattern: str) -> str:
        """Read on until the pattern has come; return all that came."""
        text = ""
        while not re.search(pattern, text, re.DOTALL):
            piece = self.read(60)
            assert piece, f"nothing more came after {text!r}"
            text += piece
        return text

    def type(self, text: str) -> None:
        os.write(self.side, text.encode())

    def leave(self, key: str) -> int:
        """Type the key until the process ends; return its status.

        More than once: one that comes between the prompt and readline's first look is lost.
        """
        for _ in range(60):
            self.type(key)
            try:
                while self.read(1):
                    pass
            except OSError:  # Linux: no process has the other end open
                return self.process.wait()
        raise AssertionError(f"it does not leave: {self.seen!r}")


@contextmanager
def terminal(*command: str, env: dict[str, str]) -> Iterator[Terminal]:
    process = Terminal(*command, env=env)
    try:
        yield process
    finally:
        process.process.kill()
        process.process.wait()
        os.close(process.side)


@pytest.mark.parametrize("leave", ["\x03", "\x04"])
def test_on_a_terminal(smollm2: Path, environment: dict[str, str], leave: str) -> None:
    """Ctrl-C stops an answer and the conversation continues; at the prompt it quits."""
    with terminal(COMMAND, "chat", str(smollm2), env=environment) as process:
        assert "loading" in process.until("> $")
        process.type("Write a long story.\n")
        process.until(r"\x1b\[2K\w+ \w+ \w+")  # an answer, whatever it is about
        process.type("\x03")
        assert re.search(FIGURES + "; interrupted", process.until("\r\n> $"))
        process.type("What is the capital of France?\n")
        answer = process.until(r"tokens/s.*\r\n> $")
        assert "Paris" in answer
        assert process.leave(leave) == 0
    assert process.seen.endswith("\r\n")  # the shell's prompt begins a line
    assert process.seen.count("\x1b[?25l") == process.seen.count("\x1b[?25h")  # the cursor is back
    assert "Traceback" not in process.seen


def test_ctrl_c_without_a_terminal_leaves(smollm2: Path, environment: dict[str, str]) -> None:
    with subprocess.Popen(
        [COMMAND, "chat", str(smollm2)],
        env=environment,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdin
        assert process.stdout
        process.stdin.write("Write a long story.\nAnd another.\n")
        process.stdin.flush()
        process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate()
    assert process.returncode == 130
    assert rest.endswith("\n")
    assert re.fullmatch(FIGURES + "; interrupted\n", err)


def says(*lines: str) -> Callable[[str], str]:
    left = iter(lines)

    def line(_: str) -> str:
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    return line


def test_the_conversation_continues(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rendered: list[Any] = []
    render = ChatTemplate.render

    def kept(self: ChatTemplate, messages: Any, **variables: Any) -> str:
        rendered.append([dict(message) for message in messages])
        return render(self, messages, **variables)

    monkeypatch.setattr(ChatTemplate, "render", kept)
    monkeypatch.setattr("builtins.input", says("  Hi ", "", "You?"))
    chat(str(tiny), system="Be short.", max_tokens=3)
    out, err = capsys.readouterr()
    first, second = rendered
    said = [(message["role"], message["content"]) for message in second]
    assert (
        said[:2] == [("system", "Be short."), ("user", "Hi")] == [tuple(m.values()) for m in first]
    )
    assert said[3] == ("user", "You?")
    assert said[2][0] == "assistant"
    assert out.startswith(f"{said[2][1]}\n")
    assert len(err.splitlines()) == 2
    assert "stopped at --max-tokens" in err


def test_a_model_that_does_not_chat_says_so_at_once(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tiny / "tokenizer_config.json").write_text("{}")
    monkeypatch.setattr("builtins.input", lambda _: pytest.fail("asked"))  # pyright: ignore
    with pytest.raises(IngotError, match="ingot generate"):
        chat(str(tiny))


def test_a_template_that_cannot_be_used_is_an_error(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tiny / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{% for %}"}))
    monkeypatch.setattr("builtins.input", says("Hi"))
    with pytest.raises(IngotError, match="chat template is invalid"):
        chat(str(tiny))


def test_a_conversation_that_is_too_long_is_an_error(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", says("x" * 10_000))
    with pytest.raises(IngotError, match="expected at most 255 tokens, got 10,014"):
        chat(str(tiny))
    with pytest.raises(IngotError, match="--max-tokens: expected at least 1, got 0"):
        chat(str(tiny), max_tokens=0)
