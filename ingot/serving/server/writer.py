"""The formats of OpenAI's completions and chats: events of a stream, and whole bodies.

A `Reply` is what one choice has generated; a writer turns its parts into bytes. Each API has its
own writer, chosen by the request: see also `ingot.serving.server.responses` and `.messages`.
"""

from __future__ import annotations

import secrets
import string
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ingot.serving.engine.detokenizer import TokenTexts
from ingot.serving.engine.output import Logprob
from ingot.serving.engine.reply import Delta
from ingot.serving.server.errors import ApiError
from ingot.serving.server.openai import GenerationJob

encode = msgspec.json.Encoder().encode
_ALPHANUMERIC = string.ascii_letters + string.digits


@dataclass
class ToolCall:
    """A call of a function; `arguments` are parts of a JSON object."""

    name: str
    # Templates of Mistral's models accept ids of nine characters only.
    id: str = field(
        default_factory=lambda: "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
    )
    arguments: list[str] = field(default_factory=list[str])

    def plain(self) -> dict[str, Any]:
        """Return it as in a chat message."""
        function = {"name": self.name, "arguments": "".join(self.arguments)}
        return {"id": self.id, "type": "function", "function": function}


@dataclass
class Reply:
    """What one choice has generated so far."""

    index: int
    prompt: tuple[int, ...] = ()
    content: list[str] = field(default_factory=list[str])
    reasoning: list[str] = field(default_factory=list[str])
    calls: list[ToolCall] = field(default_factory=list[ToolCall])
    logprobs: list[Logprob] = field(default_factory=list[Logprob])
    prompt_logprobs: list[Logprob] = field(default_factory=list[Logprob])
    finish_reason: str | None = None
    stop_string: str | None = None
    """The stop string that ended it, if any."""
    num_reported: int = 0
    """Log-probabilities that were sent in events."""
    num_chars: int = 0
    """Characters of the tokens whose log-probabilities were reported."""

    def add(self, deltas: Sequence[Delta]) -> None:
        """Append new parts."""
        for delta in deltas:
            if delta.kind == "content":
                self.content.append(delta.text)
            elif delta.kind == "reasoning":
                self.reasoning.append(delta.text)
            elif delta.kind == "call":
                self.calls.append(ToolCall(delta.text))
            else:
                self.calls[delta.call].arguments.append(delta.text)


@dataclass(frozen=True)
class Usage:
    """Numbers of tokens of a response."""

    prompt: int
    completion: int
    cached: int

    def plain(self) -> dict[str, Any]:
        """Return them as OpenAI's chats do.

        >>> Usage(3, 4, 2).plain()["total_tokens"]
        7
        """
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


class Writer(ABC):
    """Formats one response."""

    prefix: str
    """Of the response's id."""

    def __init__(self, job: GenerationJob, token_texts: TokenTexts) -> None:
        self.job = job
        self.id = f"{self.prefix}{uuid.uuid4().hex}"
        self.created = int(time.time())
        self._find = token_texts.find

    def affixes(self, index: int) -> tuple[bytes, bytes] | None:
        """Return the bytes before and after the text of an event that has only text; None if such
        events have to be written by `deltas`."""
        return None

    @abstractmethod
    def begin(self, reply: Reply) -> bytes:
        """Return the events before the first token of a choice."""

    @abstractmethod
    def deltas(self, reply: Reply, deltas: Sequence[Delta]) -> bytes:
        """Return the events of new parts, which `reply` has already."""

    @abstractmethod
    def finish(self, reply: Reply) -> bytes:
        """Return the events at the end of a choice."""

    @abstractmethod
    def end(self, replies: Sequence[Reply], usage: Usage) -> bytes:
        """Return the events after the last choice."""

    @abstractmethod
    def body(self, replies: Sequence[Reply], usage: Usage) -> bytes:
        """Return a whole body."""

    def error(self, error: ApiError) -> bytes:
        """Return the event of an error."""
        return b"data: " + error.body() + b"\n\n"


class _OpenAIWriter(Writer):
    """What the formats of chats and completions have in common."""

    object: str
    chunk: str

    def __init__(self, job: GenerationJob, token_texts: TokenTexts) -> None:
        super().__init__(job, token_texts)
        self._fields = {
            "created": self.created,
            "model": job.model,
            "system_fingerprint": job.version,
        }
        fields = {"id": self.id, "object": self.chunk, **self._fields}
        self._head = b"data: " + encode(fields)[:-1] + b","
        usage = b'"usage":null,' if job.include_usage else b""
        self._start = self._head + usage + b'"choices":[{"index":'

    def event(self, index: int, fields: dict[str, Any]) -> bytes:
        """Return the event of one choice."""
        return b"".join((self._start, encode(index), b",", encode(fields)[1:], b"]}\n\n"))

    def end(self, replies: Sequence[Reply], usage: Usage) -> bytes:
        done = b"data: [DONE]\n\n"
        if not self.job.include_usage:
            return done
        return b"".join(
            (self._head, b'"choices":[],"usage":', encode(usage.plain()), b"}\n\n", done)
        )

    def body(self, replies: Sequence[Reply], usage: Usage) -> bytes:
        return encode(
            {
                "id": self.id,
                "object": self.object,
                **self._fields,
                "choices": [self._choice(reply) for reply in replies],
                "usage": usage.plain(),
            }
        )

    def _choice(self, reply: Reply) -> dict[str, Any]:
        fields: dict[str, Any] = {"index": reply.index, **self._content(reply)}
        logprobs = self._logprobs(reply, reply.logprobs, first=True)
        return {**fields, "logprobs": logprobs, "finish_reason": reply.finish_reason}

    def _new_logprobs(self, reply: Reply) -> Any:
        sent, reply.num_reported = reply.num_reported, len(reply.logprobs)
        return self._logprobs(reply, reply.logprobs[sent:], first=not sent)

    @abstractmethod
    def _content(self, reply: Reply) -> dict[str, Any]: ...

    @abstractmethod
    def _logprobs(self, reply: Reply, logprobs: Sequence[Logprob], first: bool) -> Any: ...


class ChatWriter(_OpenAIWriter):
    """`/v1/chat/completions`."""

    prefix, object, chunk = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def affixes(self, index: int) -> tuple[bytes, bytes] | None:
        """Return the bytes around the text of an event."""
        tail = b'},"logprobs":null,"finish_reason":null}]}\n\n'
        return self._start + encode(index) + b',"delta":{"content":', tail

    def begin(self, reply: Reply) -> bytes:
        """Return the events before the first token."""
        return self._delta(reply, {"role": "assistant", "content": ""}, None)

    def deltas(self, reply: Reply, deltas: Sequence[Delta]) -> bytes:
        """Return the events of new parts."""
        logprobs = self._new_logprobs(reply)
        fields = [_delta_fields(reply, delta) for delta in deltas] or [{"content": ""}]
        first = self._delta(reply, fields[0], logprobs)
        return first + b"".join([self._delta(reply, one, None) for one in fields[1:]])

    def finish(self, reply: Reply) -> bytes:
        """Return the event with the finish reason."""
        return self._delta(reply, {}, None, reply.finish_reason)

    def _delta(
        self, reply: Reply, delta: dict[str, Any], logprobs: Any, reason: str | None = None
    ) -> bytes:
        fields = {"delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return self.event(reply.index, fields)

    def _content(self, reply: Reply) -> dict[str, Any]:
        text = "".join(reply.content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if reply.calls and not text.strip() else text,
            "refusal": None,
        }
        if reply.reasoning:
            message["reasoning_content"] = "".join(reply.reasoning)
        if reply.calls:
            message["tool_calls"] = [call.plain() for call in reply.calls]
        return {"message": message}

    def _logprobs(self, reply: Reply, logprobs: Sequence[Logprob], first: bool) -> Any:
        if self.job.sampling_params.logprobs is None:
            return None
        return {"content": [_chat_logprob(one, self._find) for one in logprobs]}


class CompletionWriter(_OpenAIWriter):
    """`/v1/completions`."""

    prefix, object, chunk = "cmpl-", "text_completion", "text_completion"

    def affixes(self, index: int) -> tuple[bytes, bytes] | None:
        """Return the bytes around the text of an event."""
        tail = b',"logprobs":null,"finish_reason":null}]}\n\n'
        return self._start + encode(index) + b',"text":', tail

    def begin(self, reply: Reply) -> bytes:
        """Return the events before the first token."""
        return b""

    def deltas(self, reply: Reply, deltas: Sequence[Delta]) -> bytes:
        """Return the events of new parts."""
        text, logprobs = "".join([delta.text for delta in deltas]), self._new_logprobs(reply)
        return self.event(reply.index, {"text": text, "logprobs": logprobs, "finish_reason": None})

    def finish(self, reply: Reply) -> bytes:
        """Return the event with the finish reason."""
        fields = {"text": "", "logprobs": None, "finish_reason": reply.finish_reason}
        return self.event(reply.index, fields)

    def _content(self, reply: Reply) -> dict[str, Any]:
        return {"text": "".join(reply.content)}

    def _logprobs(self, reply: Reply, logprobs: Sequence[Logprob], first: bool) -> Any:
        if self.job.sampling_params.logprobs is None:
            return None
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        fields: dict[str, list[Any]] = {name: [] for name in names}
        if self.job.echo and first:
            self._add(fields, reply, [Logprob(reply.prompt[0], 0.0), *reply.prompt_logprobs])
            fields["token_logprobs"][0] = fields["top_logprobs"][0] = None
        self._add(fields, reply, () if self.job.prompt_only else logprobs)
        return fields

    def _add(self, fields: dict[str, list[Any]], reply: Reply, logprobs: Sequence[Logprob]) -> None:
        for one in logprobs:
            text, content = self._find(one.token)
            fields["tokens"].append(_token_name(text, content))
            fields["token_logprobs"].append(one.logprob)
            top = {_token_name(*self._find(token)): value for token, value in one.top}
            fields["top_logprobs"].append(top)
            fields["text_offset"].append(reply.num_chars)
            reply.num_chars += len(text)


def _delta_fields(reply: Reply, delta: Delta) -> dict[str, Any]:
    if delta.kind == "content":
        return {"content": delta.text}
    if delta.kind == "reasoning":
        return {"reasoning_content": delta.text}
    call: dict[str, Any] = {"index": delta.call}
    if delta.kind == "call":
        call |= {"id": reply.calls[delta.call].id, "type": "function"}
        call["function"] = {"name": delta.text, "arguments": ""}
    else:
        call["function"] = {"arguments": delta.text}
    return {"tool_calls": [call]}


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
