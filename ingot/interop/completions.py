"""Log-probabilities of a prompt from an OpenAI-compatible server: vLLM, SGLang, ingot.

    found = prompt_logprobs("http://localhost:8000", [504, 2], top=20)
    found.logprobs          # of every token after the first

One request to `/v1/completions` with token ids as the prompt, `echo` and `logprobs`. The server is
not trusted: the size of its answer is bounded, and every number is checked.
"""

from __future__ import annotations

import json
import math
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ingot.core.errors import IngotError

MAX_ANSWER_BYTES = 256 << 20
TIMEOUT_S = 600.0
_TOP = (20, 5)  # vLLM and ingot report at most 20 tokens, OpenAI 5


@dataclass(frozen=True, kw_only=True)
class PromptLogprobs:
    """What a server reports of the tokens of a prompt, from the second on."""

    model: str
    logprobs: tuple[float, ...]
    top: tuple[dict[str, float], ...]
    """The most likely tokens at each position, by their texts."""


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


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
    return urllib.parse.urlparse(text).scheme in ("http", "https")


def prompt_logprobs(
    url: str, token_ids: Sequence[int], *, model: str | None = None, api_key: str | None = None
) -> PromptLogprobs:
    """Return the log-probabilities that a server reports of these tokens.

    Args:
        url: Address of the server, with or without `/v1`.
        token_ids: The prompt.
        model: Name of the model; by default the first that the server lists.
        api_key: Sent as a bearer token.
    """
    base = url.rstrip("/").removesuffix("/v1")
    name = _first_model(base, api_key) if model is None else model
    body = {"model": name, "prompt": list(token_ids), "echo": True, "temperature": 0.0}
    answer = None
    for top in _TOP:
        request = {**body, "max_tokens": 1, "logprobs": top}
        answer = _call(f"{base}/v1/completions", request, api_key, _Completion, top != _TOP[-1])
        if answer is not None:
            break
    assert answer is not None
    return _checked(url, name, answer, len(token_ids))


def _first_model(base: str, api_key: str | None) -> str:
    models = _call(f"{base}/v1/models", None, api_key, _Models)
    if not models.data:
        raise _wrong(base, "it lists no model")
    return models.data[0].id


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


def _call(
    url: str, body: dict[str, Any] | None, api_key: str | None, kind: Any, may_reject: bool = False
) -> Any:
    """Return the decoded answer; None if the request is rejected and `may_reject`."""
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(url, data, headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            content = response.read(MAX_ANSWER_BYTES + 1)
    except urllib.error.HTTPError as error:
        with error:
            reason = error.read(2000).decode("utf-8", "replace")
        if may_reject and error.code in (400, 422):
            return None
        raise _wrong(url, f"it answers {error.code}: {reason[:500]}") from error
    except (OSError, ValueError) as error:
        raise IngotError(
            f"cannot reach {url}: {getattr(error, 'reason', error)}",
            hint="start the server, and name its address: http://HOST:PORT",
        ) from error
    if len(content) > MAX_ANSWER_BYTES:
        raise _wrong(url, f"its answer is larger than {MAX_ANSWER_BYTES:,} bytes")
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.DecodeError as error:
        raise _wrong(url, f"its answer is not that of OpenAI's API ({error})") from error


def _wrong(url: str, why: str) -> IngotError:
    return IngotError(
        f"{url}: {why}",
        hint="name a server of OpenAI's completions API that supports `echo` with `logprobs` "
        "(vLLM, SGLang, ingot); set OPENAI_API_KEY if it needs a key",
    )
