"""Workers that connect over TCP, and a server on a real Ray cluster."""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from ingot.core.errors import ConfigError
from ingot.serving.workers import cluster
from ingot.serving.workers.cluster import RayCluster, accept, connect_back

TOKEN = secrets.token_bytes(cluster.TOKEN_BYTES)


def listen() -> socket.socket:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    return listener


def test_only_the_peer_with_the_token_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "HANDSHAKE_TIMEOUT_S", 0.3)

    async def run() -> None:
        with listen() as listener:
            accepting = asyncio.create_task(accept(listener, TOKEN))
            address = listener.getsockname()

            def refused(content: bytes) -> None:
                with socket.create_connection(address, timeout=5) as peer:
                    peer.sendall(content)
                    assert peer.recv(8) == b""

            wrong = [b"", TOKEN[:-1], bytes(len(TOKEN)), TOKEN[:-1] + bytes([TOKEN[-1] ^ 1])]
            for content in wrong:
                await asyncio.to_thread(refused, content)
            assert not accepting.done()
            ours, offset = await asyncio.to_thread(connect_back, address, TOKEN)
            theirs = await accepting
            assert abs(offset) < 1, "both clocks are this machine's"
            ours.sendall(b"frame")
            await asyncio.sleep(0.05)
            assert theirs.recv(99) == b"frame"
            ours.close()
            theirs.close()

    asyncio.run(run())


def test_silent_peers_do_not_keep_a_worker_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "MAX_HANDSHAKES", 3)

    async def run() -> None:
        with listen() as listener:
            accepting = asyncio.create_task(accept(listener, TOKEN))
            address = listener.getsockname()
            silent = [socket.create_connection(address) for _ in range(3)]
            await asyncio.sleep(0.05)
            with pytest.raises(ConnectionError):  # there are too many
                await asyncio.to_thread(connect_back, address, TOKEN)
            silent.pop().close()
            await asyncio.sleep(0.05)
            ours, _ = await asyncio.to_thread(connect_back, address, TOKEN)
            (await accepting).close()
            ours.close()
            for peer in silent:
                peer.settimeout(1)
                assert peer.recv(1) == b"", "closed with the listener"
                peer.close()

    asyncio.run(run())


def test_the_clock_of_another_machine() -> None:
    """Deadlines are times of the HTTP process, whose machine started at another time."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            peer, _ = listener.accept()
            with peer:
                assert peer.recv(99) == TOKEN
                peer.sendall(struct.pack("<d", time.monotonic() + 1000))

        thread = threading.Thread(target=answer)
        thread.start()
        connection, offset = connect_back(listener.getsockname(), TOKEN)
        thread.join()
        connection.close()
    assert offset == pytest.approx(1000, abs=1)


@pytest.mark.skipif(find_spec("ray") is not None, reason="ray is installed")
def test_without_ray_there_is_a_hint() -> None:
    with pytest.raises(ConfigError, match="needs ray") as error:
        asyncio.run(RayCluster(1).launch(0, "{}"))
    assert "ingot[ray]" in error.value.hint


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")
@pytest.mark.skipif(shutil.which("unshare") is None, reason="no network namespaces")
def test_a_server_on_a_ray_cluster(
    directory: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """In a network of its own: Ray listens on all interfaces."""
    program = [sys.executable, "-m", "tests.serving.on_ray", str(directory), str(tmp_path)]
    inside = ["sh", "-c", 'ip link set lo up && exec "$@"', "sh", *program]
    run = subprocess.run(["unshare", "-n", *inside], capture_output=True, text=True, timeout=400)
    assert run.returncode == 0, run.stdout + run.stderr
    for name, value in json.loads(run.stdout.splitlines()[-1]).items():  # raylet's lines before it
        record_property(f"two replicas, {name}", value)
