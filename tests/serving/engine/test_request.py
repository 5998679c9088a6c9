from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from ingot.core.errors import IngotError
from ingot.serving.engine.request import Request
from ingot.serving.engine.sampling_params import SamplingParams


@pytest.mark.parametrize(
    "invalid",
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
        {"generated": (1,)},  # of one token: it has finished
        {"generated": (1, -1), "max_tokens": 9},
        {"generated": (2**32,), "max_tokens": 9},
        {
            "generated": (1, 5, 2),
            "max_tokens": 9,
            "sampling_params": SamplingParams(stop_token_ids=(4, 5)),
        },
    ],
)
def test_out_of_range_fields_are_rejected(invalid: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"id": 7, "prompt": (1,), "max_tokens": 1, **invalid}
    with pytest.raises(IngotError, match="request 7"):
        Request(**fields)
    with pytest.raises(IngotError, match="request 7"):
        msgspec.convert({"type": "Request", **msgspec.to_builtins(fields)}, Request)


def test_extreme_values_are_accepted() -> None:
    fields: dict[str, Any] = {"prompt": (0, 2**32 - 1), "priority": -100, "deadline": -1.0}
    request = Request(id=1, max_tokens=3, generated=(0, 2**32 - 1), **fields)
    assert msgspec.convert(msgspec.to_builtins(request), Request) == request
