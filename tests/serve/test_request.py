from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from ingot.core.errors import IngotError
from ingot.serve.request import Request


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt": ()},
        {"prompt": (1, -1)},
        {"prompt": (1, 2**32)},
        {"max_tokens": 0},
        {"max_tokens": 2**32},
        {"priority": 101},
        {"priority": -101},
        {"deadline": math.nan},
        {"deadline": math.inf},
    ],
)
def test_a_request_is_bounded(wrong: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"id": 7, "prompt": (1,), "max_tokens": 1, **wrong}
    with pytest.raises(IngotError, match="request 7"):
        Request(**fields)
    with pytest.raises(IngotError, match="request 7"):
        msgspec.convert({"type": "Request", **fields}, Request)


def test_the_extremes_are_fine() -> None:
    Request(id=1, prompt=(0, 2**32 - 1), max_tokens=1, priority=-100, deadline=-1.0)
