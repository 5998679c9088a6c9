"""Replicas: several engine processes of one model, which are one engine to the server.

A `ReplicaSet` sends each request to one of its engines, by the policy of `ingot.serving.fleet`:
where the prompt's prefix is cached and load is low. With one replica it is that engine.

**A lost engine.** If an engine process dies, or is killed because it stalled, each of its requests
is sent to another replica with the tokens it has generated so far, and continues there. A token
depends only on the tokens before it, the request's parameters and its seed, so the text and the
log-probabilities are bitwise those of an undisturbed run, and the client only notices a pause. If
no replica is ready, requests wait for one until their own deadline.

**A request that kills engines** must not kill them all, nor fail the requests that it runs with.
One that was lost twice without a new token in between is a suspect. Suspects are sent one at a
time, the next when the one before has a token: the others are cleared, and only the culprit reaches
`MAX_STUCK` losses, or `MAX_LOSSES` with tokens in between, and fails.

**Scaling.** `resize` starts engines, or drains some: these get no new requests, and stop when they
have finished those they have.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import count

from ingot.core.errors import IngotError
from ingot.core.log import logger
from ingot.serving.engine.adapters import LoadedAdapter
from ingot.serving.engine.output import EngineStats
from ingot.serving.engine.request import AnyRequest, FinishReason
from ingot.serving.engine.scheduler import SchedulerConfig
from ingot.serving.fleet.autoscaler import LoadSample
from ingot.serving.fleet.router import Router, RouterConfig
from ingot.serving.workers import wire
from ingot.serving.workers.cluster import RayCluster
from ingot.serving.workers.engine_client import (
    EngineClient,
    EngineUnavailable,
    Flushable,
    OutputHandler,
    Outstanding,
    flush,
)
from ingot.serving.workers.supervisor import Supervisor
from ingot.serving.workers.worker import WorkerSettings

MAX_STUCK = 4
MAX_LOSSES = 16
_log = logger(__name__)


class ReplicaSet:
    """Engine processes of one model, their supervisors, and the requests they have."""

    def __init__(
        self,
        *,
        num_replicas: int = 1,
        max_replicas: int | None = None,
        stall_timeout: float = 60.0,
        cluster: RayCluster | None = None,
    ) -> None:
        """Start with `num_replicas`; `resize` can start others, up to `max_replicas`."""
        self._num_initial = num_replicas
        self.engines = [EngineClient() for _ in range(max_replicas or num_replicas)]
        self.supervisors: dict[int, Supervisor] = {}
        """Those of the workers by replica; none before `run` and after it."""
        self.load: LoadSample | None = None
        """The latest sample."""
        self.startup_s: float | None = None
        """Seconds that the last worker took to load the model."""
        self._draining: set[int] = set()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._exited = asyncio.Event()
        self._error: BaseException | None = None
        self._settings: WorkerSettings | None = None
        self._stall_timeout, self._cluster = stall_timeout, cluster
        self._num_earlier_restarts = 0
        self.on_ready = lambda: None
        """Called when a worker has loaded the model."""
        self.num_retries = 0
        """How often a request was sent to another engine since the start."""
        self.adapters: dict[str, LoadedAdapter] = {}
        """The adapters by name; all replicas have the same."""
        self._adapter_lock = asyncio.Lock()
        self._synchronizing: set[asyncio.Task[None]] = set()
        self._router: Router | None = None  # from the first worker that is ready
        self._waiting: dict[int, Outstanding] = {}  # for an engine, or as suspects
        self._probe: int | None = None  # the suspect that runs
        self._stop_reason: str | None = None
        self._ids = count(1)
        for index, engine in enumerate(self.engines):
            engine.on_ready = partial(self._on_ready, index)
            engine.on_lost = partial(self._on_lost, index)
            engine.on_first_token = self._on_first_token
            engine.on_finished = self._on_finished

    # State

    @property
    def ready(self) -> bool:
        """Whether a replica accepts requests."""
        return self.num_ready > 0

    @property
    def num_ready(self) -> int:
        """Number of replicas that accept requests."""
        return 0 if self._router is None else self._router.num_active

    @property
    def num_replicas(self) -> int:
        """Number of replicas that run or start, without those that are drained."""
        return len(self.supervisors.keys() - self._draining)

    @property
    def info(self) -> wire.EngineReady | None:
        """Model and KV-cache sizes of a replica, once loaded; kept when workers die."""
        return self._first().info

    @property
    def status(self) -> str:
        """Progress of a worker before one is ready."""
        return self._first().status

    @property
    def stats(self) -> EngineStats | None:
        """The sum over the replicas."""
        all_stats = [engine.stats for engine in self.engines if engine.stats is not None]
        if len(all_stats) < 2:
            return all_stats[0] if all_stats else None
        names = EngineStats.__struct_fields__
        return EngineStats(**{n: sum([getattr(one, n) for one in all_stats]) for n in names})

    @property
    def num_outstanding(self) -> int:
        """Number of requests that wait for an engine."""
        return len(self._waiting) + sum(engine.num_outstanding for engine in self.engines)

    @property
    def restarts(self) -> int:
        """Restarts of all workers since the start."""
        return self._num_earlier_restarts + sum(one.restarts for one in self.supervisors.values())

    @property
    def stalled(self) -> bool:
        """Whether no worker that is ready completes steps."""
        ready = [one for index, one in self.supervisors.items() if self.engines[index].ready]
        return self.ready and all(supervisor.stalled for supervisor in ready)

    def _first(self) -> EngineClient:
        """Return a replica that is ready, or else one that was."""
        engines = self.engines
        return max(engines, key=lambda engine: (engine.ready, engine.info is not None))

    # Requests

    def new_id(self) -> int:
        """Return a request id that was not used before."""
        return next(self._ids)

    def add_request(self, request: AnyRequest, handler: OutputHandler, session: str = "") -> None:
        """Send a request to an engine; its outputs go to `handler` until it finishes.

        Requests of the same `session`, if it has a name, prefer the same replica.
        """
        self.add_requests([(request, handler)], session)

    def add_requests(
        self, requests: Sequence[tuple[AnyRequest, OutputHandler]], session: str = ""
    ) -> None:
        """Send requests at once, so that engines can compute them in few batches."""
        if not self.ready:
            for _, handler in requests:
                handler.on_error(503, "the engine is not available", "retry in a few seconds")
            return
        self._submit([Outstanding(request, handler, session) for request, handler in requests])

    def abort(self, id: int, reason: FinishReason) -> None:
        """Abort a request; its handler receives nothing more."""
        if self._waiting.pop(id, None) is None and self._router is not None:
            owner = self._router.owner(id)
            if owner is not None:
                self.engines[owner].abort(id, reason)

    def _submit(self, requests: Iterable[Outstanding]) -> None:
        """Send requests, and those of lost engines, to engines that are ready."""
        self._waiting.update({one.request.id: one for one in requests})
        router = self._router
        if router is None or not self.ready:
            return
        chosen = [(one, router.choose(one.request, one.session)) for one in self._next_requests()]
        for one, replica in chosen:
            assert replica is not None
            if self._has_other_adapter(replica, one):
                self._fail([one], f"adapter '{one.request.adapter}' changed while it was used")
        batches: dict[int, list[Outstanding]] = {}
        for one, replica in chosen:
            assert replica is not None
            if self._waiting.pop(one.request.id, None) is None:  # it failed just now
                self._on_finished(one.request.id)
                continue
            self.num_retries += one.num_losses > 0
            batches.setdefault(replica, []).append(one)
        for replica, batch in batches.items():
            self.engines[replica].add_requests(batch)

    def _next_requests(self) -> list[Outstanding]:
        """Return the requests to send now: one suspect, unless one runs, and all others."""
        suspects = [one for one in self._waiting.values() if one.num_stuck > 1]
        if suspects and self._probe is None:
            self._probe = suspects.pop(0).request.id
        held = {one.request.id for one in suspects}
        return [one for id, one in self._waiting.items() if id not in held]

    def _end_probe(self, id: int) -> None:
        if id == self._probe:
            self._probe = None
            asyncio.get_running_loop().call_soon(self._submit, ())

    def _has_other_adapter(self, replica: int, one: Outstanding) -> bool:
        """Whether the request's tokens are those of another adapter than the replica has."""
        digest = self.engines[replica].adapter_digest(one.request.adapter)
        return bool(one.request.generated) and digest != one.adapter_digest

    def _on_first_token(self, id: int) -> None:
        assert self._router is not None
        self._router.start_decoding(id)
        self._end_probe(id)

    def _on_finished(self, id: int) -> None:
        assert self._router is not None
        self._router.finish(id)
        self._end_probe(id)
        if self._draining:
            asyncio.get_running_loop().call_soon(self._stop_drained)

    # Workers

    async def run(self, settings: WorkerSettings) -> None:
        """Run the workers until `stop` is called; raise the error of a model that cannot be
        loaded. It may be called again, after it has returned."""
        self._router, self._stop_reason, self._error = None, None, None
        self._exited.clear()
        self.supervise(settings)
        for replica in self.supervisors:
            self._start(replica)
        await self._exited.wait()
        if self._cluster is not None:
            await asyncio.to_thread(self._cluster.close)
        if self._error is not None:
            raise self._error

    def supervise(self, settings: WorkerSettings) -> None:
        """Create the supervisors of the first workers, which are not started yet."""
        self._settings = settings
        for replica in range(self._num_initial):
            self._supervise(replica)

    def _supervise(self, replica: int) -> None:
        assert self._settings is not None
        launch = None if self._cluster is None else partial(self._cluster.launch, replica)
        self.supervisors[replica] = Supervisor(
            self.engines[replica], self._settings, self._stall_timeout, launch
        )

    def _start(self, replica: int) -> None:
        task = asyncio.create_task(self.supervisors[replica].run())
        self._tasks[replica] = task
        task.add_done_callback(partial(self._on_exit, replica))

    def _on_exit(self, replica: int, task: asyncio.Task[None]) -> None:
        """A supervisor has ended: it was stopped, or its worker cannot load the model."""
        del self._tasks[replica]
        self._num_earlier_restarts += self.supervisors.pop(replica).restarts
        self._draining.discard(replica)
        error = task.exception()
        if error is not None and self.ready:
            _log.error("replica %d could not be started: %s", replica, error)
        elif error is not None:
            self._error = self._error or error
            self.stop("another replica cannot load the model")
        if not self._tasks:
            self._exited.set()

    def stop(self, reason: str) -> None:
        """Stop the workers and start no others; `run` returns when they have exited."""
        if self._stop_reason is None:
            self._stop_reason = reason
        for supervisor in list(self.supervisors.values()):
            supervisor.stop(self._stop_reason)
        self._fail(list(self._waiting.values()), self._stop_reason)

    def _on_ready(self, replica: int) -> None:
        engine = self.engines[replica]
        self.startup_s = time.monotonic() - self.supervisors[replica].started_at
        if self._router is None:
            assert engine.info is not None
            self._router = _create_router(engine.info, len(self.engines))
            self.adapters = dict(engine.adapters)
        if _digests(engine.adapters) == _digests(self.adapters):
            self._activate(replica)
        else:
            task = asyncio.create_task(self._synchronize(replica))
            self._synchronizing.add(task)
            task.add_done_callback(self._synchronizing.discard)

    def _activate(self, replica: int) -> None:
        assert self._router is not None
        if replica in self._draining:
            return
        self._router.add(replica)
        self._submit(())
        self.on_ready()

    def _on_lost(self, replica: int, lost: list[Outstanding], reason: str) -> None:
        if self._router is not None:
            self._router.lose(replica)
        for one in lost:
            one.prepare_retry()
            self._waiting[one.request.id] = one
            self._end_probe(one.request.id)
        if self._stop_reason is not None:
            self._fail(lost, self._stop_reason)
            return
        if replica in self._draining:
            asyncio.get_running_loop().call_soon(self._stop_drained)
        failed = [o for o in lost if o.num_stuck >= MAX_STUCK or o.num_losses >= MAX_LOSSES]
        self._fail(failed, f"{reason}, as others before that had this request")
        self._submit(())

    def _fail(self, requests: Sequence[Outstanding], reason: str) -> None:
        """Fail requests that wait. One that fails aborts the others of its response."""
        clients: set[Flushable] = set()
        for one in requests:
            if self._waiting.pop(one.request.id, None) is not None:
                one.handler.on_error(503, reason, "send the request again: engines are restarted")
                clients.add(one.handler.client)
        flush(clients)

    # Scaling

    def resize(self, num_replicas: int) -> None:
        """Start or drain replicas until their number is `num_replicas`."""
        assert 1 <= num_replicas <= len(self.engines)
        while self.num_replicas < num_replicas and self._add_replica():
            pass
        while self.num_replicas > num_replicas:
            loads = {} if self._router is None else self._router.loads
            candidates = self.supervisors.keys() - self._draining
            replica = min(candidates, key=lambda r: (loads.get(r, -1), -r))
            self._draining.add(replica)
            if self._router is not None:
                self._router.drain(replica)
        self._stop_drained()

    def _add_replica(self) -> bool:
        """Use one again that is drained, or start one; return False if all others are stopping."""
        for replica in self._draining:
            if not self.supervisors[replica].is_stopping:
                self._draining.remove(replica)
                if self.engines[replica].ready:
                    self._activate(replica)
                return True
        for replica in range(len(self.engines)):
            if replica not in self.supervisors:
                self._supervise(replica)
                self._start(replica)
                return True
        return False

    def _stop_drained(self) -> None:
        """Stop the replicas that have finished their requests, or died."""
        for replica in list(self._draining):
            engine, supervisor = self.engines[replica], self.supervisors[replica]
            if not engine.num_outstanding and not supervisor.is_stopping:
                supervisor.stop("the replica is not needed any more")

    def sample_load(self, now: float) -> LoadSample:
        """Return the load since the last sample, and keep it."""
        delays: list[float] = []
        used = total = 0
        for engine in self.engines:
            delays += engine.take_queue_delays(now)
            if engine.stats is not None:
                used += engine.stats.num_used_blocks if engine.num_outstanding else 0
                total += engine.stats.num_blocks
        delays.sort()
        delay = delays[len(delays) * 9 // 10] if delays else 0.0
        self.load = LoadSample(now, self.num_replicas, delay, used / max(total, 1))
        return self.load

    # Adapters

    async def load_adapter(self, name: str, directory: str, replace: bool) -> LoadedAdapter:
        """Load an adapter of a directory; raise the error of one that cannot be loaded."""
        async with self._adapter_lock:
            engines = self._ready_engines()
            results = await asyncio.gather(
                *[engine.load_adapter(name, directory, replace) for engine in engines],
                return_exceptions=True,
            )
            # An engine that was lost meanwhile gets the adapter when it is back.
            errors = [one for one in results if isinstance(one, BaseException)]
            errors.sort(key=lambda error: isinstance(error, EngineUnavailable))
            loaded = [one for one in results if isinstance(one, LoadedAdapter)]
            if errors and not (loaded and isinstance(errors[0], EngineUnavailable)):
                if name not in self.adapters:
                    await self._unload(name, engines)
                raise errors[0]
            self._set_adapters({**self.adapters, name: loaded[0]})
            return loaded[0]

    async def unload_adapter(self, name: str) -> None:
        """Remove the name of an adapter; requests that use it finish."""
        async with self._adapter_lock:
            await self._unload(name, self._ready_engines())
            self._set_adapters({n: one for n, one in self.adapters.items() if n != name})

    async def _unload(self, name: str, engines: Sequence[EngineClient]) -> None:
        removals = [engine.unload_adapter(name) for engine in engines if name in engine.adapters]
        await asyncio.gather(*removals, return_exceptions=True)

    def _ready_engines(self) -> list[EngineClient]:
        engines = [engine for engine in self.engines if engine.ready]
        if not engines:
            raise EngineUnavailable("the engine is not available", hint="retry in a few seconds")
        return engines

    def _set_adapters(self, adapters: dict[str, LoadedAdapter]) -> None:
        """Set the adapters of all engines, those included that will start."""
        self.adapters = adapters
        for engine in self.engines:
            if not engine.ready:
                engine.adapters = dict(adapters)

    async def _synchronize(self, replica: int) -> None:
        """Load and unload the adapters that changed while a worker started, then use it."""
        engine = self.engines[replica]
        async with self._adapter_lock:
            wanted = self.adapters
            for name in engine.adapters.keys() - wanted.keys():
                await self._unload(name, [engine])
            for name, one in wanted.items():
                if engine.adapter_digest(name) == one.digest:
                    continue
                try:
                    await engine.load_adapter(name, one.directory, name in engine.adapters)
                except IngotError as error:
                    _log.warning("replica %d: adapter %s: %s", replica, name, error.message)
            if engine.ready and not self.ready:  # what it could not load is gone
                self.adapters = dict(engine.adapters)
            if engine.ready:
                self._activate(replica)


def _create_router(info: wire.EngineReady, num_replicas: int) -> Router:
    """Return the router; with one replica, or without a KV cache, prefixes do not matter."""
    if not info.num_blocks:
        return Router(SchedulerConfig(num_blocks=1), RouterConfig(policy="least-loaded"))
    config = SchedulerConfig(num_blocks=info.num_blocks, block_size=info.block_size)
    return Router(config, RouterConfig(policy="prefix" if num_replicas > 1 else "round-robin"))


def _digests(adapters: dict[str, LoadedAdapter]) -> dict[str, str]:
    return {name: one.digest for name, one in adapters.items()}
