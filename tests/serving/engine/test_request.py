from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from ingot.core.errors import IngotError
from ingot.serving.engine.request import Request
from ingot.serving.engine.sampling_params import Grammar, SamplingParams


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


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": math.inf},
        {"temperature": math.nan},
        {"top_k": 0},
        {"top_k": 2**33},
        {"top_p": 1.1},
        {"top_p": math.nan},
        {"min_p": -1e-9},
        {"seed": 2**63},
        {"seed": -(2**63) - 1},
        {"presence_penalty": math.nan},
        {"frequency_penalty": math.inf},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": -math.inf},
        {"logit_bias": ((-1, 0.0),)},
        {"logit_bias": ((1, math.nan),)},
        {"logit_bias": ((1, 0.0),) * 1025},
        {"stop_token_ids": (2**32,)},
        {"stop_token_ids": (1,) * 129},
        {"logprobs": 21},
        {"logprobs": -1},
        {"prompt_logprobs": 21},
    ],
)
def test_options_are_bounded(wrong: dict[str, Any]) -> None:
    with pytest.raises(IngotError, match="give a number"):
        SamplingParams(**wrong)
    with pytest.raises((IngotError, msgspec.ValidationError)):
        msgspec.convert(wrong, SamplingParams)


def test_options_of_other_kinds_are_refused() -> None:
    for wrong in ({"temprature": 1.0}, {"temperature": "hot"}, {"grammar": {"kind": "code"}}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(wrong, SamplingParams)
    for text in ("", "a" * 65537):
        with pytest.raises(IngotError, match="grammar"):
            Grammar(kind="regex", text=text)
