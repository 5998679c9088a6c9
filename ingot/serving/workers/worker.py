"""Engine process: a model, and a socket to the HTTP process.

`ingot.serving.workers.fork_server` starts it, with an open socket and `WorkerSettings` as JSON.
Between two steps the worker reads received messages without blocking, or waits for more while a
batch is not due; when idle it blocks on the socket. It exits when the other side closes.

A malformed message is dropped and a request that can never run is rejected; only a broken stream of
frames ends the worker.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn, TypeGuard

import msgspec

from ingot.core.errors import ConfigError, IngotError
from ingot.core.log import logger, setup
from ingot.serving.engine.adapters import AdapterPool
from ingot.serving.engine.batcher import BatchingConfig
from ingot.serving.engine.output import Output
from ingot.serving.engine.request import Abort, FinishReason, InferenceRequest, Request
from ingot.serving.engine.sampling_params import SamplingParams
from ingot.serving.workers import wire

if TYPE_CHECKING:
    import torch

    from ingot.nn.shared import SharedWeights
    from ingot.serving.engine.engine import Engine
    from ingot.serving.engine.inference import InferenceEngine
    from ingot.serving.engine.pooling import PoolingEngine
    from ingot.serving.engine.ranks import TensorParallel

_log = logger(__name__)
_READ_BYTES = 1 << 18
NICENESS = 10


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the engine process.

    >>> WorkerSettings(directory="smollm2").kv_cache_bytes is None
    True
    """

    directory: str
    device: str = "auto"
    tp: int = 1
    """Number of ranks that the layers are divided among: see `ingot.serving.engine.ranks`."""
    engines_per_machine: int = 1
    """Engines that share the cores and the memory of this machine."""
    kv_cache_bytes: int | None = None
    """Of each rank."""
    default_kv_cache_bytes: int | None = None
    """Size of a KV cache whose size is not given; None for that of the engine."""
    kv_cache_dtype: Literal["auto", "int8"] = "auto"
    """Dtype of cached keys and values; "auto" is that of the model."""
    speculate: Literal["ngram", "int4"] | None = None
    """Speculative decoding: see `ingot.serving.engine.speculate`."""
    adapters: dict[str, str] = {}
    """Directories of LoRA adapters by name."""
    max_loras: int | None = None
    """Slots for adapters; None for as many as `adapters` has."""
    max_lora_rank: int | None = None
    """None for the largest rank of `adapters`, at least 16."""
    skip_broken_adapters: bool = False
    """Whether to serve without an adapter that cannot be loaded: after a restart."""
    max_batch_size: int = BatchingConfig.max_batch_size
    """Maximum number of rows of a batch of a classifier."""
    max_queue_delay: float = BatchingConfig.max_queue_delay
    """Seconds that a request to a classifier may wait for others."""
    weights_fd: int | None = None
    """File of weights that several workers share: see `ingot.nn.shared`."""
    json_logs: bool = False


class Worker:
    """Serves an engine over a socket."""

    def __init__(
        self,
        engine: Engine | PoolingEngine | InferenceEngine,
        connection: socket.socket,
        model: str = "",
        seconds_to_step: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`seconds_to_step` is how long an engine with requests waits for more of them."""
        self.engine, self.model = engine, model
        self.dropped = 0
        """Number of malformed messages."""
        self._socket, self._frames = connection, wire.Frames()
        self._seconds_to_step = seconds_to_step

    def run(self) -> None:
        """Serve until the other side closes."""
        engine = self.engine
        while self._read(self._timeout()):
            if self._timeout() == 0.0:
                outputs = engine.step()
                self._send(wire.StepOutputs(outputs, engine.stats(), self.model))

    def _timeout(self) -> float | None:
        """Return the seconds until the next step; None if there are no requests."""
        return self._seconds_to_step() if self.engine.has_unfinished_requests else None

    def _read(self, timeout: float | None) -> bool:
        """Read the received messages, for which it waits so long or, without a timeout, forever.

        Return False if the other side has closed.
        """
        if timeout and not select.select([self._socket], [], [], timeout)[0]:
            return True
        wait = timeout is None
        while True:
            try:
                data = self._socket.recv(_READ_BYTES, 0 if wait else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return True
            except ConnectionError:
                return False
            if not data:
                return False
            for content in self._frames.feed(data):
                self._on_message(content)
            if len(data) < _READ_BYTES:
                return True
            wait = False

    def _on_message(self, content: bytes) -> None:
        try:
            message = wire.to_worker(content)
        except wire.WireError as error:
            self.dropped += 1
            _log.error("%s", error.message)
            return
        if isinstance(message, Abort):
            self.engine.abort(message.id, message.reason)
            return
        if isinstance(message, wire.LoadAdapter | wire.UnloadAdapter):
            self._change_adapters(message)
            return
        try:
            self._add_request(message)
        except IngotError as error:
            self._send(wire.RequestRejected(message.id, error.message, error.hint))

    def _add_request(self, message: Request | InferenceRequest) -> None:
        if isinstance(message, InferenceRequest) != is_inference_engine(self.engine):
            raise IngotError("the model computes other requests", hint="see its metadata")
        self.engine.add_request(message)  # pyright: ignore[reportArgumentType]

    def _change_adapters(self, message: wire.LoadAdapter | wire.UnloadAdapter) -> None:
        """Load or unload an adapter between two steps."""
        engine, error, hint = self.engine, None, ""
        try:
            if isinstance(message, wire.UnloadAdapter):
                engine.unload_adapter(message.name)
            else:
                engine.load_adapter(message.name, message.path, replace=message.replace)
        except IngotError as caught:
            error, hint = caught.message, caught.hint
        except (OSError, RuntimeError, ValueError) as caught:  # no memory, a file that changed
            _log.exception("loading adapter %s failed", message.name)
            error, hint = f"{type(caught).__name__}: {caught}"[:1000], "see the server's log"
        self._send(wire.AdaptersChanged(message.id, engine.loaded_adapters, error, hint))

    def _send(self, message: wire.ToClient) -> None:
        try:
            self._socket.sendall(wire.frame(message))
        except ConnectionError:
            pass  # the next read returns False
        except wire.WireError as error:
            # Too many log-probabilities for one frame: the requests of the step fail.
            _log.error("%s", error.message)
            if isinstance(message, wire.StepOutputs):
                outputs = [_too_large(output.id) for output in message.outputs]
                for output in message.outputs:
                    self.engine.abort(output.id, FinishReason.FAILED)
                self._send(wire.StepOutputs(outputs, message.stats, message.model))


def is_inference_engine(engine: object) -> TypeGuard[InferenceEngine]:
    """Return whether an engine computes `InferenceRequest`s: it has a signature."""
    return hasattr(engine, "signature")


def _too_large(id: int) -> Output:
    message = "the outputs of the step exceed the maximum message size"
    return Output(id, finish_reason=FinishReason.FAILED, error=message)


def load(
    settings: WorkerSettings,
    connection: socket.socket,
    clock: Callable[[], float] = time.monotonic,
) -> Worker:
    """Load the model; report progress to the other side."""

    def send(message: wire.ToClient) -> None:
        connection.sendall(wire.frame(message))

    send(wire.Loading("importing PyTorch"))
    from ingot.core.device import resolve
    from ingot.interop.sentence_transformers import is_embedding_model
    from ingot.interop.signature import is_classifier

    _share_cores(settings.engines_per_machine)
    directory, device = Path(settings.directory), resolve(settings.device)
    send(wire.Loading(f"loading {directory}"))
    warming_up = "warming up (the first start on a machine compiles the CPU kernels)"
    if is_classifier(directory):
        inference, ready = _create_inference_engine(settings, directory, device, clock)
        send(wire.Loading(warming_up))
        warm_up_inference(inference)
        send(ready)
        return Worker(inference, connection, ready.model, inference.seconds_to_step)
    create = _create_pooling_engine if is_embedding_model(directory) else _create_engine
    engine, ready = create(settings, directory, device, clock)
    send(wire.Loading(warming_up))
    warm_up(engine, ready.max_model_len)
    send(ready)
    return Worker(engine, connection, ready.model)


def _share_cores(num_engines: int) -> None:
    """Use this engine's share of the cores, unless the number of threads is set."""
    if num_engines > 1 and "OMP_NUM_THREADS" not in os.environ:
        import torch

        torch.set_num_threads(max(1, torch.get_num_threads() // num_engines))


def _create_engine(
    settings: WorkerSettings, directory: Path, device: torch.device, clock: Callable[[], float]
) -> tuple[Engine, wire.EngineReady]:
    from ingot.interop import hf
    from ingot.interop.tokenizer import Tokenizer
    from ingot.serving.engine import engine as engines
    from ingot.serving.engine.speculate import NgramProposer, create_proposer

    ranks = _start_ranks(settings) if settings.tp != 1 else None
    if ranks is None:
        shared = _shared_weights(settings, directory, device)
        decoder = hf.load(directory, shared=shared).to(device)
    else:
        decoder = ranks.decoder
    decoder.set_kv_cache_dtype(settings.kv_cache_dtype)
    tokenizer = Tokenizer.load(directory)
    adapters = AdapterPool.of(
        decoder,
        settings.adapters,
        max_loras=settings.max_loras,
        max_lora_rank=settings.max_lora_rank,
        skip_broken=settings.skip_broken_adapters,
    )
    kv_cache_bytes = (
        settings.kv_cache_bytes
        or settings.default_kv_cache_bytes
        or engines.default_kv_cache_bytes(settings.engines_per_machine)
    )
    scheduler_config = engines.config_for_memory(decoder, kv_cache_bytes)
    if ranks is None:
        runner, proposer = create_proposer(settings.speculate, decoder, scheduler_config)
    else:
        runner = ranks.runner(scheduler_config)
        proposer = NgramProposer() if settings.speculate else None
    engine = engines.Engine(
        decoder,
        scheduler_config=scheduler_config,
        tokenizer=tokenizer,
        proposer=proposer,
        adapters=adapters,
        runner=runner,
        clock=clock,
    )
    ready = wire.EngineReady(
        model=directory.resolve().name,
        device=str(device),
        vocab_size=decoder.config.vocab_size,
        max_model_len=decoder.config.max_seq_len,
        block_size=scheduler_config.block_size,
        num_blocks=scheduler_config.num_blocks,
        kv_cache_dtype=str(decoder.kv_spec.dtype).removeprefix("torch."),
        kv_cache_bytes=engine.runner.kv_cache.memory.nbytes,
        adapters=adapters.loaded,
        max_loras=adapters.max_loras,
        max_lora_rank=adapters.max_lora_rank,
    )
    return engine, ready


def _start_ranks(settings: WorkerSettings) -> TensorParallel:
    from ingot.serving.engine.ranks import TensorParallel

    if settings.adapters or settings.max_loras or settings.speculate == "int4":
        raise ConfigError(
            "tp: adapters and speculation with a 4-bit copy are not supported",
            hint="remove --tp, or those options",
        )
    return TensorParallel.start(
        settings.directory,
        settings.tp,
        device=settings.device,
        kv_cache_dtype=settings.kv_cache_dtype,
    )


def _create_pooling_engine(
    settings: WorkerSettings, directory: Path, device: torch.device, clock: Callable[[], float]
) -> tuple[PoolingEngine, wire.EngineReady]:
    from ingot.interop import sentence_transformers
    from ingot.serving.engine.pooling import PoolingEngine

    _check_unused(settings, "an embedding model")
    shared = _shared_weights(settings, directory, device)
    model, config = sentence_transformers.load(directory, device=device, shared=shared)
    ready = wire.EngineReady(
        model=directory.resolve().name,
        device=str(device),
        vocab_size=model.config.vocab_size,
        max_model_len=config.max_seq_len,
        block_size=0,
        num_blocks=0,
        kv_cache_dtype="",
        kv_cache_bytes=0,
        embedding_dim=model.config.dim,
    )
    return PoolingEngine(model, config, clock=clock), ready


def _create_inference_engine(
    settings: WorkerSettings, directory: Path, device: torch.device, clock: Callable[[], float]
) -> tuple[InferenceEngine, wire.EngineReady]:
    from ingot.interop import classifier
    from ingot.serving.engine.inference import InferenceEngine

    _check_unused(settings, "a classifier")
    config = BatchingConfig(
        max_batch_size=settings.max_batch_size, max_queue_delay=settings.max_queue_delay
    )
    model, signature = classifier.load(directory, device)
    engine = InferenceEngine(model, signature, config, clock=clock)
    ready = wire.EngineReady(
        model=directory.resolve().name,
        device=str(device),
        vocab_size=0,
        max_model_len=0,
        block_size=0,
        num_blocks=0,
        kv_cache_dtype="",
        kv_cache_bytes=0,
        signature=signature,
        max_batch_size=engine.batcher.config.max_batch_size,
    )
    return engine, ready


def _check_unused(settings: WorkerSettings, kind: str) -> None:
    """Raise the error of an option that only models that generate text have."""
    plain = WorkerSettings(directory=settings.directory)
    for name in ("tp", "kv_cache_bytes", "kv_cache_dtype", "speculate", "adapters", "max_loras"):
        if getattr(settings, name) != getattr(plain, name):
            raise ConfigError(f"{name}: not supported by {kind}", hint="remove the option")


def warm_up_inference(engine: InferenceEngine) -> None:
    """Compute one row and a full batch, so that the first request does not wait."""
    for rows in (1, engine.batcher.config.max_batch_size):
        inputs = tuple(bytes(rows * spec.row_bytes) for spec in engine.signature.inputs)
        engine.add_request(InferenceRequest(id=0, rows=rows, inputs=inputs))
        engine.step()


def _shared_weights(
    settings: WorkerSettings, directory: Path, device: torch.device
) -> SharedWeights | None:
    """Return the memory that the weights share with other workers; None if they are on a device."""
    from ingot.nn.shared import SharedWeights

    if settings.weights_fd is None or device.type != "cpu":
        return None
    return SharedWeights(settings.weights_fd, directory)


def warm_up(engine: Engine | PoolingEngine, max_model_len: int) -> None:
    """Run every kernel once, so that the first request does not wait for compilation."""
    prompt = tuple(range(max(1, min(3, max_model_len - 3))))
    params = SamplingParams(logprobs=0)
    adapters = [adapter.name for adapter in engine.loaded_adapters[:1]]
    for id, adapter in enumerate(("", "", *adapters)):
        engine.add_request(
            Request(
                id=id,
                prompt=prompt,
                max_tokens=3,
                cache_salt=b"warm-up",
                adapter=adapter,
                sampling_params=params,
            )
        )
    while engine.has_unfinished_requests:
        engine.step()


def serve(
    settings: WorkerSettings,
    connection: socket.socket,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Load and serve; errors of the model are sent to the other side. Return the exit status.

    Deadlines are times of the `clock`.
    """
    setup(json=settings.json_logs)
    if settings.engines_per_machine > 1:
        _lower_priority()
    try:
        worker = load(settings, connection, clock)
    except IngotError as error:
        connection.sendall(wire.frame(wire.EngineFailed(error.message, error.hint)))
        return 2
    except ConnectionError:
        return 0
    worker.run()
    return 0


def _lower_priority() -> None:
    """Let the HTTP process go first on the cores.

    Otherwise it gets no more of them than each engine does, and requests wait in it while engines
    compute steps of one or two sequences: with 4 engines on 2 cores, 1.7 times as many requests are
    completed. Threads that run already keep their priority.
    """
    os.nice(NICENESS)
    with suppress(OSError):  # niceness is relative to the others of the session's group
        Path("/proc/self/autogroup").write_text(str(os.nice(0)))


def exit_process(status: int) -> NoReturn:
    """Exit without Python's finalization (0.9 s of CPU time): another model may wait for the
    memory."""
    logging.shutdown()
    os._exit(status)
