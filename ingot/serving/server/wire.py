"""What the HTTP process and the engine's process say to each other, and how it is framed.

    front -> worker   Request, End
    worker -> front   Loading..., Hello, then Step after Step; or Broken, and the worker leaves

A frame is its length (4 bytes, little-endian) and a message as msgpack, over a Unix socket that
only the two have. Messages are tagged structs with typed fields: whatever else comes is an error,
never code. A length beyond `MAX_FRAME` is refused before anything is read.

One `Step` carries the tokens of all requests: a frame a token would cost the HTTP process more
than all else it does.
"""

from __future__ import annotations

from struct import Struct
from typing import TypeAlias, TypeVar

import msgspec

from ingot.core.errors import IngotError
from ingot.serving.engine.output import EngineStats, Output
from ingot.serving.engine.request import Abort, Request

MAX_FRAME = 1 << 26
_LENGTH = Struct("<I")
_M = TypeVar("_M")


class WireError(IngotError):
    """Bytes that are no frame, or a frame that is no message."""


class Loading(msgspec.Struct, frozen=True, tag=True):
    """What the worker does before it is ready."""

    what: str


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The model is loaded: its facts."""

    model: str
    vocabulary: int
    context: int
    """The most tokens of a sequence."""
    block_size: int
    blocks: int


class Step(msgspec.Struct, frozen=True, tag=True):
    """What one step of the engine did."""

    outputs: list[Output]
    stats: EngineStats


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A request that can never run."""

    id: int
    what: str
    hint: str


class Broken(msgspec.Struct, frozen=True, tag=True):
    """The worker cannot go on, and leaves."""

    what: str
    hint: str


ToWorker: TypeAlias = Request | Abort
ToFront: TypeAlias = Loading | Hello | Step | Refused | Broken

_encoder = msgspec.msgpack.Encoder()
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_to_front: msgspec.msgpack.Decoder[ToFront] = msgspec.msgpack.Decoder(ToFront)


def frame(message: ToWorker | ToFront) -> bytes:
    """The bytes of a message.

    >>> frame(Loading("weights")).hex()
    '1b00000082a474797065a74c6f6164696e67a477686174a777656967687473'
    """
    content = _encoder.encode(message)
    if len(content) > MAX_FRAME:
        raise WireError(
            f"a message of {len(content):,} bytes, more than {MAX_FRAME:,}",
            hint="ask for fewer tokens or log-probabilities at once",
        )
    return _LENGTH.pack(len(content)) + content


def to_worker(content: bytes) -> ToWorker:
    """The message of a frame from the front.

    >>> from ingot.serving.engine.request import FinishReason
    >>> to_worker(frame(Abort(3, FinishReason.CANCELLED))[4:])
    End(id=3, reason=<FinishReason.CANCELLED: 'cancelled'>)
    """
    return _decode(_to_worker, content)


def to_front(content: bytes) -> ToFront:
    """The message of a frame from the worker.

    >>> to_front(b"?")
    Traceback (most recent call last):
    ...
    ingot.serving.server.wire.WireError: a frame that is no message: Expected `object`, got `int`
      hint: both processes have to be of one version of ingot: restart the server
    """
    return _decode(_to_front, content)


def _decode(decoder: msgspec.msgpack.Decoder[_M], content: bytes) -> _M:
    try:
        return decoder.decode(content)
    except (msgspec.MsgspecError, IngotError, ValueError, RecursionError) as error:
        raise WireError(
            f"a frame that is no message: {str(error)[:500]}",
            hint="both processes have to be of one version of ingot: restart the server",
        ) from error


class Frames:
    """Cuts a stream of bytes into the contents of its frames.

    >>> frames = Frames()
    >>> data = frame(Loading("weights")) * 2
    >>> [len(list(frames.feed(part))) for part in (data[:3], data[3:40], data[40:])]
    [0, 1, 1]
    """

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes as they come; return the contents that are complete now."""
        held = self._held
        held += data
        found: list[bytes] = []
        start, size = 0, len(held)
        while size - start >= 4:
            (length,) = _LENGTH.unpack_from(held, start)
            if length > MAX_FRAME:
                raise WireError(
                    f"a frame of {length:,} bytes, more than {MAX_FRAME:,}",
                    hint="restart the server: what comes is not ingot's",
                )
            end = start + 4 + length
            if end > size:
                break
            found.append(bytes(held[start + 4 : end]))
            start = end
        if start:
            del held[:start]
        return found
