"""Per-request sampling parameters, and the grammar that the output has to match."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from ingot.core.errors import IngotError

MAX_GRAMMAR_CHARS = 2**16
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_LOGPROBS = 20
MAX_TOKEN_ID = 2**32 - 1
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""llguidance's options of JSON: where whitespace is free, a small model writes it without end."""


class Grammar(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A JSON schema, regular expression or Lark grammar that constrains the output.

    >>> Grammar(kind="regex", text="yes|no").kind
    'regex'
    """

    kind: Literal["json_schema", "regex", "lark"]
    text: str

    @classmethod
    def of_schema(cls, schema: Mapping[str, Any]) -> Grammar:
        """Return the grammar of a JSON schema: JSON on one line, as `json.dumps` writes it.

        >>> Grammar.of_schema({"type": "integer"}).kind
        'json_schema'
        """
        return cls(kind="json_schema", text=json.dumps({"x-guidance": JSON_STYLE, **schema}))

    def __post_init__(self) -> None:
        if not 1 <= len(self.text) <= MAX_GRAMMAR_CHARS:
            raise IngotError(
                f"grammar: expected 1 to {MAX_GRAMMAR_CHARS:,} characters, got {len(self.text):,}",
                hint="use a shorter grammar",
            )


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are sampled, which tokens stop generation, and which log-probabilities to return.

    The random number for a token is a function of `seed` and the token's position alone, so the
    output for a seed does not depend on batching or scheduling.

    >>> SamplingParams(temperature=0.0, stop_token_ids=(2,)).seed
    0
    >>> SamplingParams(top_p=float("nan"))
    Traceback (most recent call last):
    ...
    ingot.core.errors.IngotError: top_p: expected a number from 0 to 1, got nan
      hint: give a number from 0 to 1
    """

    temperature: float = 1.0
    """0 selects the most likely token (greedy decoding)."""
    top_k: int | None = None
    """Sample from the `top_k` most likely tokens; None for no limit."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens whose cumulative probability reaches `top_p`."""
    min_p: float = 0.0
    """Minimum probability of a token, relative to the most likely one."""
    seed: int = 0
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that was generated before."""
    frequency_penalty: float = 0.0
    """Subtracted once for each time the token was generated before."""
    repetition_penalty: float = 1.0
    """Scales down the logits of tokens in the prompt or the output so far."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token id and a value added to its logit."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end generation. The final one is reported but not part of the text."""
    logprobs: int | None = None
    """Return the log-probability of each token and of the `logprobs` most likely tokens."""
    logprobs_mode: Literal["raw", "processed"] = "raw"
    """`raw`: of the model's distribution. `processed`: of the distribution sampled from, after
    penalties, bias, grammar, temperature and truncation."""
    prompt_logprobs: int | None = None
    """The same for prompt tokens, from the second on or from `prompt_logprobs_start` on."""
    prompt_logprobs_start: int = 0
    """Position of the first prompt token whose log-probability is returned. Only the tokens before
    it can come from the prefix cache."""
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        _check_range("temperature", self.temperature, 0, 100)
        _check_range("top_k", self.top_k, 1, MAX_TOKEN_ID + 1)
        _check_range("top_p", self.top_p, 0, 1)
        _check_range("min_p", self.min_p, 0, 1)
        _check_range("seed", self.seed, -(2**63), 2**63 - 1)
        _check_range("presence_penalty", self.presence_penalty, -100, 100)
        _check_range("frequency_penalty", self.frequency_penalty, -100, 100)
        _check_range("repetition_penalty", self.repetition_penalty, 0.01, 100)
        _check_range("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _check_range("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        _check_range("prompt_logprobs_start", self.prompt_logprobs_start, 0, MAX_TOKEN_ID)
        _check_range("len(logit_bias)", len(self.logit_bias), 0, MAX_LOGIT_BIAS)
        _check_range("len(stop_token_ids)", len(self.stop_token_ids), 0, MAX_STOP_TOKEN_IDS)
        for token, value in self.logit_bias:
            _check_range("logit_bias token id", token, 0, MAX_TOKEN_ID)
            _check_range("logit_bias value", value, -1000, 1000)
        for token in self.stop_token_ids:
            _check_range("stop_token_ids", token, 0, MAX_TOKEN_ID)


def _check_range(name: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:  # false for NaN, too
        raise IngotError(
            f"{name}: expected a number from {low} to {high}, got {value}",
            hint=f"give a number from {low} to {high}",
        )
