# pyright: basic
"""Search for a regular expression in a separate process: see `answer`.

This script is started with the file descriptor of a connection and imports nothing of ingot. The
first message is the pattern, each later one a text; the answer to each is {"text": the match or
null} or {"error": ...}. The process exits when the connection is closed.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any


def search(pattern: re.Pattern[str], text: str) -> str | None:
    """Return the first group of the first match, or the whole match if it has no groups.

    >>> search(re.compile("answer is (.)"), "The answer is 7"), search(re.compile("x"), "y")
    ('7', None)
    """
    match = pattern.search(text)
    return match and match[1 if pattern.groups else 0]


def serve(connection: Connection, seconds: float) -> None:
    """Answer messages until the connection is closed."""
    pattern: re.Pattern[str] | None = None
    while True:
        try:
            request = json.loads(connection.recv_bytes())
        except EOFError:
            return
        # The parent stops waiting earlier; this timer is for the case that it has died.
        signal.setitimer(signal.ITIMER_REAL, seconds + 1)
        answer: dict[str, Any]
        try:
            if pattern is None:
                pattern = re.compile(request)
                answer = {"text": None}
            else:
                answer = {"text": search(pattern, request)}
        except MemoryError:
            answer = {"error": "it needs too much memory"}
        except Exception as error:
            answer = {"error": str(error)[:1000]}
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.send_bytes(json.dumps(answer).encode())


def main() -> None:
    """Serve the connection, within the limits, given on the command line."""
    number, seconds, max_memory = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_AS, (int(max_memory), int(max_memory)))
    serve(Connection(int(number)), float(seconds))


if __name__ == "__main__":
    main()
