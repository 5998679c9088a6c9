"""Messages between the HTTP process and the engine process, and their framing.

    client -> worker   Request, InferenceRequest, Abort, LoadAdapter, UnloadAdapter
    worker -> client   Loading..., EngineReady, then StepOutputs, RequestRejected, AdaptersChanged;
                       or EngineFailed, and it exits

A frame is a length (4 bytes, little-endian) and a message as msgpack, over a Unix socket that only
the two processes hold. Messages are tagged structs with typed fields: anything else is an error,
never code. A length above `MAX_FRAME` is rejected before the frame is read.

One `StepOutputs` carries the tokens of all requests: one frame per token would cost the HTTP
process more than everything else it does.
"""

from __future__ import annotations

from struct import Struct
from typing import TypeAlias, TypeVar

import msgspec

from ingot.core.errors import IngotError
from ingot.interop.signature import Signature
from ingot.serving.engine.adapters import LoadedAdapter
from ingot.serving.engine.output import EngineStats, Output
from ingot.serving.engine.request import Abort, InferenceRequest, Request

MAX_FRAME = 1 << 26
_LENGTH = Struct("<I")
_M = TypeVar("_M")


class WireError(IngotError):
    """Malformed frame or message."""


class Loading(msgspec.Struct, frozen=True, tag=True):
    """Progress of the worker before it is ready."""

    status: str


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Load the LoRA adapter of a directory; the worker answers with `AdaptersChanged`."""

    id: int
    name: str
    path: str
    replace: bool = False
    """Whether to replace an adapter of the same name."""


class UnloadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Remove the name of an adapter; the worker answers with `AdaptersChanged`."""

    id: int
    name: str


class AdaptersChanged(msgspec.Struct, frozen=True, tag=True):
    """The adapters after a message of this id; with an error, they are those before it."""

    id: int
    adapters: list[LoadedAdapter]
    message: str | None = None
    hint: str = ""


class EngineReady(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The model is loaded."""

    model: str
    vocab_size: int
    max_model_len: int
    """Maximum number of tokens of a sequence."""
    block_size: int
    num_blocks: int
    kv_cache_dtype: str
    kv_cache_bytes: int
    """This and the three above are 0 or empty for a model that keeps no state."""
    device: str = "cpu"
    embedding_dim: int | None = None
    """Elements of an embedding; None for other models."""
    signature: Signature | None = None
    """Inputs and outputs of a classifier; None for models of text."""
    max_batch_size: int = 0
    """Maximum number of rows of a request to a classifier."""
    adapters: list[LoadedAdapter] = []
    max_loras: int = 0
    max_lora_rank: int = 0


class StepOutputs(msgspec.Struct, frozen=True, tag=True):
    """Outputs of one step of the engine."""

    outputs: list[Output]
    stats: EngineStats
    model: str = ""
    """Name of the model that computed them."""


class RequestRejected(msgspec.Struct, frozen=True, tag=True):
    """The engine rejected a request that can never run."""

    id: int
    message: str
    hint: str


class EngineFailed(msgspec.Struct, frozen=True, tag=True):
    """The worker cannot load the model, and exits."""

    message: str
    hint: str


ToWorker: TypeAlias = Request | InferenceRequest | Abort | LoadAdapter | UnloadAdapter
ToClient: TypeAlias = (
    Loading | EngineReady | StepOutputs | RequestRejected | AdaptersChanged | EngineFailed
)

_encoder = msgspec.msgpack.Encoder()
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_to_client: msgspec.msgpack.Decoder[ToClient] = msgspec.msgpack.Decoder(ToClient)


def frame(message: ToWorker | ToClient) -> bytes:
    """Return the bytes of a message.

    >>> frame(Loading("weights")).hex()[:8]
    '1d000000'
    """
    content = _encoder.encode(message)
    if len(content) > MAX_FRAME:
        raise WireError(
            f"message: expected at most {MAX_FRAME:,} bytes, got {len(content):,}",
            hint="request fewer tokens or log-probabilities at once",
        )
    return _LENGTH.pack(len(content)) + content


def to_worker(content: bytes) -> ToWorker:
    """Decode a frame sent by the HTTP process.

    >>> from ingot.serving.engine.request import FinishReason
    >>> to_worker(frame(Abort(3, FinishReason.CANCELLED))[4:])
    Abort(id=3, reason=<FinishReason.CANCELLED: 'cancelled'>)
    """
    return _decode(_to_worker, content)


def to_client(content: bytes) -> ToClient:
    """Decode a frame sent by the worker.

    >>> to_client(b"?")
    Traceback (most recent call last):
    ...
    ingot.serving.workers.wire.WireError: malformed message: Expected `object`, got `int`
      hint: restart the server: both processes need the same version of ingot
    """
    return _decode(_to_client, content)


def _decode(decoder: msgspec.msgpack.Decoder[_M], content: bytes) -> _M:
    try:
        return decoder.decode(content)
    except (msgspec.MsgspecError, IngotError, ValueError, RecursionError) as error:
        raise WireError(
            f"malformed message: {str(error)[:500]}",
            hint="restart the server: both processes need the same version of ingot",
        ) from error


class Frames:
    """Splits a byte stream into frames.

    >>> frames = Frames()
    >>> data = frame(Loading("weights")) * 2
    >>> [len(list(frames.feed(part))) for part in (data[:3], data[3:40], data[40:])]
    [0, 1, 1]
    """

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Append received bytes; return the contents of the frames that are complete."""
        held = self._held
        held += data
        contents: list[bytes] = []
        start, size = 0, len(held)
        while size - start >= 4:
            (length,) = _LENGTH.unpack_from(held, start)
            if length > MAX_FRAME:
                raise WireError(
                    f"frame: expected at most {MAX_FRAME:,} bytes, got {length:,}",
                    hint="restart the server: the peer does not speak its protocol",
                )
            end = start + 4 + length
            if end > size:
                break
            contents.append(bytes(held[start + 4 : end]))
            start = end
        if start:
            del held[:start]
        return contents
