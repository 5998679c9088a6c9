"""The engine's process: a model, and a socket to the HTTP process.

    python -m ingot.serving.server.worker FD SETTINGS

is how the supervisor starts it, with an open socket and `Settings` as JSON. Between two steps it
takes what has come, without waiting; with nothing to do it waits for the socket. When the other
side closes it leaves, whatever it was doing.

A frame that is no message, or a request that can never run, is answered or dropped; only a broken
stream of frames ends the worker.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ingot.core.errors import IngotError
from ingot.core.log import logger, setup
from ingot.serving.engine.output import Output
from ingot.serving.engine.request import Abort, FinishReason, Request
from ingot.serving.engine.sampling_params import SamplingParams
from ingot.serving.server import wire

if TYPE_CHECKING:
    from ingot.serving.engine.engine import Engine

_log = logger(__name__)
_READ = 1 << 18


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the worker is to serve.

    >>> Settings(directory="smollm2").memory is None
    True
    """

    directory: str
    memory: int | None = None
    """Bytes for keys and values; None for what suits the machine."""
    lookup: bool = False
    """Whether to try what followed the same words before: see `propose`."""
    json: bool = False
    """Whether logs are JSON."""


class Worker:
    """An engine behind a socket."""

    def __init__(self, engine: Engine, connection: socket.socket) -> None:
        self.engine = engine
        self.dropped = 0
        """Frames that were no messages."""
        self._socket, self._frames = connection, wire.Frames()

    def run(self) -> None:
        """Serve until the other side closes."""
        engine = self.engine
        while self._read(wait=not engine.has_unfinished_requests):
            if engine.has_unfinished_requests:
                outputs = engine.step()
                self._send(wire.Step(outputs, engine.stats()))

    def _read(self, wait: bool) -> bool:
        """Take what has come; False if the other side is gone."""
        while True:
            try:
                data = self._socket.recv(_READ, 0 if wait else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return True
            except ConnectionError:
                return False
            if not data:
                return False
            for content in self._frames.feed(data):
                self._hear(content)
            if len(data) < _READ:
                return True
            wait = False

    def _hear(self, content: bytes) -> None:
        try:
            message = wire.to_worker(content)
        except wire.WireError as error:
            self.dropped += 1
            _log.error("%s", error.message)
            return
        if isinstance(message, Abort):
            self.engine.abort(message.id, message.reason)
            return
        try:
            self.engine.add_request(message)
        except IngotError as error:
            self._send(wire.Refused(message.id, error.message, error.hint))

    def _send(self, message: wire.ToFront) -> None:
        try:
            self._socket.sendall(wire.frame(message))
        except ConnectionError:
            pass  # it is gone, which the next read finds
        except wire.WireError as error:
            # Too many log-probabilities for one frame: those who asked get nothing.
            _log.error("%s", error.message)
            if isinstance(message, wire.Step):
                ends = [_without(output.id) for output in message.outputs]
                for output in message.outputs:
                    self.engine.abort(output.id, FinishReason.FAILED)
                self._send(wire.Step(ends, message.stats))


def _without(id: int) -> Output:
    return Output(id, finish_reason=FinishReason.FAILED, error="the answer of a step was too large")


def load(settings: Settings, connection: socket.socket) -> Worker:
    """Load the model, and say what is being done."""

    def say(message: wire.ToFront) -> None:
        connection.sendall(wire.frame(message))

    say(wire.Loading("importing PyTorch"))
    from ingot.interop import hf
    from ingot.interop.tokenizer import Tokenizer
    from ingot.serving.engine import engine as engines
    from ingot.serving.engine.speculate import NgramProposer

    directory = Path(settings.directory)
    say(wire.Loading(f"loading {directory}"))
    decoder, tokenizer = hf.load(directory), Tokenizer.load(directory)
    scheduler_config = engines.config_for_memory(decoder, settings.memory)
    engine = engines.Engine(
        decoder,
        scheduler_config=scheduler_config,
        tokenizer=tokenizer,
        proposer=NgramProposer() if settings.lookup else None,
    )
    say(wire.Loading("warming up; the CPU kernels are compiled, once on a machine"))
    warm(engine)
    config = decoder.config
    say(
        wire.Hello(
            model=directory.resolve().name,
            vocabulary=config.vocab_size,
            context=config.max_seq_len,
            block_size=scheduler_config.block_size,
            blocks=scheduler_config.num_blocks,
        )
    )
    return Worker(engine, connection)


def warm(engine: Engine) -> None:
    """Use every kernel once, so that the first request does not wait for them."""
    prompt = tuple(range(min(3, engine.decoder.config.max_seq_len - 3)))
    for id in (1, 2):
        request = Request(
            id=id,
            prompt=prompt,
            max_tokens=3,
            cache_salt=b"warm",
            sampling_params=SamplingParams(logprobs=0),
        )
        engine.add_request(request)
    while engine.has_unfinished_requests:
        engine.step()


def main() -> None:
    """Load and serve; what is wrong with the model is told to the other side."""
    settings = msgspec.json.decode(sys.argv[2], type=Settings)
    setup(json=settings.json)
    connection = socket.socket(fileno=int(sys.argv[1]))
    try:
        worker = load(settings, connection)
    except IngotError as error:
        connection.sendall(wire.frame(wire.Broken(error.message, error.hint)))
        sys.exit(2)
    except ConnectionError:
        sys.exit(0)
    worker.run()


if __name__ == "__main__":
    main()
