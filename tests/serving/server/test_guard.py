"""Limits on request bodies, and authentication."""

from __future__ import annotations

import socket
from pathlib import Path

from ingot.serving.server.guard import MAX_BODY
from ingot.serving.server.keys import format_line
from tests.serving.conftest import Served, serving


def test_large_bodies_and_other_content_types_are_rejected(served: Served) -> None:
    large = b'{"prompt": "' + b"a" * MAX_BODY + b'"}'
    assert served.call("/v1/completions", large)[0] == 413
    # Chunked, without a content length.
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        connection.sendall(head + b"transfer-encoding: chunked\r\n\r\n")
        try:
            for _ in range(MAX_BODY // 65536 + 4):
                connection.sendall(b"10000\r\n" + b"a" * 65536 + b"\r\n")
            connection.sendall(b"0\r\n\r\n")
        except ConnectionError:
            pass
        else:
            assert connection.recv(100).startswith(b"HTTP/1.1 413")
    assert served.call("/v1/completions", b"prompt=a", **{"content-type": "text/plain"})[0] == 415


def test_api_keys_authenticate_and_separate_caches(directory: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(
        f"{format_line('alice', 'a')}\n{format_line('bob', 'b')}\n"
        f"{format_line('carol', 'c')} requests=2\n"
    )
    with serving(directory, tmp_path, "--api-key-file", str(keys)) as served:
        prompt = "A prompt of more than one block, which is thirty-two tokens, so it is cached."
        body = {"prompt": prompt, "max_tokens": 1}

        def cached(key: str) -> int:
            status, found, _ = served.call("/v1/completions", body, key)
            assert status == 200, found
            return found["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert cached("a") == 0
        assert cached("a") > 0
        assert cached("b") == 0, "tenants do not share their caches"
        for key in (None, "wrong", "a" * 5000, "\xff"):
            status, answer, headers = served.call("/v1/completions", body, key)
            assert status == 401
            assert headers["www-authenticate"] == "Bearer"
            assert answer["error"]["code"] == "invalid_api_key"
        assert served.call("/v1/models")[0] == 401
        assert served.call("/healthz")[0] == served.call("/v2/health/ready")[0] == 200
        status, answer, _ = served.call("/v2/models/small")
        assert (status, list(answer)) == (401, ["error"])
        assert served.client("a").models.list().data[0].id == "small"
        assert cached("c") == 0
        assert cached("c") > 0
        status, answer, headers = served.call("/v1/completions", body, "c")
        assert status == 429
        assert "2 requests per minute" in answer["error"]["message"]
        assert 20 <= int(headers["retry-after"]) <= 30
        assert cached("a") > 0, "the limit of a tenant does not affect others"
        assert "Bearer" not in served.log.read_text()
