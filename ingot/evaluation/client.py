"""The model of an OpenAI-compatible server, for evaluation.

Answers come from `/v1/completions` (text prompts) and `/v1/chat/completions` (messages). Texts and
choices are scored with `echo` and `logprobs` of `/v1/completions`, which ingot and vLLM support.

Threads have a bounded number of requests under way.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from queue import SimpleQueue
from typing import Annotated, Any, TypeVar, cast

import msgspec

from ingot.core.errors import ConfigError
from ingot.evaluation.metric import TextScore
from ingot.evaluation.model import (
    SampleOutput,
    SampleRequest,
    num_scored_bytes,
    row_error,
    split_choice,
)
from ingot.evaluation.task import ChoiceRow, EvalTask, PerplexityRow, Row
from ingot.interop.openai_client import HttpStatusError, OpenAIClient, ServerError

MAX_CONCURRENCY = 1024

T = TypeVar("T")
R = TypeVar("R")


@dataclass(kw_only=True)
class HttpModel:
    """The model of a server.

    Args:
        task: The task to evaluate.
        url: Address of the server, with or without `/v1`.
        model_name: Name of the model; None if the server has only one.
        key: API key.
        concurrency: The most requests under way at one time.
    """

    task: EvalTask
    url: str
    model_name: str | None = None
    key: str | None = field(default=None, repr=False)
    concurrency: int = 32

    def __post_init__(self) -> None:
        if not 1 <= self.concurrency <= MAX_CONCURRENCY:
            raise ConfigError(
                f"concurrency: expected 1 to {MAX_CONCURRENCY}, got {self.concurrency}",
                hint=f"give 1 to {MAX_CONCURRENCY}",
            )
        self._client = OpenAIClient(self.url, self.key)
        self.model_name = self._client.find_model(self.model_name)

    def describe(self) -> dict[str, Any]:
        """Return the address and the name of the model."""
        return {"url": self._client.base, "name": self.model_name}

    def check(self, rows: Iterable[Row]) -> None:
        """Reject rows that a server cannot score: choices after messages."""
        for row in rows:
            if isinstance(row, ChoiceRow) and not isinstance(row.prompt, str):
                message = "servers score choices after a text only, got messages"
                hint = "give the prompt as text, or evaluate the model directory"
                raise row_error(self.task, row, message, hint)

    def score_texts(
        self, rows: Iterator[PerplexityRow]
    ) -> Iterator[tuple[PerplexityRow, TextScore]]:
        """Compute the log-probability of each text."""
        return self._map(self._score_text, rows)

    def score_choices(self, rows: Iterator[ChoiceRow]) -> Iterator[tuple[ChoiceRow, list[float]]]:
        """Compute the log-probability of each choice of a row after its prompt."""
        return self._map(self._score_row, rows)

    def generate(
        self, requests: Iterator[SampleRequest]
    ) -> Iterator[tuple[SampleRequest, SampleOutput]]:
        """Generate answers."""
        return self._map(self._generate, requests)

    def _map(self, function: Callable[[T], R], items: Iterator[T]) -> Iterator[tuple[T, R]]:
        """Call the function in threads. They are daemons: Ctrl-C does not wait for responses."""
        inbox: SimpleQueue[T | None] = SimpleQueue()
        outbox: SimpleQueue[tuple[T, R | None, BaseException | None]] = SimpleQueue()
        num_threads = num_running = 0
        try:
            while True:
                for item in islice(items, self.concurrency - num_running):
                    num_running += 1
                    if num_running > num_threads:
                        num_threads += 1
                        arguments = (function, inbox, outbox)
                        threading.Thread(target=_work, args=arguments, daemon=True).start()
                    inbox.put(item)
                if not num_running:
                    return
                item, result, error = outbox.get()
                num_running -= 1
                if error is not None:
                    raise error
                yield item, cast(R, result)
        finally:
            for _ in range(num_threads):
                inbox.put(None)

    # Requests of a row

    def _score_text(self, row: PerplexityRow) -> TextScore:
        tokens, logprobs = self._echo(row, row.text)
        num_bytes = num_scored_bytes(row.text, tokens[0])
        if not logprobs or not num_bytes:
            message = "at least 2 tokens have to be scored, got 1"
            raise row_error(self.task, row, message, "give a longer text, or remove the line")
        return TextScore(math.fsum(logprobs), len(logprobs), num_bytes)

    def _score_row(self, row: ChoiceRow) -> list[float]:
        prompt, delimiter = cast(str, row.prompt), self.task.settings.target_delimiter
        pairs = [split_choice(prompt, delimiter, choice) for choice in row.choices]
        body = {"prompt": pairs[0][0], "max_tokens": 1, "temperature": 0}
        num_context = self._complete(row, "completions", body).usage.prompt_tokens
        scores: list[float] = []
        for (context, continuation), choice in zip(pairs, row.choices, strict=True):
            tokens, logprobs = self._echo(row, context + continuation)
            if not 1 <= num_context < len(tokens):
                message = f"choice {choice!r:.80} has no tokens of its own"
                raise row_error(self.task, row, message, "change the choice, or the delimiter")
            scores.append(math.fsum(logprobs[num_context - 1 :]))  # the first token has none
        return scores

    def _echo(self, row: Row, text: str) -> tuple[list[str], list[float]]:
        """Return the tokens of a text, and the log-probabilities of those after the first."""
        body = {"prompt": text, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 0}
        response = self._complete(row, "completions", body)
        count = response.usage.prompt_tokens
        try:
            found = msgspec.convert(response.choices[0].logprobs, _EchoLogprobs)
            tokens, (_, *logprobs) = found.tokens[:count], found.token_logprobs[:count]
            return tokens, msgspec.convert(logprobs, list[float])
        except (msgspec.ValidationError, ValueError) as error:
            raise ServerError(
                f"{self._client.base}: no log-probabilities of the prompt in the response",
                hint="use a server that supports `echo` with `logprobs`, such as ingot or vLLM",
            ) from error

    def _generate(self, request: SampleRequest) -> SampleOutput:
        prompt, settings = request.row.prompt, self.task.settings
        body: dict[str, Any] = {
            "max_tokens": settings.max_tokens,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "seed": request.seed,
        }
        if settings.stop:
            body["stop"] = settings.stop
        path, name = ("chat/completions", "messages")
        if isinstance(prompt, str):
            path, name = ("completions", "prompt")
        response = self._complete(request.row, path, {name: prompt, **body})
        choice = response.choices[0]
        text = choice.text if choice.message is None else choice.message.content
        reason = choice.finish_reason or "stop"
        return SampleOutput(text or "", reason, response.usage.completion_tokens)

    def _complete(self, row: Row, path: str, body: dict[str, Any]) -> _Response:
        try:
            return self._client.send(path, _Response, {"model": self.model_name, **body})
        except HttpStatusError as error:
            raise row_error(
                self.task,
                row,
                f"the server answers {error.status}: {error.message}",
                "change the row or the settings accordingly",
            ) from error


def _work(
    function: Callable[[T], R],
    inbox: SimpleQueue[T | None],
    outbox: SimpleQueue[tuple[T, R | None, BaseException | None]],
) -> None:
    while (item := inbox.get()) is not None:
        try:
            outbox.put((item, function(item), None))
        except BaseException as error:
            outbox.put((item, None, error))


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _ChatMessage(msgspec.Struct):
    content: str | None = None


class _ResponseChoice(msgspec.Struct):
    text: str | None = None
    message: _ChatMessage | None = None
    logprobs: Any = None
    finish_reason: str | None = None


class _Response(msgspec.Struct):
    choices: Annotated[list[_ResponseChoice], msgspec.Meta(min_length=1)]
    usage: _Usage = _Usage()


class _EchoLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
