"""Serve model directories on loopback as the Hugging Face hub does, for tests and the README.

    with hub.serving({"org/name": directory}) as endpoint:
        subprocess.run([...], env={**os.environ, "HF_ENDPOINT": endpoint})

It implements what `ingot pull` uses: the listing of a repository with sizes and hashes, and file
downloads with ranges. Files of at least `LFS_SIZE` bytes are listed with a SHA-256, as files in Git
LFS are, smaller ones with their Git object id. Faults can be injected: bytes that differ from the
listed hash, or a connection that hangs after some bytes.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

LFS_SIZE = 1 << 20
_LISTING = re.compile(r"/api/models/([\w.-]+/[\w.-]+)/revision/([\w.-]+)")
_FILE = re.compile(r"/([\w.-]+/[\w.-]+)/resolve/([0-9a-f]{40})/([\w./-]+)")


@dataclass
class Repository:
    """A directory that is served, and the faults to inject."""

    directory: Path
    corrupt: set[str] = field(default_factory=set[str])
    """Files whose bytes differ from the listed hash."""
    stall: dict[str, int] = field(default_factory=dict[str, int])
    """Files whose connection hangs after this many bytes, until the entry is removed."""
    requests: list[tuple[str, str | None]] = field(default_factory=list[tuple[str, str | None]])
    """The downloads so far: the file and its Range header."""

    @cached_property
    def listing(self) -> dict[str, dict[str, Any]]:
        """The metadata of every file, by name."""
        files = sorted(path for path in self.directory.rglob("*") if path.is_file())
        return {str(path.relative_to(self.directory)): _metadata(path) for path in files}

    @property
    def commit(self) -> str:
        """A hash of the listing."""
        return hashlib.sha1(json.dumps(self.listing, sort_keys=True).encode()).hexdigest()


@contextmanager
def serving(repositories: dict[str, Repository | Path]) -> Generator[str]:
    """Serve the repositories while the block runs; yields the endpoint."""
    served = {
        name: repo if isinstance(repo, Repository) else Repository(repo)
        for name, repo in repositories.items()
    }

    class Handler(_Handler):
        repositories = served

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _metadata(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    with path.open("rb") as file:
        if size >= LFS_SIZE:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return {"size": size, "lfs": {"sha256": digest, "size": size, "pointerSize": 134}}
        git = hashlib.sha1(f"blob {size}\0".encode() + file.read())
    return {"size": size, "blobId": git.hexdigest()}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    repositories: dict[str, Repository]

    def do_GET(self) -> None:
        with suppress(ConnectionError):  # the client may have been killed
            self._respond()

    def _respond(self) -> None:
        path = self.path.partition("?")[0]
        if match := _LISTING.fullmatch(path):
            self._send_listing(*match.groups())
        elif match := _FILE.fullmatch(path):
            self._send_file(*match.groups())
        else:
            self._send_error(404, "EntryNotFound")

    do_HEAD = do_GET

    def _send_listing(self, name: str, revision: str) -> None:
        repository = self.repositories.get(name)
        if repository is None:
            self._send_error(404, "RepoNotFound")
        elif revision not in ("main", repository.commit):
            self._send_error(404, "RevisionNotFound")
        else:
            listing = repository.listing.items()
            siblings = [{"rfilename": file, **metadata} for file, metadata in listing]
            body = {"id": name, "sha": repository.commit, "siblings": siblings}
            self._send(200, {"Content-Type": "application/json"}, json.dumps(body).encode())

    def _send_file(self, name: str, commit: str, file: str) -> None:
        repository = self.repositories.get(name)
        if repository is None or commit != repository.commit or file not in repository.listing:
            self._send_error(404, "EntryNotFound")
            return
        metadata = repository.listing[file]
        content = (repository.directory / file).read_bytes()
        if file in repository.corrupt:
            content = bytes([content[0] ^ 1]) + content[1:]
        headers = {
            "ETag": f'"{metadata.get("blobId") or metadata["lfs"]["sha256"]}"',
            "X-Repo-Commit": commit,
            "Accept-Ranges": "bytes",
        }
        wanted = self.headers.get("Range")
        start = int(wanted.removeprefix("bytes=").partition("-")[0]) if wanted else 0
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        if self.command == "GET":
            repository.requests.append((file, wanted))
        body = content[start:]
        self._send_head(206 if start else 200, headers, len(body))
        if self.command == "HEAD":
            return
        sent = repository.stall.get(file, len(body))
        self.wfile.write(body[:sent])
        while file in repository.stall:
            time.sleep(0.01)
        self.wfile.write(body[sent:])

    def _send_error(self, status: int, code: str) -> None:
        self._send(status, {"X-Error-Code": code, "X-Error-Message": code}, b"")

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self._send_head(status, headers, len(body))
        if self.command == "GET":
            self.wfile.write(body)

    def _send_head(self, status: int, headers: dict[str, str], size: int) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(size))
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""
