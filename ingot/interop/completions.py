"""Log-probabilities of a prompt from an OpenAI-compatible server: vLLM, SGLang, ingot.

    found = prompt_logprobs("http://localhost:8000", [504, 2], top=20)
    found.logprobs          # of every token after the first

One request to `/v1/completions` with token ids as the prompt, `echo` and `logprobs`. Every number
of the response is checked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec

from ingot.core.errors import IngotError
from ingot.interop.openai_client import HttpStatusError, OpenAIClient

_TOP = (20, 5)  # vLLM and ingot report at most 20 tokens, OpenAI 5


@dataclass(frozen=True, kw_only=True)
class PromptLogprobs:
    """What a server reports of the tokens of a prompt, from the second on."""

    model: str
    logprobs: tuple[float, ...]
    top: tuple[dict[str, float], ...]
    """The most likely tokens at each position, by their texts."""


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(msgspec.Struct):
    logprobs: _Logprobs | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]


def is_url(text: str) -> bool:
    """Return whether this is the address of a server.

    >>> is_url("http://localhost:8000"), is_url("smollm2")
    (True, False)
    """
    return urlsplit(text).scheme in ("http", "https")


def prompt_logprobs(
    url: str, token_ids: Sequence[int], *, model: str | None = None, api_key: str | None = None
) -> PromptLogprobs:
    """Return the log-probabilities that a server reports of these tokens.

    Args:
        url: Address of the server, with or without `/v1`.
        token_ids: The prompt.
        model: Name of the model; None if the server has only one.
        api_key: Sent as a bearer token.
    """
    client = OpenAIClient(url, api_key)
    name = client.find_model(model)
    body = {"model": name, "prompt": list(token_ids), "echo": True, "temperature": 0.0}
    for top in _TOP:
        try:
            request = {**body, "max_tokens": 1, "logprobs": top}
            found = client.send("completions", _Completion, request)
            return _checked(url, name, found, len(token_ids))
        except HttpStatusError as error:
            if error.status not in (400, 422) or top == _TOP[-1]:
                why = f"the server answers {error.status}: {error.message}"
                raise _wrong(url, why) from error
    raise AssertionError


def _checked(url: str, model: str, answer: _Completion, count: int) -> PromptLogprobs:
    found = answer.choices[0].logprobs if answer.choices else None
    if found is None or len(found.token_logprobs) < count:
        raise _wrong(url, "its answer has no log-probabilities of the prompt")
    logprobs = found.token_logprobs[1:count]
    tops = (found.top_logprobs or [])[1:count] or [None] * len(logprobs)
    values = [*logprobs, *(value for top in tops for value in (top or {}).values())]
    if len(tops) != len(logprobs) or not all(
        value is not None and value <= 1e-3 and math.isfinite(value) for value in values
    ):
        raise _wrong(url, "a log-probability of the prompt is missing, positive or not finite")
    return PromptLogprobs(
        model=model,
        logprobs=tuple(float(value or 0.0) for value in logprobs),
        top=tuple(top or {} for top in tops),
    )


def _wrong(url: str, why: str) -> IngotError:
    return IngotError(
        f"{url}: {why}",
        hint="name a server of OpenAI's completions API that supports `echo` with `logprobs` "
        "(vLLM, SGLang, ingot); set OPENAI_API_KEY if it needs a key",
    )
