"""An answer in the making: what the engine computes for one HTTP request, as OpenAI's clients
read it.

A request may have several prompts and `n` choices of each. The other choices of a prompt are asked
for when the first has its first token: then its blocks are in the cache, and are shared.

A stream costs the HTTP process about as much as everything else together, so a token's event is
four pieces of bytes joined, three of which were made beforehand. Events gather until the step has
been dealt with and go out as one write.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ingot.interop.tokenizer import Tokenizer
from ingot.serving.engine.detokenizer import Pieces, Text
from ingot.serving.engine.output import Logprob, Output
from ingot.serving.engine.request import FinishReason, Request
from ingot.serving.server.engine_client import Front
from ingot.serving.server.metrics import Metrics
from ingot.serving.server.openai import Job, error

RETRY = 2
"""Seconds after which to try again where nobody knows better."""
_json = msgspec.json.Encoder().encode
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_FAILURES = {
    FinishReason.DEADLINE: (
        504,
        "the answer was not complete in time",
        "give it more, or ask for less",
    ),
    FinishReason.REJECTED: (429, "too many requests wait", "try again in a few seconds"),
    FinishReason.CANCELLED: (503, "the request was cancelled", "send it again"),
    FinishReason.FAILED: (500, "the step that computed it failed", "send it again"),
}


@dataclass(frozen=True)
class Failure:
    """What went wrong, as a status and a body.

    >>> Failure(429, "too many", "wait", 3).body()[:51]
    b'{"error":{"message":"too many; wait","type":"rate_l'
    """

    status: int
    what: str
    hint: str
    retry: int | None = None
    """Seconds after which to try again."""
    param: str | None = None
    code: str | None = None

    def body(self) -> bytes:
        """The error as JSON."""
        message = f"{self.what}; {self.hint}".encode("utf-8", "replace").decode()
        kind = _KINDS.get(self.status, "server_error")
        return _json(error(message, kind, param=self.param, code=self.code))


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where an answer is made, and for whom."""

    front: Front
    tokenizer: Tokenizer
    pieces: Pieces
    metrics: Metrics
    cache_salt: bytes = b""
    priority: int = 0
    deadline: float | None = None


class Choice:
    """One of the texts of an answer; a sink of the front."""

    def __init__(self, answer: Answer, index: int, prompt: int, seed: int) -> None:
        job, place = answer.job, answer.place
        self.client = answer
        self.index, self.prompt, self.seed = index, prompt, seed
        self.id = place.front.new_id()
        self.count = 0
        self.finish: str | None = None
        self.parts: list[str] = [job.texts[prompt]] if job.texts else []
        self.followers: list[Choice] = []
        self.logprobs: list[Logprob] = []
        self.scores: list[Logprob] = []
        self.offset = 0
        self._text = Text(place.tokenizer, job.stops)
        self._between = place.metrics.between.observe
        self._last = 0.0
        self._ends = job.options.stop_token_ids
        self._told = 0  # log-probabilities that a stream has told
        self._plain = job.stream and job.options.logprobs is None and not job.texts
        if job.stream:
            self._head, self._tail = answer.around(index)

    def request(self) -> Request:
        """What the engine is asked."""
        job, place = self.client.job, self.client.place
        return Request(
            id=self.id,
            prompt=job.prompts[self.prompt],
            max_tokens=max(1, job.max_tokens),
            priority=place.priority,
            deadline=place.deadline,
            cache_salt=place.cache_salt,
            sampling_params=msgspec.structs.replace(job.options, seed=self.seed),
        )

    def fail(self, status: int, what: str, hint: str) -> None:
        """Nothing more comes, of the whole answer."""
        retry = RETRY if status in (429, 503) else None
        self.client.fail(Failure(status, what, hint, retry))

    def take(self, output: Output, now: float) -> None:
        """What a step did for it."""
        if output.num_cached_tokens is not None:
            self.client.start(self, output.num_cached_tokens)
        if output.prompt_logprobs is not None:
            self.scores += output.prompt_logprobs
        tokens = output.tokens
        text = ""
        if tokens:
            if self.count:
                self._between((now - self._last) / len(tokens))
            else:
                self.client.begin(self, now)
            self._last = now
            self.count += len(tokens)
            if output.logprobs is not None:
                self.logprobs += output.logprobs
            shown = tokens[:-1] if tokens[-1] in self._ends else tokens
            text = self._text.feed(shown) if not self.client.job.silent else ""
        if output.finish_reason is not None:
            self._over(output, text)
        elif self._text.stopped:
            self.client.place.front.end(self.id, FinishReason.STOP)
            self._finish(text, "stop")
        elif text or output.logprobs:
            self._tell(text)

    def _over(self, output: Output, text: str) -> None:
        if output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            if not self.client.job.silent:
                text += self._text.finish()
            stopped = output.finish_reason is FinishReason.STOP or self._text.stopped
            self._finish(text, "stop" if stopped else "length")
            return
        assert output.finish_reason is not None
        if output.finish_reason is FinishReason.REJECTED and output.error is not None:
            self.fail(422, output.error, "change it: it can never be answered")
        else:
            self.fail(*_FAILURES[output.finish_reason])

    def _tell(self, text: str) -> None:
        if self._plain:
            self.client.out += (self._head, _json(text), self._tail)
        elif self.client.job.stream:
            self._tell_all(text, None)
        else:
            self.parts.append(text)

    def _finish(self, text: str, reason: str) -> None:
        self.finish = reason
        if not self.client.job.stream:
            self.parts.append(text)
        elif self._plain:
            if text:
                self._tell(text)
            self.client.event(self.index, "", None, reason)
        else:
            self._tell_all(text, reason)
        self.client.finished(self)

    def _tell_all(self, text: str, reason: str | None) -> None:
        """An event that is not only text."""
        text, self.parts = "".join([*self.parts, text]), []
        told, self._told = self._told, len(self.logprobs)
        found = self.told_logprobs(self.logprobs[told:], first=not told)
        if not self.client.job.chat:
            self.client.event(self.index, text, found, reason)
            return
        if text or found:
            self.client.event(self.index, text, found, None)
        if reason is not None:
            self.client.event(self.index, "", None, reason)

    def told_logprobs(self, logprobs: Sequence[Logprob], first: bool = True) -> Any:
        """The log-probabilities in the form of the answer, or None if nobody asked."""
        job, find = self.client.job, self.client.place.pieces.find
        if job.options.logprobs is None:
            return None
        if job.chat:
            return {"content": [_chat_logprob(one, find) for one in logprobs]}
        found: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        if job.texts and first:
            prompt = job.prompts[self.prompt]
            scored = [Logprob(prompt[0], 0.0), *self.scores]
            self._add_logprobs(found, scored)
            found["token_logprobs"][0] = found["top_logprobs"][0] = None
        self._add_logprobs(found, () if job.silent else logprobs)
        return found

    def _add_logprobs(self, found: dict[str, list[Any]], logprobs: Sequence[Logprob]) -> None:
        find = self.client.place.pieces.find
        for one in logprobs:
            name = _name(*find(one.token))
            found["tokens"].append(name)
            found["token_logprobs"].append(one.logprob)
            found["top_logprobs"].append({_name(*find(t)): value for t, value in one.top})
            found["text_offset"].append(self.offset)
            self.offset += len(find(one.token)[0])


class Answer:
    """The choices of a job, from the first request to the engine to the last byte."""

    def __init__(self, job: Job, place: Place) -> None:
        self.job, self.place = job, place
        self.id = f"{'chatcmpl' if job.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.started = time.monotonic()
        self.first: float | None = None
        """Seconds to the first token."""
        self.cached = 0
        self.failure: Failure | None = None
        self.out: list[bytes] = []
        """A stream's events that are still to be written."""
        loop = asyncio.get_running_loop()
        self.began: asyncio.Future[None] = loop.create_future()
        """Done when there is something to say, or it failed."""
        self.done: asyncio.Future[None] = loop.create_future()
        self._write: Callable[[bytes], None] | None = None
        self._start, self._object = self._opening()
        self.choices = [
            Choice(self, p * job.n + i, p, _seed(job.options.seed, p * job.n + i))
            for p in range(len(job.prompts))
            for i in range(job.n)
        ]
        self._left = len(self.choices)

    @property
    def generated(self) -> int:
        """Tokens of all choices so far."""
        return 0 if self.job.silent else sum([choice.count for choice in self.choices])

    @property
    def prompted(self) -> int:
        """Tokens of all prompts."""
        return sum(map(len, self.job.prompts))

    def ask(self) -> None:
        """Send the engine the first choice of each prompt."""
        n = self.job.n
        for at in range(0, len(self.choices), n):
            leader = self.choices[at]
            leader.followers = self.choices[at + 1 : at + n]
            if self.failure is None:
                self.place.front.add(leader.request(), leader)

    def stream_to(self, write: Callable[[bytes], None]) -> None:
        """Write events from now on, those that have gathered at once."""
        self._write = write
        self.flush()

    def flush(self) -> None:
        """Write the events that have gathered."""
        if self.out and self._write is not None:
            self._write(b"".join(self.out))
            self.out = []

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        self._write, self.out = None, []
        for choice in self.choices:
            if choice.finish is None:
                self.place.front.end(choice.id, FinishReason.CANCELLED)

    def fail(self, failure: Failure) -> None:
        """End all of it with an error; a stream that has begun says so in an event."""
        if self.done.done():
            return
        self.failure = failure
        for choice in self.choices:
            if choice.finish is None:
                self.place.front.end(choice.id, FinishReason.CANCELLED)
        if self.job.stream and self.began.done():
            self.out.append(b"data: " + failure.body() + b"\n\n")
        self._end()

    # From the choices

    def start(self, choice: Choice, cached: int) -> None:
        """The engine has begun with a choice."""
        if choice.index % self.job.n == 0:
            self.cached += cached

    def begin(self, choice: Choice, now: float) -> None:
        """A choice has its first token."""
        if self.first is None:
            self.first = now - self.started
            self.began.set_result(None)
        if self.job.stream and self.job.chat:
            self.out.append(self._start + _json(choice.index) + _ROLE)
        for follower in choice.followers:
            self.place.front.add(follower.request(), follower)

    def finished(self, choice: Choice) -> None:
        """A choice has its text."""
        self._left -= 1
        if self._left:
            return
        if self.job.stream:
            if self.job.usage:
                head = self._object + b'"choices":[],"usage":'
                self.out += (head, _json(self.usage()), b"}\n\n")
            self.out.append(b"data: [DONE]\n\n")
        self._end()

    def _end(self) -> None:
        if not self.began.done():
            self.began.set_result(None)
        self.done.set_result(None)

    # As JSON

    def _opening(self) -> tuple[bytes, bytes]:
        """What each event begins with: up to a choice's index, and up to the choices."""
        job = self.job
        kind = "chat.completion.chunk" if job.chat else "text_completion"
        facts = {"id": self.id, "object": kind, "created": self.created, "model": job.model}
        opening = b"data: " + _json(facts)[:-1] + b","
        usage = b'"usage":null,' if job.usage else b""
        return opening + usage + b'"choices":[{"index":', opening

    def around(self, index: int) -> tuple[bytes, bytes]:
        """What comes before and after the text of a plain event."""
        if self.job.chat:
            head, tail = b',"delta":{"content":', b'},"logprobs":null,"finish_reason":null}]}\n\n'
        else:
            head, tail = b',"text":', b',"logprobs":null,"finish_reason":null}]}\n\n'
        return self._start + _json(index) + head, tail

    def event(self, index: int, text: str, logprobs: Any, finish: str | None) -> None:
        """An event with all its fields."""
        if self.job.chat:
            delta = {} if finish is not None else {"content": text}
            fields = {"delta": delta, "logprobs": logprobs, "finish_reason": finish}
        else:
            fields = {"text": text, "logprobs": logprobs, "finish_reason": finish}
        content = _json(fields)
        self.out += (self._start, _json(index), b",", content[1:], b"]}\n\n")

    def usage(self) -> dict[str, Any]:
        """The tokens used."""
        return {
            "prompt_tokens": self.prompted,
            "completion_tokens": self.generated,
            "total_tokens": self.prompted + self.generated,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }

    def body(self) -> bytes:
        """The whole answer, for those who do not stream."""
        kind = "chat.completion" if self.job.chat else "text_completion"
        return _json(
            {
                "id": self.id,
                "object": kind,
                "created": self.created,
                "model": self.job.model,
                "choices": [self._whole(choice) for choice in self.choices],
                "usage": self.usage(),
            }
        )

    def _whole(self, choice: Choice) -> dict[str, Any]:
        text, logprobs = "".join(choice.parts), choice.told_logprobs(choice.logprobs)
        fields: dict[str, Any] = {"index": choice.index}
        if self.job.chat:
            fields["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            fields["text"] = text
        return {**fields, "logprobs": logprobs, "finish_reason": choice.finish}


_ROLE = b',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n'


def _seed(seed: int, index: int) -> int:
    """Each choice has a seed of its own.

    >>> _seed(5, 0), _seed(2**63 - 1, 1)
    (5, -9223372036854775808)
    """
    return (seed + index + 2**63) % 2**64 - 2**63


def _chat_logprob(one: Logprob, find: Callable[[int], tuple[str, bytes]]) -> dict[str, Any]:
    def told(token: int, logprob: float) -> dict[str, Any]:
        text, content = find(token)
        return {"token": text, "logprob": logprob, "bytes": list(content)}

    top = [told(token, logprob) for token, logprob in one.top]
    return {**told(one.token, one.logprob), "top_logprobs": top}


def _name(text: str, content: bytes) -> str:
    """A token by its text, or by its bytes if it is a part of a character.

    >>> _name("a", b"a"), _name("\\ufffd", b"\\xc3")
    ('a', 'bytes:\\\\xc3')
    """
    if "\N{REPLACEMENT CHARACTER}" not in text:
        return text
    return "bytes:" + "".join([f"\\x{byte:02x}" for byte in content])
