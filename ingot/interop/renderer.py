# pyright: basic
"""Render a chat template in a separate process: see `chat`.

This script is started with the file descriptor of a connection and imports nothing of ingot. The
first message is the template, each later one the variables to render it with; the answer to each is
{"text": ..., "spans": ...} or {"error": ..., "rejected": whether the template itself raised it}.
`spans` are the characters from `{% generation %}` to `{% endgeneration %}`; None if they cannot be
located. The process exits when the connection is closed.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from datetime import datetime
from multiprocessing.connection import Connection
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox


class MessagesRejected(Exception):
    """Raised by a template through `raise_exception`."""


class GenerationTag(jinja2.ext.Extension):
    """Records what is between the tags `{% generation %}` and `{% endgeneration %}`.

    They mark the assistant's words for training. `position` is the number of characters rendered
    before; as in transformers, it is only known for tags that are not inside a macro.
    """

    tags = {"generation"}  # noqa: RUF012

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.position = 0
        self.marked: list[tuple[int, str]] = []

    def parse(self, parser: Any) -> Any:
        """Return a call of `mark` with the statements."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    def mark(self, caller: Any) -> str:
        """Record the text of the statements and return it."""
        text = caller()
        self.marked.append((self.position, text))
        return text

    def spans(self, text: str) -> list[tuple[int, int]] | None:
        """Return begin and end of what was marked; None if it is not at the recorded positions."""
        if any(not text.startswith(marked, start) for start, marked in self.marked):
            return None
        return [(start, start + len(marked)) for start, marked in self.marked]


def environment() -> jinja2.Environment:
    """Return the environment that Hugging Face's templates are written for."""
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = strftime_now
    return env


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Serialize as JSON without escaping for HTML, unlike jinja's own filter.

    >>> tojson({"a": "<é>"})
    '{"a": "<é>"}'
    """
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def raise_exception(message: object) -> None:
    """Reject the messages, with the template's own explanation."""
    raise MessagesRejected(message)


def strftime_now(format: str) -> str:
    """Format the current time."""
    return datetime.now().strftime(format)


def render(template: jinja2.Template, variables: dict[str, Any], limit: int) -> dict[str, Any]:
    """Render at most `limit` characters; raise ValueError beyond."""
    tag: Any = template.environment.extensions[GenerationTag.identifier]
    tag.position, tag.marked = 0, []
    parts: list[str] = []
    for part in template.generate(**variables):
        tag.position += len(part)
        if tag.position > limit:
            raise ValueError(f"it renders more than {limit:,} characters")
        parts.append(part)
    text = "".join(parts)
    return {"text": text, "spans": tag.spans(text)}


def serve(connection: Connection, seconds: float, max_characters: int) -> None:
    """Answer messages until the connection is closed."""
    template: jinja2.Template | None = None
    while True:
        try:
            request = json.loads(connection.recv_bytes())
        except EOFError:
            return
        # The parent stops waiting earlier; this timer is for the case that it has died. Unlike a
        # handler, the default action of the signal also interrupts C code.
        signal.setitimer(signal.ITIMER_REAL, seconds + 1)
        answer: dict[str, Any]
        try:
            if template is None:
                template = environment().from_string(request)
                answer = {"text": ""}
            else:
                answer = render(template, request, max_characters)
        except MemoryError:
            answer = {"error": "it needs too much memory", "rejected": False}
        except Exception as error:
            answer = {
                "error": f"{type(error).__name__}: {error}"[:2000],
                "rejected": isinstance(error, MessagesRejected),
            }
            if answer["rejected"]:
                answer["error"] = str(error)[:2000]
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.send_bytes(json.dumps(answer).encode())


def main() -> None:
    """Serve the connection, within the limits, given on the command line."""
    number, seconds, max_characters, max_memory = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_AS, (int(max_memory), int(max_memory)))
    serve(Connection(int(number)), float(seconds), int(max_characters))


if __name__ == "__main__":
    main()
