"""Many clients at once, and what becomes of each."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any

from tests.serving.conftest import Served


@dataclass
class LoadReport:
    """What a client got."""

    status: int
    """0 for a connection that broke."""
    text: str
    """The deltas of a stream, or the text."""
    error: str
    """The type of the error, if there was one."""
    done: bool
    """Whether the answer was complete."""
    retry: str
    ended: float

    @property
    def clean(self) -> bool:
        """An answer, or an error that says so."""
        return bool(self.status) and (self.done or bool(self.error))


async def ask(served: Served, body: dict[str, Any], leave_after: int | None = None) -> LoadReport:
    """Send a completion and read the response; disconnect after `leave_after` bytes of it."""
    content = json.dumps(body).encode()
    read = b""
    writer = None
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        head += b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(content)
        writer.write(head + content)
        while data := await reader.read(1 << 16):
            read += data
            if leave_after is not None and len(read) >= leave_after:
                break
    except OSError:
        pass
    finally:
        if writer is not None:
            writer.transport.abort()
            writer.close()
            await asyncio.sleep(0)
    return outcome(read)


def outcome(read: bytes) -> LoadReport:
    """What the bytes of a response say."""
    head, _, rest = read.partition(b"\r\n\r\n")
    fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line)
    chunked = fields.get(b"transfer-encoding") == b"chunked"
    content, whole = _unchunked(rest) if chunked else (rest, True)
    events = [
        json.loads(line[6:])
        for line in content.decode().split("\n\n")
        if line.startswith("data: {") and line.endswith("}")
    ]
    if not chunked:
        events = [json.loads(content)] if content else []
    errors = [event["error"]["type"] for event in events if "error" in event]
    choices = [c for event in events for c in event.get("choices", [])]
    complete = b"data: [DONE]" in content if chunked else bool(choices)
    return LoadReport(
        status=int(head.split()[1]) if head else 0,
        text="".join(choice["text"] for choice in choices),
        error=errors[0] if errors else "",
        done=whole and complete,
        retry=fields.get(b"retry-after", b"").decode(),
        ended=time.monotonic(),
    )


def _unchunked(rest: bytes) -> tuple[bytes, bool]:
    content = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        if not length:
            return content, True
        content, rest = content + rest[:length], rest[length + 2 :]
    return content, False
