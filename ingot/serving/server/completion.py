"""Generation of one HTTP response: submits requests to the engine, formats outputs as OpenAI's API.

An HTTP request may have several prompts and `n` choices of each. The other choices of a prompt are
submitted when the first one has its first token: then the prompt's blocks are cached and shared.

Streaming costs the HTTP process about as much as everything else together, so the event of a token
is four byte strings joined, three of which are prepared in advance. Events are buffered until the
step is processed and sent as one write.
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
from ingot.serving.engine.detokenizer import StreamingDetokenizer, TokenTexts
from ingot.serving.engine.output import Logprob, Output
from ingot.serving.engine.request import FinishReason, Request
from ingot.serving.server.engine_client import EngineClient
from ingot.serving.server.errors import ApiError
from ingot.serving.server.metrics import Metrics
from ingot.serving.server.openai import GenerationJob

DEFAULT_RETRY_AFTER_S = 2
_encode = msgspec.json.Encoder().encode
FINISH_ERRORS = {
    FinishReason.DEADLINE: (504, "request timed out", "raise `timeout` or lower `max_tokens`"),
    FinishReason.REJECTED: (429, "too many queued requests", "retry in a few seconds"),
    FinishReason.CANCELLED: (503, "the request was cancelled", "send it again"),
    FinishReason.FAILED: (500, "the engine step failed", "send the request again"),
}
"""Status, message and hint of requests that the engine did not complete."""


@dataclass(frozen=True, kw_only=True)
class RequestContext:
    """What a completion needs besides its job: engine, tokenizer, metrics, tenant."""

    engine: EngineClient
    tokenizer: Tokenizer
    token_texts: TokenTexts
    metrics: Metrics
    cache_salt: bytes = b""
    priority: int = 0
    deadline: float | None = None


class Choice:
    """One of the completions of a response; an `OutputHandler`."""

    def __init__(self, completion: CompletionStream, index: int, prompt: int, seed: int) -> None:
        job, context = completion.job, completion.context
        self.client = completion
        self.index, self.prompt, self.seed = index, prompt, seed
        self.id = context.engine.new_id()
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self.parts: list[str] = [job.echo[prompt]] if job.echo else []
        self.followers: list[Choice] = []
        self.logprobs: list[Logprob] = []
        self.prompt_logprobs: list[Logprob] = []
        self.offset = 0
        self._detokenizer = StreamingDetokenizer(context.tokenizer, job.stop)
        self._observe_itl = context.metrics.itl.observe
        self._last = 0.0
        self._stop_token_ids = job.sampling_params.stop_token_ids
        self._num_reported = 0  # log-probabilities sent in events
        self._plain = job.stream and job.sampling_params.logprobs is None and not job.echo
        if job.stream:
            self._head, self._tail = completion.event_affixes(index)

    def request(self) -> Request:
        """Return the request to the engine."""
        job, context = self.client.job, self.client.context
        return Request(
            id=self.id,
            prompt=job.prompts[self.prompt],
            max_tokens=max(1, job.max_tokens),
            priority=context.priority,
            deadline=context.deadline,
            cache_salt=context.cache_salt,
            adapter=job.adapter,
            sampling_params=msgspec.structs.replace(job.sampling_params, seed=self.seed),
        )

    def on_error(self, status: int, message: str, hint: str) -> None:
        """Fail the whole response."""
        retry_after = DEFAULT_RETRY_AFTER_S if status in (429, 503) else None
        self.client.fail(ApiError(status, message, hint, retry_after))

    def on_output(self, output: Output, now: float) -> None:
        """Process the output of a step."""
        if output.num_cached_tokens is not None:
            self.client.on_admitted(self, output.num_cached_tokens)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs += output.prompt_logprobs
        tokens = output.tokens
        text = ""
        if tokens:
            if self.num_tokens:
                self._observe_itl((now - self._last) / len(tokens))
            else:
                self.client.on_first_token(self, now)
            self._last = now
            self.num_tokens += len(tokens)
            if output.logprobs is not None:
                self.logprobs += output.logprobs
            shown = tokens[:-1] if tokens[-1] in self._stop_token_ids else tokens
            text = self._detokenizer.feed(shown) if not self.client.job.prompt_only else ""
        if output.finish_reason is not None:
            self._on_last_output(output, text)
        elif self._detokenizer.stopped:
            self.client.context.engine.abort(self.id, FinishReason.STOP)
            self._finish(text, "stop")
        elif text or output.logprobs:
            self._send_text(text)

    def _on_last_output(self, output: Output, text: str) -> None:
        if output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            if not self.client.job.prompt_only:
                text += self._detokenizer.finish()
            stopped = output.finish_reason is FinishReason.STOP or self._detokenizer.stopped
            self._finish(text, "stop" if stopped else "length")
            return
        assert output.finish_reason is not None
        if output.finish_reason is FinishReason.REJECTED and output.error is not None:
            self.on_error(422, output.error, "change the request")
        else:
            self.on_error(*FINISH_ERRORS[output.finish_reason])

    def _send_text(self, text: str) -> None:
        if self._plain:
            self.client.out += (self._head, _encode(text), self._tail)
        elif self.client.job.stream:
            self._send_event(text, None)
        else:
            self.parts.append(text)

    def _finish(self, text: str, reason: str) -> None:
        self.finish_reason = reason
        if not self.client.job.stream:
            self.parts.append(text)
        elif self._plain:
            if text:
                self._send_text(text)
            self.client.event(self.index, "", None, reason)
        else:
            self._send_event(text, reason)
        self.client.on_finished(self)

    def _send_event(self, text: str, reason: str | None) -> None:
        """Send an event with all fields."""
        text, self.parts = "".join([*self.parts, text]), []
        sent, self._num_reported = self._num_reported, len(self.logprobs)
        logprobs = self.format_logprobs(self.logprobs[sent:], first=not sent)
        if not self.client.job.chat:
            self.client.event(self.index, text, logprobs, reason)
            return
        if text or logprobs:
            self.client.event(self.index, text, logprobs, None)
        if reason is not None:
            self.client.event(self.index, "", None, reason)

    def format_logprobs(self, logprobs: Sequence[Logprob], first: bool = True) -> Any:
        """Return log-probabilities in the format of the API; None if not requested."""
        job, find = self.client.job, self.client.context.token_texts.find
        if job.sampling_params.logprobs is None:
            return None
        if job.chat:
            return {"content": [_chat_logprob(one, find) for one in logprobs]}
        fields: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        if job.echo and first:
            prompt = job.prompts[self.prompt]
            scored = [Logprob(prompt[0], 0.0), *self.prompt_logprobs]
            self._add_logprobs(fields, scored)
            fields["token_logprobs"][0] = fields["top_logprobs"][0] = None
        self._add_logprobs(fields, () if job.prompt_only else logprobs)
        return fields

    def _add_logprobs(self, fields: dict[str, list[Any]], logprobs: Sequence[Logprob]) -> None:
        find = self.client.context.token_texts.find
        for one in logprobs:
            name = _token_name(*find(one.token))
            fields["tokens"].append(name)
            fields["token_logprobs"].append(one.logprob)
            fields["top_logprobs"].append({_token_name(*find(t)): value for t, value in one.top})
            fields["text_offset"].append(self.offset)
            self.offset += len(find(one.token)[0])


class CompletionStream:
    """All choices of a job, from the first request to the engine to the last byte."""

    def __init__(self, job: GenerationJob, context: RequestContext) -> None:
        self.job, self.context = job, context
        self.id = f"{'chatcmpl' if job.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.started = time.monotonic()
        self.ttft: float | None = None
        """Seconds to the first token."""
        self.num_cached_tokens = 0
        self.error: ApiError | None = None
        self.out: list[bytes] = []
        """Buffered events of a stream."""
        loop = asyncio.get_running_loop()
        self.began: asyncio.Future[None] = loop.create_future()
        """Done at the first token or error."""
        self.done: asyncio.Future[None] = loop.create_future()
        self._write: Callable[[bytes], None] | None = None
        self._start, self._object = self._opening()
        self.choices = [
            Choice(self, p * job.n + i, p, _seed(job.sampling_params.seed, p * job.n + i))
            for p in range(len(job.prompts))
            for i in range(job.n)
        ]
        self._num_unfinished = len(self.choices)

    @property
    def num_generated_tokens(self) -> int:
        """Tokens of all choices so far."""
        return 0 if self.job.prompt_only else sum([choice.num_tokens for choice in self.choices])

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(map(len, self.job.prompts))

    def submit(self) -> None:
        """Submit the first choice of each prompt."""
        n = self.job.n
        for at in range(0, len(self.choices), n):
            leader = self.choices[at]
            leader.followers = self.choices[at + 1 : at + n]
            if self.error is None:
                self.context.engine.add_request(leader.request(), leader)

    def stream_to(self, write: Callable[[bytes], None]) -> None:
        """Write buffered events now and new ones after each step."""
        self._write = write
        self.flush()

    def flush(self) -> None:
        """Write the buffered events."""
        if self.out and self._write is not None:
            self._write(b"".join(self.out))
            self.out = []

    def cancel(self) -> None:
        """Abort unfinished choices: the client is gone, or the response is complete."""
        self._write, self.out = None, []
        for choice in self.choices:
            if choice.finish_reason is None:
                self.context.engine.abort(choice.id, FinishReason.CANCELLED)

    def fail(self, error: ApiError) -> None:
        """Fail the response; a stream that has started gets an error event."""
        if self.done.done():
            return
        self.error = error
        for choice in self.choices:
            if choice.finish_reason is None:
                self.context.engine.abort(choice.id, FinishReason.CANCELLED)
        if self.job.stream and self.began.done():
            self.out.append(b"data: " + error.body() + b"\n\n")
        self._complete()

    # Events of the choices

    def on_admitted(self, choice: Choice, num_cached_tokens: int) -> None:
        """Count the cached tokens of a prompt."""
        if choice.index % self.job.n == 0:
            self.num_cached_tokens += num_cached_tokens

    def on_first_token(self, choice: Choice, now: float) -> None:
        """Start the response; submit the other choices of the prompt."""
        if self.ttft is None:
            self.ttft = now - self.started
            self.began.set_result(None)
        if self.job.stream and self.job.chat:
            self.out.append(self._start + _encode(choice.index) + _ROLE)
        for follower in choice.followers:
            self.context.engine.add_request(follower.request(), follower)

    def on_finished(self, choice: Choice) -> None:
        """Finish the response after its last choice."""
        self._num_unfinished -= 1
        if self._num_unfinished:
            return
        if self.job.stream:
            if self.job.include_usage:
                head = self._object + b'"choices":[],"usage":'
                self.out += (head, _encode(self.usage()), b"}\n\n")
            self.out.append(b"data: [DONE]\n\n")
        self._complete()

    def _complete(self) -> None:
        if not self.began.done():
            self.began.set_result(None)
        self.done.set_result(None)

    # JSON

    def _opening(self) -> tuple[bytes, bytes]:
        """Return the start of each event: up to a choice's index, and up to the choices."""
        job = self.job
        kind = "chat.completion.chunk" if job.chat else "text_completion"
        fields = {"id": self.id, "object": kind, "created": self.created, "model": job.model}
        opening = b"data: " + _encode(fields)[:-1] + b","
        usage = b'"usage":null,' if job.include_usage else b""
        return opening + usage + b'"choices":[{"index":', opening

    def event_affixes(self, index: int) -> tuple[bytes, bytes]:
        """Return the bytes before and after the text of an event that has only text."""
        if self.job.chat:
            head, tail = b',"delta":{"content":', b'},"logprobs":null,"finish_reason":null}]}\n\n'
        else:
            head, tail = b',"text":', b',"logprobs":null,"finish_reason":null}]}\n\n'
        return self._start + _encode(index) + head, tail

    def event(self, index: int, text: str, logprobs: Any, finish: str | None) -> None:
        """Buffer an event with all its fields."""
        if self.job.chat:
            delta = {} if finish is not None else {"content": text}
            fields = {"delta": delta, "logprobs": logprobs, "finish_reason": finish}
        else:
            fields = {"text": text, "logprobs": logprobs, "finish_reason": finish}
        content = _encode(fields)
        self.out += (self._start, _encode(index), b",", content[1:], b"]}\n\n")

    def usage(self) -> dict[str, Any]:
        """Return the token counts."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_generated_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_generated_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }

    def body(self) -> bytes:
        """Return the complete response body."""
        kind = "chat.completion" if self.job.chat else "text_completion"
        return _encode(
            {
                "id": self.id,
                "object": kind,
                "created": self.created,
                "model": self.job.model,
                "choices": [self._choice_fields(choice) for choice in self.choices],
                "usage": self.usage(),
            }
        )

    def _choice_fields(self, choice: Choice) -> dict[str, Any]:
        text, logprobs = "".join(choice.parts), choice.format_logprobs(choice.logprobs)
        fields: dict[str, Any] = {"index": choice.index}
        if self.job.chat:
            fields["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            fields["text"] = text
        return {**fields, "logprobs": logprobs, "finish_reason": choice.finish_reason}


_ROLE = b',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n'


def _seed(seed: int, index: int) -> int:
    """Return the seed of a choice.

    >>> _seed(5, 0), _seed(2**63 - 1, 1)
    (5, -9223372036854775808)
    """
    return (seed + index + 2**63) % 2**64 - 2**63


def _chat_logprob(one: Logprob, find: Callable[[int], tuple[str, bytes]]) -> dict[str, Any]:
    def fields(token: int, logprob: float) -> dict[str, Any]:
        text, content = find(token)
        return {"token": text, "logprob": logprob, "bytes": list(content)}

    top = [fields(token, logprob) for token, logprob in one.top]
    return {**fields(one.token, one.logprob), "top_logprobs": top}


def _token_name(text: str, content: bytes) -> str:
    """Return the text of a token, or its bytes if it is part of a character.

    >>> _token_name("a", b"a"), _token_name("\\ufffd", b"\\xc3")
    ('a', 'bytes:\\\\xc3')
    """
    if "\N{REPLACEMENT CHARACTER}" not in text:
        return text
    return "bytes:" + "".join([f"\\x{byte:02x}" for byte in content])
