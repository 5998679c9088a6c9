"""Tensors as JSON and as binary data: what is read is what was written, or an error of 400."""

from __future__ import annotations

import json
import struct
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.interop.signature import Signature, TensorSpec
from ingot.serving.server.tensors import (
    InferenceBody,
    InvalidTensor,
    choose_outputs,
    count_rows,
    decode_tensors,
    decode_texts,
    encode_response,
    split_binary,
    split_body,
)

FORMATS = {"BOOL": "?", "UINT8": "B", "INT32": "<i4", "INT64": "<i8", "FP16": "<f2", "FP32": "<f4"}


def signature(datatype: str = "FP32", *shape: int) -> Signature:
    return Signature(
        inputs=(TensorSpec(name="x", datatype=datatype, shape=shape),),
        outputs=(
            TensorSpec(name="y", datatype="FP32", shape=(2,)),
            TensorSpec(name="z", datatype="FP32", shape=()),
        ),
    )


def parse(content: bytes, header: str | None, expected: Signature) -> tuple[bytes, ...]:
    body, data = split_body(content, header)
    count_rows(body, expected, 64)
    return decode_tensors(body, split_binary(body, data), expected)


def tensor(datatype: str, array: Any, **fields: Any) -> dict[str, Any]:
    return {"name": "x", "datatype": datatype, "shape": list(array.shape), **fields}


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_json_and_binary_data_are_the_same_elements(data: st.DataObject) -> None:
    datatype = data.draw(st.sampled_from(sorted(FORMATS)))
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    content = data.draw(st.binary(min_size=8 * 256, max_size=8 * 256))
    count = int(np.prod(shape))
    array = np.frombuffer(content, FORMATS[datatype], count).reshape(shape)
    if datatype == "BOOL":
        array = np.frombuffer(content, "u1", count).reshape(shape) % 2 > 0
    array = np.nan_to_num(array, posinf=1, neginf=-1)
    expected = signature(datatype, *shape[1:])
    for values in (array.tolist(), array.flatten().tolist()):
        body = json.dumps({"inputs": [tensor(datatype, array, data=values)]}, indent=1).encode()
        assert parse(body, None, expected) == (array.tobytes(),)
    parameters = {"binary_data_size": array.nbytes}
    body = json.dumps({"inputs": [tensor(datatype, array, parameters=parameters)]}).encode()
    assert parse(body + array.tobytes(), str(len(body)), expected) == (array.tobytes(),)


@pytest.mark.parametrize(
    ("datatype", "values", "message"),
    [
        ("FP32", [1, "2"], "Expected `float`"),
        ("FP32", [1, True], "Expected `float`"),
        ("FP32", [1, None], "Expected `float`"),
        ("FP32", [1, 1e300], "out of the range of FP32"),
        ("FP16", [1, 1e5], "out of the range of FP16"),
        ("UINT8", [1, 256], "out of the range of UINT8"),
        ("UINT8", [1, -1], "out of the range of UINT8"),
        ("INT32", [1, 2**31], "out of the range of INT32"),
        ("INT64", [1, 2**70], "'x': "),
        ("INT64", [1, 1.5], "Expected `int`"),
        ("BOOL", [1, 0], "Expected `bool`"),
        ("BF16", [1, 0], "no form in JSON"),
        ("FP32", [1], "the 2 elements"),
        ("FP32", [1, 2, 3], "the 2 elements"),
        ("FP32", [[1, 2]], "the 2 elements"),
        ("FP32", [[1], [2, 3]], "the 2 elements"),
        ("FP32", [[1], []], "the 2 elements"),
        ("FP32", [[[1]], [[2]]], "lists of 2 dimensions"),
        ("FP32", 3, "must be a list"),
        ("FP32", None, "must be a list"),
        ("FP32", {"a": 1}, "must be a list"),
    ],
)
def test_elements_that_do_not_fit_are_refused(datatype: str, values: Any, message: str) -> None:
    one = {"name": "x", "datatype": datatype, "shape": [2, 1], "data": values}
    with pytest.raises(InvalidTensor, match=message) as caught:
        parse(json.dumps({"inputs": [one]}).encode(), None, signature(datatype, 1))
    assert caught.value.error.status == 400


GOOD: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": [2, 1], "data": [1, 2]}


@pytest.mark.parametrize(
    ("body", "header", "message"),
    [
        (b"", None, "not valid JSON"),
        (b"\xff", None, "not valid JSON"),
        (b"[" * 100_000, None, "JSON|object"),
        (b'{"inputs": [' + b'{"data": ' + b"[" * 100_000, None, "JSON"),
        (b"[]", None, "Expected `object`"),
        (b"{}", None, "missing required field `inputs`"),
        ({"inputs": []}, None, "inputs: must be 'x'"),
        ({"inputs": [GOOD, GOOD]}, None, "inputs: must be 'x'"),
        ({"inputs": [GOOD | {"name": "y"}]}, None, "inputs: must be 'x'"),
        ({"inputs": [GOOD] * 65}, None, "length <= 64"),
        ({"inputs": [GOOD | {"name": "y" * 257}]}, None, "length <= 256"),
        ({"inputs": [GOOD | {"datatype": "FP64"}]}, None, "datatype must be FP32"),
        ({"inputs": [GOOD | {"shape": []}]}, None, "shape must be"),
        ({"inputs": [GOOD | {"shape": [2]}]}, None, "shape must be"),
        ({"inputs": [GOOD | {"shape": [2, 2]}]}, None, "shape must be"),
        ({"inputs": [GOOD | {"shape": [-2, 1]}]}, None, ">= 0"),
        ({"inputs": [GOOD | {"shape": [1] * 10}]}, None, "length <= 9"),
        ({"inputs": [GOOD | {"shape": [0, 1], "data": []}]}, None, "1 to 64 rows"),
        ({"inputs": [GOOD | {"shape": [65, 1]}]}, None, "1 to 64 rows"),
        ({"inputs": [GOOD | {"parameters": {"binary_data_size": 8}}]}, None, "or both"),
        ({"inputs": [GOOD | {"parameters": {"classification": 8}}]}, None, "unknown field"),
        ({"inputs": [GOOD], "parameters": {"sequence_id": 8}}, None, "unknown field"),
        ({"inputs": [GOOD], "parameters": {"timeout": -8}}, None, ">= 0"),
        ({"inputs": [GOOD], "more": 1}, None, "unknown field"),
        ({"inputs": [GOOD]}, "-1", "must be a number"),
        ({"inputs": [GOOD]}, "1e9", "must be a number"),
        ({"inputs": [GOOD]}, "9" * 5000, "must be a number"),
        ({"inputs": [GOOD]}, "5", "not valid JSON"),
    ],
)
def test_bodies_that_do_not_fit_are_refused(body: Any, header: str | None, message: str) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(InvalidTensor, match=message):
        parse(content, header, signature("FP32", 1))


@pytest.mark.parametrize(
    ("size", "data", "message"),
    [
        (8, 7, "after the JSON"),
        (8, 9, "after the JSON"),
        (7, 7, "expected 8"),
        (9, 9, "expected 8"),
    ],
)
def test_binary_data_has_the_size_of_the_shape(size: int, data: int, message: str) -> None:
    one = {key: value for key, value in GOOD.items() if key != "data"}
    body = json.dumps({"inputs": [one | {"parameters": {"binary_data_size": size}}]}).encode()
    with pytest.raises(InvalidTensor, match=message):
        parse(body + bytes(data), str(len(body)), signature("FP32", 1))


def texts_of(shape: list[int], data: bytes | None, **fields: Any) -> list[str]:
    one = {"name": "x", "datatype": "BYTES", "shape": shape, **fields}
    body = msgspec.convert({"inputs": [one]}, InferenceBody)
    return decode_texts(body.inputs[0], data)


def test_texts() -> None:
    texts = ["Hello", "", "Wörld, [\N{SNOWMAN}"]
    data = b"".join(struct.pack("<I", len(t.encode())) + t.encode() for t in texts)
    assert texts_of([3], data) == texts
    body = json.dumps({"inputs": [{"name": "x", "datatype": "BYTES", "shape": [3], "data": texts}]})
    parsed, _ = split_body(body.encode(), None)
    assert decode_texts(parsed.inputs[0], None) == texts
    for bad in (data[:-1], data + b"\0", b"\xff" * 12, b"", struct.pack("<I", 1) + b"\xff"):
        with pytest.raises(InvalidTensor):
            texts_of([3], bad)


def test_outputs_are_chosen_by_name() -> None:
    def chosen(outputs: Any, **parameters: Any) -> list[tuple[int, bool]]:
        body = {"inputs": [], "outputs": outputs, "parameters": parameters}
        return choose_outputs(msgspec.convert(body, InferenceBody), signature())

    assert chosen([]) == [(0, False), (1, False)]
    assert chosen([], binary_data_output=True) == [(0, True), (1, True)]
    wanted = [{"name": "z", "parameters": {"binary_data": True}}, {"name": "y"}]
    assert chosen(wanted) == [(1, True), (0, False)]
    with pytest.raises(InvalidTensor, match="'y', 'z'"):
        chosen([{"name": "x"}])
    with pytest.raises(InvalidTensor, match="twice"):
        chosen([{"name": "y"}, {"name": "y"}])


def test_responses_have_json_and_then_binary_data() -> None:
    y, z = np.array([[1, 2], [3, 0.1]], "<f4"), np.array([5, np.nan], "<f4")
    tensors = [y.tobytes(), z.tobytes()]
    content, size = encode_response({"id": "7"}, 2, signature(), tensors, [(1, False), (0, True)])
    found = json.loads(content[:size])
    assert found["id"] == "7"
    assert found["outputs"][0] == {"name": "z", "datatype": "FP32", "shape": [2], "data": [5, None]}
    assert found["outputs"][1]["parameters"] == {"binary_data_size": 16}
    assert content[size:] == y.tobytes()
    content, size = encode_response({}, 2, signature(), tensors, [(0, False)])
    assert size is None
    assert np.float32(json.loads(content)["outputs"][0]["data"]).tobytes() == y.tobytes()
