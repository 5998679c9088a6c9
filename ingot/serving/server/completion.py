"""Generation of one HTTP response: submits requests to the engine, passes their output to a writer.

An HTTP request may have several prompts and `n` choices of each. The other choices of a prompt are
submitted when the first one has its first token: then the prompt's blocks are cached and shared.

Streaming costs the HTTP process about as much as everything else together, so the event of a token
is three byte strings joined, two of which are prepared in advance. Events are buffered until the
step is processed and sent as one write.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.responses import Response

from ingot.interop.tokenizer import Tokenizer
from ingot.serving.engine.detokenizer import StreamingDetokenizer
from ingot.serving.engine.output import Output
from ingot.serving.engine.reply import Delta
from ingot.serving.engine.request import FinishReason, Request
from ingot.serving.server.errors import ApiError, json_response
from ingot.serving.server.metrics import Metrics
from ingot.serving.server.writer import Reply, Usage, Writer, encode
from ingot.serving.workers.replicas import ReplicaSet

DEFAULT_RETRY_AFTER_S = 2
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

    engine: ReplicaSet
    tokenizer: Tokenizer
    metrics: Metrics
    cache_salt: bytes = b""
    priority: int = 0
    deadline: float | None = None
    session: str = ""
    on_end: Callable[[Any, bool], None] = lambda response, aborted: None
    """Called with the response when it has ended, and whether its client has disconnected."""


class Choice:
    """One of the completions of a response; an `OutputHandler`."""

    def __init__(self, completion: CompletionStream, index: int, prompt: int, seed: int) -> None:
        job, context = completion.job, completion.context
        self.client = completion
        self.prompt, self.seed = prompt, seed
        self.id = context.engine.new_id()
        self.tokens: list[int] = []
        """Generated so far."""
        self.followers: list[Choice] = []
        self.reply = Reply(index, prompt=job.prompts[prompt])
        self._echo = job.echo[prompt] if job.echo else ""
        self._parser = job.parser() if job.parser is not None else None
        self._detokenizer = StreamingDetokenizer(context.tokenizer, job.stop, job.visible)
        self._admitted = False
        self._observe_itl = context.metrics.itl.observe
        self._last = 0.0
        self._stop_token_ids = job.sampling_params.stop_token_ids
        plain = job.sampling_params.logprobs is None and not job.echo and self._parser is None
        self._affixes = completion.writer.affixes(index) if plain and job.stream else None

    @property
    def num_tokens(self) -> int:
        """Number of generated tokens."""
        return len(self.tokens)

    @property
    def finish_reason(self) -> str | None:
        """Why it ended; None before that."""
        return self.reply.finish_reason

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

    def submit(self) -> None:
        """Send the request to the engine."""
        context = self.client.context
        context.engine.add_request(self.request(), self, context.session)

    def on_error(self, status: int, message: str, hint: str) -> None:
        """Fail the whole response."""
        retry_after = DEFAULT_RETRY_AFTER_S if status in (429, 503) else None
        self.client.fail(ApiError(status, message, hint, retry_after))

    def on_output(self, output: Output, now: float) -> None:
        """Process the output of a step."""
        if output.num_cached_tokens is not None and not self._admitted:
            self._admitted = True  # again after the loss of an engine, which does not count
            self.client.on_admitted(self, output.num_cached_tokens)
        if output.prompt_logprobs is not None:
            self.reply.prompt_logprobs += output.prompt_logprobs
        tokens = output.tokens
        text = ""
        if tokens:
            if self.tokens:
                self._observe_itl((now - self._last) / len(tokens))
            else:
                self.client.on_first_token(self, now)
            self._last = now
            self.tokens += tokens
            if output.logprobs is not None:
                self.reply.logprobs += output.logprobs
            shown = tokens[:-1] if tokens[-1] in self._stop_token_ids else tokens
            text = self._detokenizer.feed(shown) if not self.client.job.prompt_only else ""
        if output.finish_reason is not None:
            self._on_last_output(output, text)
        elif self._detokenizer.stopped:
            self.client.context.engine.abort(self.id, FinishReason.STOP)
            self._finish(text, "stop")
        elif text or output.logprobs:
            self._send(text)

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

    def _send(self, text: str, last: bool = False) -> None:
        """Add the text to the reply, and to the stream."""
        if self._affixes is not None:
            if text:
                self.client.out += (self._affixes[0], encode(text), self._affixes[1])
            return
        deltas = self._divide(text, last)
        self.reply.add(deltas)
        unreported = len(self.reply.logprobs) > self.reply.num_reported
        if self.client.job.stream and (deltas or unreported):
            self.client.out.append(self.client.writer.deltas(self.reply, deltas))

    def _divide(self, text: str, last: bool) -> list[Delta]:
        if self._parser is not None:
            return self._parser.feed(text) + (self._parser.finish() if last else [])
        text, self._echo = self._echo + text, ""
        return [Delta("content", text)] if text else []

    def _finish(self, text: str, reason: str) -> None:
        self._send(text, last=True)
        called = self._parser is not None and self._parser.num_calls > 0
        self.reply.finish_reason = "tool_calls" if called and reason == "stop" else reason
        self.reply.stop_string = self._detokenizer.stop_string
        if self.client.job.stream:
            self.client.out.append(self.client.writer.finish(self.reply))
        self.client.on_finished()


class CompletionStream:
    """All choices of a job, from the first request to the engine to the last byte."""

    def __init__(self, writer: Writer, context: RequestContext) -> None:
        self.writer, self.context = writer, context
        self.job, self.id = writer.job, writer.id
        job = writer.job
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
                leader.submit()

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
        self._abort_choices()

    def fail(self, error: ApiError) -> None:
        """Fail the response; a stream that has started gets an error event."""
        if self.done.done():
            return
        self.error = error
        self._abort_choices()
        if self.job.stream and self.began.done():
            self.out.append(self.writer.error(error))
        self._complete()

    def body(self) -> bytes:
        """Return the complete response body."""
        return self.writer.body([choice.reply for choice in self.choices], self._usage())

    def response(self) -> Response:
        """Return the complete response."""
        return json_response(200, self.body())

    # Events of the choices

    def on_admitted(self, choice: Choice, num_cached_tokens: int) -> None:
        """Count the cached tokens of a prompt."""
        if choice.reply.index % self.job.n == 0:
            self.num_cached_tokens += num_cached_tokens

    def on_first_token(self, choice: Choice, now: float) -> None:
        """Start the response; submit the other choices of the prompt."""
        if self.ttft is None:
            self.ttft = now - self.started
            self.began.set_result(None)
        if self.job.stream and (events := self.writer.begin(choice.reply)):
            self.out.append(events)
        for follower in choice.followers:
            follower.submit()

    def on_finished(self) -> None:
        """Finish the response after its last choice."""
        self._num_unfinished -= 1
        if self._num_unfinished:
            return
        if self.job.stream:
            replies = [choice.reply for choice in self.choices]
            self.out.append(self.writer.end(replies, self._usage()))
        self._complete()

    def _abort_choices(self) -> None:
        for choice in self.choices:
            if choice.finish_reason is None:
                self.context.engine.abort(choice.id, FinishReason.CANCELLED)

    def _complete(self) -> None:
        if not self.began.done():
            self.began.set_result(None)
        self.done.set_result(None)

    def _usage(self) -> Usage:
        return Usage(self.num_prompt_tokens, self.num_generated_tokens, self.num_cached_tokens)


def _seed(seed: int, index: int) -> int:
    """Return the seed of a choice.

    >>> _seed(5, 0), _seed(2**63 - 1, 1)
    (5, -9223372036854775808)
    """
    return (seed + index + 2**63) % 2**64 - 2**63
