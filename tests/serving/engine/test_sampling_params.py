from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from ingot.core.errors import IngotError
from ingot.serving.engine.sampling_params import Grammar, SamplingParams


@pytest.mark.parametrize(
    "invalid",
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
def test_out_of_range_values_are_rejected(invalid: dict[str, Any]) -> None:
    with pytest.raises(IngotError, match="give a number"):
        SamplingParams(**invalid)
    with pytest.raises((IngotError, msgspec.ValidationError)):
        msgspec.convert(invalid, SamplingParams)


def test_unknown_names_and_types_are_rejected() -> None:
    for invalid in ({"temprature": 1.0}, {"temperature": "hot"}, {"grammar": {"kind": "code"}}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(invalid, SamplingParams)
    for text in ("", "a" * 65537):
        with pytest.raises(IngotError, match="grammar"):
            Grammar(kind="regex", text=text)
