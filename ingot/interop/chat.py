"""Chat templates: messages into the text a model was trained on.

A template is a program that comes with the weights, written by anybody, in Jinja. The sandbox
keeps it from Python's insides, but not from `{% for a in range(99999) %}` three times nested, nor
from `'a' * 10**10`. Nothing inside a Python process can stop that for certain, least of all in a
server's thread, which gets no signals: a multiplication of strings is one long call into C. So
templates are rendered in a process of their own, with a limit on its memory, that is killed when
its time is up. It starts at the first use and stays. Measured with SmolLM2's template on a Xeon:
0.12 s to start, 20 MB, and 0.17 ms for a rendering that takes 0.02 ms within this process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ingot.core.errors import IngotError

MAX_TEMPLATE = 1 << 18  # characters; the longest in use have about 30 thousand
MAX_CHARACTERS = 1 << 24  # of the messages as JSON, and of what is made of them
MAX_MEMORY = 1 << 29  # bytes
SECONDS = 2.0
START_SECONDS = 30.0

Message = Mapping[str, Any]


class ChatError(IngotError):
    """A chat template that is missing or broken, or messages that it refuses."""


class ChatTemplate:
    """A template and the process that renders it.

    >>> template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    >>> template.render([{"role": "user", "content": "Hello"}])
    '<user>Hello'
    """

    def __init__(self, source: str) -> None:
        if len(source) > MAX_TEMPLATE:
            raise _broken(f"it has {len(source):,} characters, more than {MAX_TEMPLATE:,}")
        self.source = source
        self._lock = threading.Lock()
        self._renderer: _Renderer | None = None

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Return the text of the messages.

        `tools` are JSON schemas of functions. `add_generation_prompt` ends it with what comes
        before an answer. Other variables are the template's own, such as `enable_thinking`.
        """
        named = {
            "messages": list(messages),
            "tools": None if tools is None else list(tools),
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **variables,
        }
        try:
            content = json.dumps(named)
        except (TypeError, ValueError, RecursionError) as error:
            raise ChatError(
                f"the messages cannot be written as JSON: {error}",
                hint="make them of strings, numbers, lists and dictionaries",
            ) from error
        if len(content) > MAX_CHARACTERS:
            raise ChatError(
                f"the messages have {len(content):,} characters, more than {MAX_CHARACTERS:,}",
                hint="shorten them",
            )
        with self._lock:
            return self._ask(content)

    def _ask(self, content: str) -> str:
        if self._renderer is None or not self._renderer.alive():
            renderer = _Renderer()
            # Before the process is kept: what cannot be compiled is said again at each use.
            _text(renderer.ask(json.dumps(self.source), START_SECONDS))
            self._renderer = renderer
        answer = self._renderer.ask(content, SECONDS)
        if answer is None or ("error" in answer and not answer["refused"]):
            self._renderer = None  # a new one next time: this one may be out of memory
        return _text(answer)


class _Renderer:
    """The process, which ends with this object."""

    def __init__(self) -> None:
        ours, theirs = Pipe()
        script = Path(__file__).with_name("renderer.py")
        limits = (SECONDS, MAX_CHARACTERS, MAX_MEMORY)
        # -P: a module beside the script must not hide a package of its name, as `gguf` would.
        # A session of its own: Ctrl-C in the terminal is not for it.
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", str(script), str(theirs.fileno()), *map(str, limits)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._process, self._connection = process, ours
        self._stop = weakref.finalize(self, _stop, process, ours)

    def alive(self) -> bool:
        """Say whether the process is still there."""
        return self._process.poll() is None

    def ask(self, content: str, seconds: float) -> dict[str, Any] | None:
        """Return its answer, or None if it has none in time."""
        try:
            self._connection.send_bytes(content.encode())
            if self._connection.poll(seconds):
                return json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            pass
        self._stop()
        return None


def _stop(process: subprocess.Popen[bytes], connection: Connection) -> None:
    connection.close()
    process.kill()
    process.wait()


def _text(answer: dict[str, Any] | None) -> str:
    if answer is None:
        raise _broken(f"it does not end within {SECONDS:.0f} s, or breaks its process")
    if "error" not in answer:
        return answer["text"]
    if answer["refused"]:
        raise ChatError(
            f"the model's chat template refuses the messages: {answer['error']}",
            hint="change the messages as it says",
        )
    raise _broken(answer["error"])


def _broken(why: str) -> ChatError:
    return ChatError(
        f"the model's chat template cannot be used: {why}",
        hint="correct the template (chat_template in tokenizer_config.json), or complete plain "
        "text without it",
    )
