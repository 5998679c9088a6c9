"""Heads of requests are bounded in bytes, in number and in time."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
import uvicorn

from ingot.serving.server import protocol
from ingot.serving.server.protocol import LimitedHttpProtocol
from tests.serving.conftest import Served


@pytest.mark.parametrize(
    "head",
    [
        b"GET /healthz HTTP/1.1\r\nx: " + b"a" * 100_000,
        b"GET /healthz HTTP/1.1\r\n" + b"x: a\r\n" * 200 + b"\r\n",
        b"GET /" + b"a" * 100_000,
        b"\r\n" * 50_000,
    ],
    ids=["long header", "many headers", "long path", "nothing"],
)
def test_heads_are_bounded(served: Served, head: bytes) -> None:
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        connection.settimeout(10)
        connection.sendall(head)
        try:
            found = connection.recv(100)
        except ConnectionError:
            found = b""
    assert found == b"" or found.startswith(b"HTTP/1.1 400")
    assert served.ready()


async def respond(scope: Any, receive: Any, send: Any) -> None:
    assert scope[protocol.TRANSPORT].get_write_buffer_size() == 0
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def test_a_head_that_takes_too_long_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.3)
    config = uvicorn.Config(
        respond, http=LimitedHttpProtocol, lifespan="off", log_config=None, ws="none"
    )

    async def run() -> None:
        server = uvicorn.Server(config)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            config.load()
            server.lifespan = config.lifespan_class(config)
            await server.startup([listening])
            address = listening.getsockname()
            prompt_only = await asyncio.open_connection(*address)
            drip = await asyncio.open_connection(*address)
            quick = await asyncio.open_connection(*address)
            quick[1].write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await quick[0].readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 204")
            loop = asyncio.get_running_loop()
            start, dropped = loop.time(), False
            drip[1].write(b"GET / HTTP/1.1\r\n")
            while not dropped and loop.time() - start < 5:
                drip[1].write(b"a: b\r\n")
                await asyncio.sleep(0.05)
                dropped = drip[0].at_eof() or drip[0].exception() is not None
            assert dropped
            assert loop.time() - start < 3
            assert await prompt_only[0].read() == b""
            quick[1].write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")  # kept, and not late
            assert (await quick[0].readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 204")
            for _, writer in (prompt_only, drip, quick):
                writer.close()
            await asyncio.sleep(0.01)
            server.should_exit = True
            await server.shutdown()

    asyncio.run(run())
