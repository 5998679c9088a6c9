"""Tensors of the Open Inference Protocol (KServe v2), as JSON or as binary data.

A body is JSON; with the header `Inference-Header-Content-Length` its first bytes are, and those of
inputs with a `binary_data_size` follow in the order of the inputs:

    {"id": "7", "parameters": {"binary_data_output": true},
     "inputs": [{"name": "input", "datatype": "FP32", "shape": [2, 3],
                 "parameters": {"binary_data_size": 24}}]}
    24 bytes, little-endian

A tensor in JSON is a list of its elements or a list of lists, one for each dimension. BF16 has no
form in JSON. An element of BYTES, which is text here, is in binary data its length (4 bytes) and
its UTF-8. All errors are answered with 400.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import Annotated, Any, cast

import msgspec

from ingot.interop.signature import MAX_DIMENSIONS, MAX_NAME, Signature, TensorSpec
from ingot.serving.server.errors import ApiError, RequestError

MAX_TENSORS = 64
HEADER = "inference-header-content-length"
_FORMATS = {"BOOL": "?", "UINT8": "B", "INT32": "i", "INT64": "q", "FP16": "e", "FP32": "f"}
_TYPES = {"BOOL": bool, "UINT8": int, "INT32": int, "INT64": int, "FP16": float, "FP32": float}
_DEPTH = re.compile(rb"[\s\[]*")
_LENGTH = struct.Struct("<I")
_Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
_Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]


class InvalidTensor(RequestError):
    """A request that the protocol or the model does not allow."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(ApiError(400, message, hint))


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A JSON object without other fields."""


class InputParameters(_Strict, frozen=True):
    """Parameters of an input."""

    binary_data_size: _Size | None = None


class InputTensor(_Strict, frozen=True):
    """An input of a request."""

    name: _Name
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=MAX_DIMENSIONS + 1)]
    datatype: _Name
    parameters: InputParameters | None = None
    data: msgspec.Raw = msgspec.Raw()

    @property
    def binary_size(self) -> int | None:
        """Number of bytes of its binary data; None if it is JSON."""
        return self.parameters.binary_data_size if self.parameters else None


class OutputParameters(_Strict, frozen=True):
    """Parameters of a requested output."""

    binary_data: bool | None = None


class RequestedOutput(_Strict, frozen=True):
    """An output that a request asks for."""

    name: _Name
    parameters: OutputParameters | None = None


class InferenceParameters(_Strict, frozen=True):
    """Parameters of a request."""

    binary_data_output: bool = False
    """Whether outputs are binary data unless they say otherwise."""
    timeout: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)] = 0
    """Microseconds after which the request fails, as in Triton; 0 for the server's own."""


class InferenceBody(_Strict, frozen=True):
    """The JSON of a request."""

    inputs: Annotated[tuple[InputTensor, ...], msgspec.Meta(max_length=MAX_TENSORS)]
    outputs: Annotated[tuple[RequestedOutput, ...], msgspec.Meta(max_length=MAX_TENSORS)] = ()
    id: Annotated[str, msgspec.Meta(max_length=1024)] | None = None
    parameters: InferenceParameters = InferenceParameters()


_decode_body = msgspec.json.Decoder(InferenceBody).decode


def split_body(content: bytes, header: str | None) -> tuple[InferenceBody, bytes]:
    """Return the JSON of a body, and the binary data that follows it.

    >>> body, data = split_body(b'{"inputs": []}12', "14")
    >>> body.inputs, data
    ((), b'12')
    """
    size = len(content)
    if header is not None:
        if not re.fullmatch("[0-9]{1,12}", header) or int(header) > size:
            raise InvalidTensor(
                f"{HEADER}: must be a number up to the size of the body, {size:,}",
                "give the size of the JSON",
            )
        size = int(header)
    try:
        return _decode_body(content[:size]), content[size:]
    except msgspec.ValidationError as error:
        raise InvalidTensor(str(error)[:500], "see the Open Inference Protocol") from error
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidTensor("the body is not valid JSON", "send a JSON object") from error


def count_rows(body: InferenceBody, signature: Signature, max_rows: int) -> int:
    """Return the first dimension of the inputs; raise unless they are those of the model."""
    names = [tensor.name for tensor in body.inputs]
    specs = {spec.name: spec for spec in signature.inputs}
    if sorted(names) != sorted(specs):
        expected = ", ".join(f"'{name}'" for name in specs)
        raise InvalidTensor(f"inputs: must be {expected}", "give each input once")
    for tensor in body.inputs:
        _check_input(tensor, specs[tensor.name])
    rows = body.inputs[0].shape[0]
    if any(tensor.shape[0] != rows for tensor in body.inputs):
        raise InvalidTensor("inputs: the first dimension differs", "give all the same rows")
    if not 1 <= rows <= max_rows:
        message = f"inputs: a request may have 1 to {max_rows:,} rows, got {rows:,}"
        raise InvalidTensor(message, "send several requests")
    return rows


def _check_input(tensor: InputTensor, spec: TensorSpec) -> None:
    if tensor.datatype != spec.datatype:
        message = f"'{spec.name}': the datatype must be {spec.datatype}"
        raise InvalidTensor(message, "convert the input")
    if not tensor.shape or tensor.shape[1:] != spec.shape:
        shape = ["-1", *map(str, spec.shape)]
        message = f"'{spec.name}': the shape must be [{', '.join(shape)}]"
        raise InvalidTensor(message, "the first dimension is the number of rows")
    if bool(bytes(tensor.data)) == (tensor.binary_size is not None):
        message = f"'{spec.name}': has neither data nor a binary_data_size, or both"
        raise InvalidTensor(message, "give one of them")


def split_binary(body: InferenceBody, data: bytes) -> list[bytes | None]:
    """Return the binary data of each input, in the order of the request; None for JSON."""
    sizes = [tensor.binary_size for tensor in body.inputs]
    if sum(size or 0 for size in sizes) != len(data):
        message = f"the body has {len(data):,} bytes after the JSON, not those of the inputs"
        raise InvalidTensor(message, "give binary_data_size of each input")
    parts, start = list[bytes | None](), 0
    for size in sizes:
        parts.append(None if size is None else data[start : start + size])
        start += size or 0
    return parts


def decode_tensors(
    body: InferenceBody, data: Sequence[bytes | None], signature: Signature
) -> tuple[bytes, ...]:
    """Return the little-endian elements of each input of the signature."""
    found: dict[str, bytes] = {}
    specs = {spec.name: spec for spec in signature.inputs}
    for tensor, binary in zip(body.inputs, data, strict=True):
        spec = specs[tensor.name]
        if binary is None:
            found[tensor.name] = _pack(tensor, _elements(tensor, _json_type(spec)))
        elif len(binary) != tensor.shape[0] * spec.row_bytes:
            message = f"'{spec.name}': expected {tensor.shape[0] * spec.row_bytes:,} bytes"
            raise InvalidTensor(message, "give all elements of the shape")
        else:
            found[tensor.name] = binary
    return tuple(found[spec.name] for spec in signature.inputs)


def decode_texts(tensor: InputTensor, data: bytes | None) -> list[str]:
    """Return the elements of an input of BYTES, which must be UTF-8."""
    if data is None:
        return cast(list[str], _elements(tensor, str))
    texts, start = list[str](), 0
    try:
        for _ in range(tensor.shape[0]):
            (size,) = _LENGTH.unpack_from(data, start)
            text = data[start + 4 : start + 4 + size]
            if len(text) < size:
                raise ValueError("truncated")
            texts.append(text.decode())
            start += 4 + size
    except (ValueError, struct.error) as error:
        message = f"'{tensor.name}': the binary data is not a list of UTF-8 texts"
        raise InvalidTensor(message, "give length and bytes of each") from error
    if start != len(data):
        message = f"'{tensor.name}': {len(data) - start:,} bytes follow the last text"
        raise InvalidTensor(message, "give as many texts as the shape has")
    return texts


def _json_type(spec: TensorSpec) -> type:
    if spec.datatype not in _TYPES:
        message = f"'{spec.name}': {spec.datatype} has no form in JSON"
        raise InvalidTensor(message, "send binary data")
    return _TYPES[spec.datatype]


def _elements(tensor: InputTensor, kind: type) -> list[Any]:
    """Return the elements of a list, or of lists that have the tensor's shape."""
    raw = bytes(tensor.data)
    start = _DEPTH.match(raw)
    depth = start[0].count(b"[") if start else 0
    shape = tensor.shape
    if depth not in (1, len(shape)):
        message = f"'{tensor.name}': data must be a list, or lists of {len(shape)} dimensions"
        raise InvalidTensor(message, "give as many elements as the shape has")
    try:
        values = _decoder(kind, depth).decode(raw)
    except (msgspec.MsgspecError, ValueError) as error:
        message = f"'{tensor.name}': {error}"[:300]
        raise InvalidTensor(message, "give elements of the datatype") from error
    fits = True
    for size in shape[1:depth]:
        fits = fits and all(len(value) == size for value in values)
        values = list(chain.from_iterable(values))
    if not fits or len(values) != math.prod(shape):
        message = f"'{tensor.name}': data must have the {math.prod(shape):,} elements of its shape"
        raise InvalidTensor(message, "give the rows one after another")
    return values


@cache
def _decoder(kind: type, depth: int) -> msgspec.json.Decoder[list[Any]]:
    type_: Any = kind
    for _ in range(depth):
        type_ = list[type_]
    return msgspec.json.Decoder(type_)


def _pack(tensor: InputTensor, values: list[Any]) -> bytes:
    try:
        return struct.pack(f"<{len(values)}{_FORMATS[tensor.datatype]}", *values)
    except (struct.error, OverflowError) as error:
        message = f"'{tensor.name}': an element is out of the range of {tensor.datatype}"
        raise InvalidTensor(message, "give smaller numbers") from error


def choose_outputs(body: InferenceBody, signature: Signature) -> list[tuple[int, bool]]:
    """Return the index of each requested output, and whether it is binary data."""
    names = [spec.name for spec in signature.outputs]
    binary = body.parameters.binary_data_output
    if not body.outputs:
        return [(index, binary) for index in range(len(names))]
    chosen: list[tuple[int, bool]] = []
    for output in body.outputs:
        if output.name not in names:
            expected = ", ".join(f"'{name}'" for name in names)
            raise InvalidTensor(f"outputs: the model has {expected}", "correct the name")
        own = output.parameters.binary_data if output.parameters else None
        chosen.append((names.index(output.name), binary if own is None else own))
    if len({index for index, _ in chosen}) != len(chosen):
        raise InvalidTensor("outputs: a name occurs twice", "request each output once")
    return chosen


def encode_response(
    fields: dict[str, Any],
    rows: int,
    signature: Signature,
    tensors: Sequence[bytes],
    chosen: Sequence[tuple[int, bool]],
) -> tuple[bytes, int | None]:
    """Return the body of a response, and the size of its JSON if binary data follows it.

    >>> spec = TensorSpec(name="y", datatype="FP32", shape=(1,))
    >>> signature = Signature(inputs=(), outputs=(spec,))
    >>> encode_response({"model_name": "m"}, 1, signature, [bytes(4)], [(0, False)])[0]
    b'{"model_name":"m","outputs":[{"name":"y","datatype":"FP32","shape":[1,1],"data":[0.0]}]}'
    """
    outputs: list[dict[str, Any]] = []
    binary: list[bytes] = []
    for index, is_binary in chosen:
        spec, content = signature.outputs[index], tensors[index]
        output: dict[str, Any] = {
            "name": spec.name,
            "datatype": spec.datatype,
            "shape": (rows, *spec.shape),
        }
        if is_binary:
            output["parameters"] = {"binary_data_size": len(content)}
            binary.append(content)
        else:
            output["data"] = struct.unpack(f"<{len(content) // 4}f", content)
        outputs.append(output)
    text = msgspec.json.encode(fields | {"outputs": outputs})
    return b"".join([text, *binary]), len(text) if binary else None
