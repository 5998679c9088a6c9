# pyright: basic
"""The program that renders a chat template, in a process of its own: see `chat`.

It is started as a script with the number of an open connection, and imports nothing of ingot.
The first message is the template, each later one the variables to render it with; each is
answered by {"text": ...} or by {"error": ..., "refused": whether the template itself said so}.
It leaves when the other side closes.
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


class Refused(Exception):
    """What a template says by `raise_exception`."""


class Generation(jinja2.ext.Extension):
    """Renders what is between `{% generation %}` and `{% endgeneration %}`, as if they were not.

    They mark the assistant's words for training.
    """

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        """Return a scope of its own around the statements, as transformers does."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def environment() -> jinja2.Environment:
    """Return the environment that Hugging Face's templates are written for."""
    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = refuse
    made.globals["strftime_now"] = strftime_now
    return made


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON for a model: jinja's own filter writes it for HTML.

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


def refuse(message: object) -> None:
    """Stop, with the template's own message."""
    raise Refused(message)


def strftime_now(form: str) -> str:
    """Return the time by a form of the template's."""
    return datetime.now().strftime(form)


def render(template: jinja2.Template, variables: dict[str, Any], limit: int) -> str:
    """Render, but not more than `limit` characters."""
    pieces: list[str] = []
    total = 0
    for piece in template.generate(**variables):
        total += len(piece)
        if total > limit:
            raise ValueError(f"it makes more than {limit:,} characters")
        pieces.append(piece)
    return "".join(pieces)


def serve(connection: Connection, seconds: float, max_characters: int) -> None:
    """Answer until the other side closes."""
    template: jinja2.Template | None = None
    while True:
        try:
            request = json.loads(connection.recv_bytes())
        except EOFError:
            return
        # The other side stops waiting before; this is for the case that it is gone. Unlike a
        # handler, the signal's default action ends the process in the middle of C code too.
        signal.setitimer(signal.ITIMER_REAL, seconds + 1)
        answer: dict[str, Any]
        try:
            if template is None:
                template = environment().from_string(request)
                answer = {"text": ""}
            else:
                answer = {"text": render(template, request, max_characters)}
        except MemoryError:
            answer = {"error": "it needs too much memory", "refused": False}
        except Exception as error:
            answer = {
                "error": f"{type(error).__name__}: {error}"[:2000],
                "refused": isinstance(error, Refused),
            }
            if answer["refused"]:
                answer["error"] = str(error)[:2000]
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.send_bytes(json.dumps(answer).encode())


def main() -> None:
    """Serve the connection that the arguments name, within the limits that they name."""
    number, seconds, max_characters, max_memory = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_AS, (int(max_memory), int(max_memory)))
    serve(Connection(int(number)), float(seconds), int(max_characters))


if __name__ == "__main__":
    main()
