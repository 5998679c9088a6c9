"""Names, datatypes and shapes of tensors, and what is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ingot.core.errors import IngotError
from ingot.interop.signature import MAX_ELEMENTS, Signature, TensorSpec


def test_sizes() -> None:
    spec = TensorSpec(name="x", datatype="INT64", shape=(2, 3))
    assert (spec.row_elements, spec.row_bytes) == (6, 48)
    assert TensorSpec(name="x", datatype="BOOL", shape=()).row_bytes == 1


@pytest.mark.parametrize(
    "change",
    [
        {"name": ""},
        {"name": "x" * 257},
        {"datatype": "FP8"},
        {"shape": (0,)},
        {"shape": (-1,)},
        {"shape": (1,) * 9},
        {"shape": (MAX_ELEMENTS, 2)},
    ],
)
def test_impossible_tensors_are_refused(change: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": (2,)}
    TensorSpec(**fields)
    with pytest.raises(IngotError):
        TensorSpec(**fields | change)


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.convert({"inputs": [], "outputs": [], "more": 1}, Signature)
