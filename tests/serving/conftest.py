"""A real server process with a small model, and what tests ask of it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from tests import models

READY = 60.0


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights, a token for each byte and a chat template."""
    return models.small(tmp_path_factory.mktemp("models") / "small", max_seq_len=4096)


def children(process: int) -> list[int]:
    """The numbers of a process's children that run."""
    found: list[int] = []
    for tasks in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found += map(int, tasks.read_text().split())
    return [child for child in found if runs(child)]


def runs(process: int) -> bool:
    """Whether a process exists, and is not only waited for."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@dataclass
class Served:
    """A server process."""

    process: subprocess.Popen[str]
    log: Path
    url: str
    admin: str

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def worker(self) -> int:
        """The number of the engine's process."""
        workers = self.workers
        if not workers:
            raise ProcessLookupError("no worker")
        return workers[0]

    @property
    def workers(self) -> list[int]:
        """The numbers of the engines' processes."""
        return [engine for server in self.fork_servers for engine in children(server)]

    @property
    def fork_servers(self) -> list[int]:
        """The number of their parent; none before the first engine is started."""
        found: list[int] = []
        for child in children(self.process.pid):
            with contextlib.suppress(FileNotFoundError):
                command = Path(f"/proc/{child}/cmdline").read_text()
                if "\0-m\0" in command:  # not the chat template's
                    found.append(child)
        return found

    def client(self, key: str = "none", **options: Any) -> openai.OpenAI:
        options = {"max_retries": 0, "timeout": 60.0, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, **options)

    def call(
        self, path: str, body: Any = None, key: str | None = None, **headers: str
    ) -> tuple[int, dict[str, Any], dict[str, str]]:
        """The status, the JSON and the headers of a request, sent as it is given."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json", **headers}
        if key:
            headers["authorization"] = f"Bearer {key}"
        base = self.admin if path in ("/metrics", "/drain") else self.url
        request = urllib.request.Request(base + path, data, headers)
        try:
            response = urllib.request.urlopen(request, timeout=60)
        except urllib.error.HTTPError as error:
            response = error
        with response:
            content = response.read()
        found = {name.lower(): value for name, value in response.headers.items()}
        try:
            return response.status or 0, json.loads(content), found
        except ValueError:
            return response.status or 0, {"text": content.decode()}, found

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        page = self.call("/metrics")[1]["text"]
        rows = re.findall(rf"^{re.escape(name)}(?:{{(.*)}})? (\S+)$", page, re.MULTILINE)
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(float(v) for row, v in rows if all(label in row for label in wanted))

    def wait(self, true: Callable[[], bool], seconds: float = 20.0) -> float:
        """Wait for something to be true; return how long it took."""
        start = time.monotonic()
        while time.monotonic() - start < seconds:
            if true():
                return time.monotonic() - start
            time.sleep(0.02)
        raise TimeoutError(self.log.read_text()[-3000:])

    def ready(self) -> bool:
        return self.call("/readyz")[0] == 200

    def quiet(self) -> bool:
        """Whether nothing is inside and no block is in use."""
        return not (
            self.metric("ingot:requests_in_flight")
            or self.metric("vllm:kv_cache_usage_perc")
            or self.metric("vllm:num_requests_running")
            or self.metric("vllm:num_requests_waiting")
        )

    def tokens(self, prompt: str = "Hello", count: int = 40) -> Any:
        """The log-probabilities of what the model writes: the same bits whenever it is asked."""
        body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "logprobs": 2}
        status, found, _ = self.call("/v1/completions", body)
        assert status == 200, found
        return found["choices"][0]["logprobs"]

    def connect(self, body: dict[str, Any], buffer: int | None = None) -> socket.socket:
        """A connection on which a completion was requested; `buffer` is the size of its buffer."""
        made = socket.socket()
        if buffer is not None:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        made.connect(("127.0.0.1", self.port))
        content = json.dumps(body).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        made.sendall(head + b"content-length: %d\r\n\r\n" % len(content) + content)
        return made


@contextmanager
def serving(
    directory: Path, folder: Path, *options: str, module: str = "ingot", wait: bool = True
) -> Iterator[Served]:
    """Run `ingot serve` on free ports; it must leave cleanly."""
    log = folder / "server.log"
    command = [sys.executable, "-m", module, "serve", str(directory), "--port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    environment["XDG_STATE_HOME"] = str(folder / "state")
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, "--log-format", "json", *options], stderr=file, env=environment, text=True
        )
    try:
        served = Served(process, log, *_addresses(process, log))
        if wait:
            served.wait(served.ready, READY)
        yield served
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise
    assert process.returncode == 0, log.read_text()[-3000:]
    found = log.read_text().replace("MemoryError: no memory, for a test", "")
    assert "Error: " not in found, found[-3000:]


def _addresses(process: subprocess.Popen[str], log: Path) -> tuple[str, str]:
    start = time.monotonic()
    while time.monotonic() - start < READY and process.poll() is None:
        for line in log.read_text().splitlines():
            if '"listening' in line:
                found = json.loads(line)
                return found["address"], found["admin_address"]
        time.sleep(0.02)
    raise TimeoutError(log.read_text())


@pytest.fixture(scope="session")
def served(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server for all tests that leave it as it was: starting one takes seconds."""
    folder, options = (
        tmp_path_factory.mktemp("server"),
        ("--max-requests", "40", "--stall-timeout", "3"),
    )
    with serving(directory, folder, *options, module="tests.serving.faulty") as made:
        yield made
