"""Tensor-parallel engine: ranks compute every step together, with the bits of a single process.

    with TensorParallel.start("llama", size=2) as ranks:
        engine = Engine(ranks.decoder, scheduler_config=config, runner=ranks.runner(config))

This process is rank 0. It schedules, computes its part of every layer, and samples; the other
ranks are processes of their own, each with its rows of the weights and its heads of the KV cache.
The layers are divided as in training (`ingot.parallel.tensor`): no sum is divided, so no bit
depends on the number of ranks.

Rank 0 sends the scheduled sequences to each rank through a pipe, as msgpack; activations are
exchanged by collectives. A rank exits when its pipe closes. When a step fails on a rank, the ranks
no longer compute the same step, so the process of rank 0 exits, too: the server starts it again.
"""

# pyright: basic
from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import torch
from torch import Tensor

from ingot.core.device import detect, resolve
from ingot.core.errors import ConfigError, IngotError
from ingot.core.log import logger, setup
from ingot.interop import hf
from ingot.nn import Decoder
from ingot.nn.layout import KVCacheDtype
from ingot.parallel import ranks as processes
from ingot.parallel.ranks import Ranks
from ingot.parallel.tensor import check_divisible, divide_decoder
from ingot.serving.engine.runner import Runner
from ingot.serving.engine.scheduler import ScheduledSeq, SchedulerConfig

_log = logger(__name__)
_COLLECTIVE_TIMEOUT_S = 300.0
_EXIT_TIMEOUT_S = 5.0
MAX_RANKS = 64


class RankSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a rank.

    >>> RankSettings(directory="llama", rank=1, size=2, port=29500).device
    'cpu'
    """

    directory: str
    rank: int
    size: int
    port: int
    """Port of rank 0's store on this machine."""
    device: str = "cpu"
    kv_cache_dtype: KVCacheDtype = "auto"


class CreateRunner(msgspec.Struct, frozen=True, tag=True):
    """Allocate a KV cache; runners are numbered in the order of these messages."""

    config: SchedulerConfig
    num_scratch_blocks: int


class RunStep(msgspec.Struct, frozen=True, tag=True):
    """Compute scheduled sequences with a runner."""

    runner: int
    scheduled: list[ScheduledSeq]


ToRank: TypeAlias = CreateRunner | RunStep

_encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)


class TensorParallel:
    """Rank 0 of a tensor-parallel model, and the processes of the other ranks."""

    def __init__(self, decoder: Decoder, others: Sequence[_OtherRank]) -> None:
        self.decoder = decoder
        """This rank's part of the layers; the embedding and the LM head are whole."""
        self.size = 1 + len(others)
        self._others, self._num_runners = others, 0

    @staticmethod
    def start(
        directory: Path | str,
        size: int,
        *,
        device: str = "cpu",
        kv_cache_dtype: KVCacheDtype = "auto",
    ) -> TensorParallel:
        """Start the other ranks, and load the model on all of them."""
        if not 2 <= size <= MAX_RANKS or size & (size - 1):
            raise ConfigError(
                f"tp: must be a power of two up to {MAX_RANKS}, got {size}", hint="give 2 or 4"
            )
        check_divisible(hf.describe(directory).config, size)  # before anything is loaded
        store = processes.create_store()
        settings = RankSettings(
            directory=str(directory),
            rank=0,
            size=size,
            port=store.port,
            device=device,
            kv_cache_dtype=kv_cache_dtype,
        )
        others = [
            _OtherRank(msgspec.structs.replace(settings, rank=rank)) for rank in range(1, size)
        ]
        try:
            return TensorParallel(_load(settings, store), others)
        except BaseException:
            for other in others:
                other.close()
            raise

    def runner(self, config: SchedulerConfig, *, num_scratch_blocks: int = 0) -> Runner:
        """Return a runner whose steps are computed by all ranks."""
        self.send(CreateRunner(config, num_scratch_blocks))
        self._num_runners += 1
        return _MainRunner(self, self._num_runners - 1, config, num_scratch_blocks)

    def send(self, message: ToRank) -> None:
        """Send a message to the other ranks."""
        content = _encode(message)
        for other in self._others:
            other.connection.send_bytes(content)

    def close(self) -> None:
        """End the other ranks."""
        for other in self._others:
            other.close()
        processes.disconnect()

    def __enter__(self) -> TensorParallel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _MainRunner(Runner):
    """The runner of rank 0. Steps are not captured: a replayed one would have no collectives."""

    def __init__(
        self, ranks: TensorParallel, number: int, config: SchedulerConfig, num_scratch_blocks: int
    ) -> None:
        options = {"num_scratch_blocks": num_scratch_blocks, "captures": False}
        super().__init__(ranks.decoder, config, **options)
        self._ranks, self._number = ranks, number

    def run(self, work: Sequence[ScheduledSeq], slots: Sequence[int] | None = None) -> Tensor:
        try:
            self._ranks.send(RunStep(self._number, list(work)))
            return super().run(work, slots)
        except Exception as error:
            _log.error("a step failed on a rank: %s", error)
            raise SystemExit("the ranks no longer compute the same step") from error


class _OtherRank:
    """The process of a rank, and the pipe to it."""

    def __init__(self, settings: RankSettings) -> None:
        theirs, self.connection = Pipe(duplex=False)
        with theirs:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "ingot.serving.engine.ranks"),
                    *(str(theirs.fileno()), msgspec.json.encode(settings).decode()),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )

    def close(self) -> None:
        """End the process: it exits when its pipe closes, or is killed."""
        self.connection.close()
        try:
            self.process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _load(settings: RankSettings, store: Any) -> Decoder:
    """Join the process group, and load this rank's part of the model.

    The whole model is in the host's memory until it is divided; the device only gets the part.
    """
    device = resolve(settings.device)
    if device.type != "cpu":
        device = torch.device(device.type, settings.rank)
    torch.set_num_threads(max(1, detect().cpu.cores // settings.size))
    ranks = processes.join(
        store, settings.rank, settings.size, _COLLECTIVE_TIMEOUT_S, device.type, settings.rank
    )
    decoder = hf.load(settings.directory)
    divide(decoder, ranks).set_kv_cache_dtype(settings.kv_cache_dtype)
    try:
        ranks.barrier()
    except RuntimeError as error:
        raise IngotError("a rank could not load the model", hint="see the log") from error
    return decoder.to(device)


def divide(decoder: Decoder, ranks: Ranks) -> Decoder:
    """Reduce a decoder to this rank's part; only rank 0 keeps the LM head."""
    divide_decoder(decoder.requires_grad_(False), ranks)
    if not ranks.is_main:
        decoder.lm_head = None
    return decoder


def serve_rank(decoder: Decoder, connection: Connection) -> None:
    """Compute the steps that rank 0 sends, until it closes the connection."""
    runners: list[Runner] = []
    with torch.inference_mode():
        while True:
            try:
                content = connection.recv_bytes()
            except EOFError:
                return
            message = _decoder.decode(content)
            if isinstance(message, CreateRunner):
                options = {"num_scratch_blocks": message.num_scratch_blocks, "captures": False}
                runners.append(Runner(decoder, message.config, **options))
            else:
                runners[message.runner].run(message.scheduled)


def main() -> None:
    """Load and serve a rank other than 0."""
    setup()
    connection = Connection(int(sys.argv[1]), writable=False)
    settings = msgspec.json.decode(sys.argv[2], type=RankSettings)
    try:
        decoder = _load(settings, processes.find_store(settings.port))
    except IngotError as error:
        _log.error("rank %d: %s", settings.rank, error)
        sys.exit(2)
    with suppress(ConnectionError):
        serve_rank(decoder, connection)
    os._exit(0)  # the process group of a lost rank cannot be left


if __name__ == "__main__":
    main()
