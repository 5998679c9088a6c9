"""A server with OpenAI's endpoints and given responses."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODELS = {"data": [{"id": "one"}]}


class Responses:
    """What a server answers, in order; the last response is repeated."""

    def __init__(self, *responses: tuple[int, Any, dict[str, str]]) -> None:
        self.responses = list(responses)
        self.requests: list[tuple[str, dict[str, str], Any]] = []
        self.running = self.most_running = 0
        self.seconds = 0.0
        self.lock = threading.Lock()

    def next(self) -> tuple[int, Any, dict[str, str]]:
        with self.lock:
            return self.responses.pop(0) if len(self.responses) > 1 else self.responses[0]


@contextmanager
def answering(responses: Responses) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(200, MODELS, {})

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["content-length"]))
            headers = {name.lower(): value for name, value in self.headers.items()}
            responses.requests.append((self.path, headers, json.loads(content)))
            with responses.lock:
                responses.running += 1
                responses.most_running = max(responses.most_running, responses.running)
            time.sleep(responses.seconds)
            with responses.lock:
                responses.running -= 1
            self.reply(*responses.next())

        def reply(self, status: int, body: Any, headers: dict[str, str]) -> None:
            if status == 0:  # break the connection
                self.connection.close()
                return
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            for name, value in {"content-length": str(len(content)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
