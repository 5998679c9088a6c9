"""Engine processes on a Ray cluster.

Each replica has a bundle of a placement group, spread over the nodes. A worker is an actor on it
that connects back to the HTTP process over TCP; from there on it is like a local one, with the same
messages. If the actor or its node dies, the connection closes, or TCP's keepalive misses it, and
the supervisor starts the next one. Ray does not restart it: requests are continued by the
`ReplicaSet`, which has to know when a worker is lost.

**The connection.** The listener of a worker exists until the worker has connected, at the address
of this node in the cluster. A peer has to send 32 random bytes, which the actor was given, before
anything that it sends is decoded. They are compared in constant time; peers that send others, or
nothing for `HANDSHAKE_TIMEOUT_S`, are disconnected. The answer is the time of this process, on
whose clock deadlines are.

All nodes need ingot and the model directory, at the same path.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import math
import secrets
import socket
import struct
import threading
import time
from importlib import import_module
from typing import Any

import msgspec

from ingot.core.errors import ConfigError, IngotError
from ingot.core.log import logger

START_TIMEOUT_S = 120.0
"""How long a worker may take to be scheduled and to connect; loading the model comes after."""
HANDSHAKE_TIMEOUT_S = 5.0
MAX_HANDSHAKES = 64
TOKEN_BYTES = 32
_TIME = struct.Struct("<d")
_log = logger(__name__)


class RayCluster:
    """Starts workers on the nodes of a cluster, which all deployments of this process use."""

    _lock = threading.Lock()
    _num_connected = 0

    def __init__(self, num_replicas: int) -> None:
        self._num_replicas = num_replicas
        self._host = ""
        self._group: Any = None  # the placement group, once connected

    async def launch(self, replica: int, settings: str) -> tuple[socket.socket, RayWorker]:
        """Start the worker of a replica; return its connection and a handle to kill it."""
        await asyncio.to_thread(self._reserve)
        token = secrets.token_bytes(TOKEN_BYTES)
        with socket.create_server((self._host, 0)) as listener:
            listener.setblocking(False)
            address = listener.getsockname()[:2]
            try:
                worker = await asyncio.to_thread(self._start, replica, address, token, settings)
            except Exception as error:  # Ray's have no common type
                message = f"Ray did not start a replica: {str(error)[:500]}"
                raise IngotError(message, hint="check the cluster: `ray status`") from error
            try:
                connection = await _wait_for_worker(listener, token, worker)
            except BaseException:
                worker.kill()
                raise
        return connection, worker

    def close(self) -> None:
        """Return the resources; end a cluster that was started here."""
        with self._lock:
            if self._group is not None:
                ray = _ray()
                ray.util.remove_placement_group(self._group)
                self._group = None
                RayCluster._num_connected -= 1
                if not RayCluster._num_connected:
                    ray.shutdown()

    def _reserve(self) -> None:
        """Connect to the cluster, or start one on this machine, and reserve resources on it."""
        with self._lock:
            if self._group is not None:
                return
            ray = _ray()
            options = {"include_dashboard": False, "logging_level": logging.ERROR}
            try:
                ray.init(log_to_driver=False, ignore_reinit_error=True, **options)
            except (RuntimeError, ConnectionError, OSError, ValueError) as error:
                hint = "check RAY_ADDRESS, and the cluster: `ray status`"
                raise IngotError(f"no connection to Ray: {str(error)[:500]}", hint=hint) from error
            self._host = ray.util.get_node_ip_address()
            cpus = share_of_cpus(ray.cluster_resources().get("CPU", 1.0), self._num_replicas)
            bundles = [{"CPU": cpus} for _ in range(self._num_replicas)]
            self._group = ray.util.placement_group(bundles, strategy="SPREAD")
            RayCluster._num_connected += 1
            nodes = len(ray.nodes())
            _log.info("Ray cluster of %d nodes: %g CPUs for each replica", nodes, cpus)

    def _start(
        self, replica: int, address: tuple[str, int], token: bytes, settings: str
    ) -> RayWorker:
        strategies = import_module("ray.util.scheduling_strategies")
        bundle = strategies.PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=replica
        )
        cpus = self._group.bundle_specs[replica]["CPU"]
        actor = (
            _ray()
            .remote(_WorkerActor)
            .options(num_cpus=cpus, scheduling_strategy=bundle, max_restarts=0)
        )
        return RayWorker(actor.remote(), address, token, settings)


def share_of_cpus(cpus: float, num_replicas: int) -> float:
    """Return the CPUs that each replica reserves: whole ones, if there are enough.

    >>> share_of_cpus(16.0, 5), share_of_cpus(2.0, 3)
    (3, 0.66)
    """
    return int(cpus / num_replicas) or math.floor(100 * cpus / num_replicas) / 100


class RayWorker:
    """A worker on the cluster, as `subprocess.Popen` is one on this machine."""

    def __init__(self, actor: Any, address: tuple[str, int], token: bytes, settings: str) -> None:
        self._actor = actor
        self._status: int | None = None
        self._result = actor.serve.remote(address, token, settings)
        # Calls of Ray may block while a node does not answer; the event loop must not.
        threading.Thread(target=self._wait, daemon=True).start()

    def poll(self) -> int | None:
        """Return the exit status; None while it runs."""
        return self._status

    def kill(self) -> None:
        """Kill the process."""
        threading.Thread(target=self._kill, daemon=True).start()

    def _wait(self) -> None:
        try:
            status = _ray().get(self._result)
        except Exception as error:  # the actor died
            _log.debug("%s", error)
            status = -1
        self._kill()
        self._status = status

    def _kill(self) -> None:
        with contextlib.suppress(Exception):  # it is dead, or the cluster is
            _ray().kill(self._actor)


class _WorkerActor:
    """The actor: its process is the worker."""

    def serve(self, address: tuple[str, int], token: bytes, settings: str) -> int:
        """Serve until the other side closes; return the exit status."""
        from ingot.serving.workers import worker

        connection, offset = connect_back(address, token)
        decoded = msgspec.json.decode(settings, type=worker.WorkerSettings)
        return worker.serve(decoded, connection, clock=lambda: time.monotonic() + offset)


def connect_back(address: tuple[str, int], token: bytes) -> tuple[socket.socket, float]:
    """Connect to the HTTP process; return how far its clock is ahead of this machine's, too."""
    with contextlib.ExitStack() as closing:
        connection = socket.create_connection(address, timeout=HANDSHAKE_TIMEOUT_S)
        closing.enter_context(connection)
        connection.sendall(token)
        answer = b""
        while len(answer) < _TIME.size:
            data = connection.recv(_TIME.size - len(answer))
            if not data:
                raise ConnectionError("the HTTP process did not accept the connection")
            answer += data
        connection.settimeout(None)
        _keep_alive(connection)
        closing.pop_all()  # it stays open
        return connection, _TIME.unpack(answer)[0] - time.monotonic()


async def accept(listener: socket.socket, token: bytes) -> socket.socket:
    """Return the connection of the first peer that sends the token; others are closed."""
    loop = asyncio.get_running_loop()
    accepted: asyncio.Future[socket.socket] = loop.create_future()
    handshakes: set[asyncio.Task[None]] = set()

    async def shake_hands(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as closing:
            closing.enter_context(connection)
            if await _sends_token(connection, token) and not accepted.done():
                connection.send(_TIME.pack(time.monotonic()))
                accepted.set_result(connection)
                closing.pop_all()  # it stays open

    async def listen() -> None:
        while True:
            connection, _ = await loop.sock_accept(listener)
            if len(handshakes) >= MAX_HANDSHAKES:
                connection.close()
                continue
            task = loop.create_task(shake_hands(connection))
            handshakes.add(task)
            task.add_done_callback(handshakes.discard)

    listening = loop.create_task(listen())
    try:
        connection = await accepted
    finally:
        for task in (listening, *handshakes):
            task.cancel()
        await asyncio.gather(listening, *handshakes, return_exceptions=True)
    _keep_alive(connection)
    return connection


async def _sends_token(connection: socket.socket, token: bytes) -> bool:
    connection.setblocking(False)
    given, loop = b"", asyncio.get_running_loop()
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            while len(given) < len(token):
                data = await loop.sock_recv(connection, len(token) - len(given))
                if not data:
                    return False
                given += data
    except (TimeoutError, OSError):
        return False
    return hmac.compare_digest(given, token)


async def _wait_for_worker(
    listener: socket.socket, token: bytes, worker: RayWorker
) -> socket.socket:
    """Return the worker's connection; raise an error if it dies, or is not scheduled in time."""
    accepting = asyncio.ensure_future(accept(listener, token))
    deadline = time.monotonic() + START_TIMEOUT_S
    try:
        while worker.poll() is None and time.monotonic() < deadline:
            done, _ = await asyncio.wait((accepting,), timeout=0.1)
            if done:
                return accepting.result()
    finally:
        accepting.cancel()
    if worker.poll() is not None:
        raise IngotError(
            "the actor of a replica died before it connected",
            hint="see its log: `ray logs`; ingot must be installed on all nodes",
        )
    raise IngotError(
        f"Ray did not start a replica within {START_TIMEOUT_S:g} s",
        hint="`ray status` shows whether the cluster has free CPUs; lower --replicas",
    )


def _keep_alive(connection: socket.socket) -> None:
    """Notice within 8 seconds if the other machine is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 2), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _ray() -> Any:
    try:
        return import_module("ray")
    except ImportError as error:
        raise ConfigError("--ray needs ray", hint='pip install "ingot[ray]"') from error
