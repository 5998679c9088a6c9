"""Request handling of one model: from a validated body to a response.

A request passes these checks, in this order, before any of its tokens is computed:

    the guard       API key (401), server state (503), body size (413, 408)
    its schema      400 for invalid JSON, 422 for an unknown or out-of-range field
    the gateway     404 for an unknown model
    admission       429 with Retry-After, by an estimate of its tokens
    the tokenizer   400 for more tokens than the model's context
    the engine      422 for a request that can never run
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from starlette.responses import Response

from ingot.interop.tokenizer import Tokenizer
from ingot.serving.engine.chat import ChatFormat
from ingot.serving.engine.detokenizer import TokenTexts
from ingot.serving.engine.sampling_params import SamplingParams
from ingot.serving.server.admission import (
    Admission,
    Ticket,
    VersionAdmission,
    estimate_tokens,
)
from ingot.serving.server.asgi import Scope
from ingot.serving.server.completion import CompletionStream, RequestContext
from ingot.serving.server.embedding import (
    EmbeddingBatch,
    EmbeddingJob,
    check_inputs,
    encode_inputs,
)
from ingot.serving.server.errors import ApiError, RequestError, json_response
from ingot.serving.server.keys import ANONYMOUS
from ingot.serving.server.metrics import Metrics
from ingot.serving.server.openai import (
    DEFAULT_MAX_TOKENS,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    GenerationJob,
    Message,
    NamedTool,
    TokenizeRequest,
    Unprocessable,
)
from ingot.serving.server.response import AnyResponse, EngineResponse
from ingot.serving.server.writer import ChatWriter, CompletionWriter, Writer
from ingot.serving.workers.replicas import ReplicaSet

OFFLOAD_CHARS = 4096
"""Texts from this length on are tokenized in a thread."""
_encode = msgspec.json.Encoder().encode


@dataclass(kw_only=True)
class Service:
    """The engine, tokenizer, admission control and metrics that requests of a model use."""

    model: str
    tokenizer: Tokenizer
    """That of a classifier is empty."""
    engine: ReplicaSet
    admission: Admission | VersionAdmission
    version: str = ""
    """Of the model: answers name it."""
    max_request_s: float = 600.0
    """Maximum duration of a request."""
    metrics: Metrics = field(default_factory=Metrics)
    on_end: Callable[[AnyResponse, bool], None] = lambda response, aborted: None
    """Called when a request has finished, or its client has disconnected."""

    def __post_init__(self) -> None:
        self.token_texts = TokenTexts(self.tokenizer)
        self.chat_format = ChatFormat(self.tokenizer)

    # Endpoints

    async def complete(self, body: CompletionRequest, scope: Scope) -> Response:
        """Handle `/v1/completions`."""
        n, prompts = body.n or 1, body.prompts()
        limit = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        ticket = self._admit(scope, n * len(prompts), limit)
        try:
            ids = [await self._tokenize(prompt, body.add_special_tokens) for prompt in prompts]
            echo = [self._echo(prompt) for prompt in prompts] if body.echo else []
            job = GenerationJob(
                model=body.model or self.model,
                version=self.version,
                adapter=self._adapter(body.model),
                prompts=ids,
                echo=echo,
                n=n,
                max_tokens=self._max_new_tokens(ids, body.max_tokens, DEFAULT_MAX_TOKENS),
                sampling_params=body.sampling_params(
                    tuple(self.tokenizer.eos_token_ids),
                    random.getrandbits(63),
                    logprobs=body.logprobs,
                    prompt_logprobs=body.logprobs if body.echo else None,
                ),
                stop=body.stop_strings(),
                stream=bool(body.stream),
                include_usage=bool(body.stream_options and body.stream_options.include_usage),
                prompt_only=body.max_tokens == 0,
            )
            writer = CompletionWriter(job, self.token_texts)
            deadline = self.deadline(scope, body.timeout)
            return self._respond(writer, ticket, deadline, body.prompt_cache_key)
        except BaseException:
            self.admission.release(ticket, time.monotonic())
            raise

    async def chat(
        self,
        body: ChatRequest,
        scope: Scope,
        writer: Callable[[GenerationJob, TokenTexts], Writer] = ChatWriter,
    ) -> Response:
        """Handle `/v1/chat/completions`, and other APIs that are translated to it."""
        n = body.n or 1
        ticket = self._admit(scope, n, body.limit())
        try:
            functions = body.functions()
            tools = [tool.model_dump(exclude_unset=True) for tool in body.tools or ()]
            prompt = await self._render(
                body.messages, tools if functions else None, body.chat_template_kwargs
            )
            ids = await self._tokenize_chat(prompt)
            parts = bool(functions) or self.chat_format.reasoning
            job = GenerationJob(
                model=body.model or self.model,
                version=self.version,
                adapter=self._adapter(body.model),
                prompts=[ids],
                echo=[],
                n=n,
                max_tokens=self._max_new_tokens([ids], body.limit(), None),
                sampling_params=self._chat_params(body, prompt, functions),
                stop=body.stop_strings(),
                stream=bool(body.stream),
                include_usage=bool(body.stream_options and body.stream_options.include_usage),
                parser=partial(self.chat_format.parser, prompt, bool(functions)) if parts else None,
                visible=self.chat_format.visible if parts else (),
            )
            deadline = self.deadline(scope, body.timeout)
            writing = writer(job, self.token_texts)
            return self._respond(writing, ticket, deadline, body.prompt_cache_key)
        except BaseException:
            self.admission.release(ticket, time.monotonic())
            raise

    def _chat_params(
        self, body: ChatRequest, prompt: str, functions: dict[str, dict[str, Any] | None]
    ) -> SamplingParams:
        params = body.sampling_params(
            tuple(self.tokenizer.eos_token_ids),
            random.getrandbits(63),
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        )
        if not functions:
            return params
        if params.grammar is not None and params.grammar.kind != "json_schema":
            raise Unprocessable(
                "response_format: with tools, only JSON is supported",
                hint='set tool_choice to "none", or use a json_schema',
            )
        named = isinstance(body.tool_choice, NamedTool)
        grammar = self.chat_format.grammar(
            functions,
            prompt,
            required=named or body.tool_choice == "required",
            parallel=not named and body.parallel_tool_calls is not False,
            content_schema=json.loads(params.grammar.text) if params.grammar else None,
        )
        return msgspec.structs.replace(params, grammar=grammar)

    async def tokenize(self, body: TokenizeRequest, scope: Scope) -> Response:
        """Handle `/tokenize`."""
        ticket = self._admit(scope, 1, 0)
        try:
            if body.messages is not None:
                ids = await self._tokenize_chat(await self._render(body.messages))
            else:
                ids = await self._tokenize(body.prompt or "", body.add_special_tokens)
        finally:
            self.admission.release(ticket, time.monotonic())
        fields = {"tokens": ids, "count": len(ids), "max_model_len": self._max_model_len()}
        return json_response(200, _encode(fields))

    async def embed(self, body: EmbeddingRequest, scope: Scope) -> Response:
        """Handle `/v1/embeddings`."""
        self._check_task(embeds=True)
        assert self.engine.info is not None
        if body.dimensions not in (None, self.engine.info.embedding_dim):
            message = f"dimensions: must be {self.engine.info.embedding_dim}"
            raise RequestError(ApiError(422, message, "omit it", param="dimensions"))
        ticket = self.admission.acquire(
            scope["ingot.tenant"],
            requests=1,
            tokens=estimate_tokens(scope["ingot.size"]),
            now=time.monotonic(),
        )
        try:
            inputs = await asyncio.to_thread(encode_inputs, body.inputs(), self.tokenizer)
            check_inputs(inputs, self.engine.info)
            self.admission.correct(ticket, sum(map(len, inputs)))
            batch = EmbeddingBatch(
                EmbeddingJob(
                    model=body.model or self.model,
                    inputs=inputs,
                    base64=body.encoding_format == "base64",
                ),
                self.context(ticket, self.deadline(scope, None)),
            )
            return EngineResponse(batch, ticket, admission=self.admission, metrics=self.metrics)
        except BaseException:
            self.admission.release(ticket, time.monotonic())
            raise

    def _adapter(self, model: str) -> str:
        """Return the adapter that a request's `model` names; empty for the base model."""
        return "" if model == self.model else model

    def _admit(self, scope: Scope, choices: int, max_tokens: int | None) -> Ticket:
        self._check_text()
        max_len = self._max_model_len()
        prompt_tokens = min(max_len, estimate_tokens(scope["ingot.size"]))
        tokens = choices * min(
            max_len, prompt_tokens + (max_len if max_tokens is None else max_tokens)
        )
        return self.admission.acquire(
            scope["ingot.tenant"], requests=choices, tokens=tokens, now=time.monotonic()
        )

    def _max_model_len(self) -> int:
        assert self.engine.info is not None
        return self.engine.info.max_model_len

    def _max_new_tokens(
        self, prompts: list[tuple[int, ...]], requested: int | None, default: int | None
    ) -> int:
        """Return the number of tokens to generate; raise an error if they do not fit."""
        assert self.engine.info is not None
        max_len, longest = self._max_model_len(), max(map(len, prompts))
        if max(map(max, prompts)) >= self.engine.info.vocab_size:
            raise Unprocessable(
                f"prompt: token ids must be below {self.engine.info.vocab_size:,}",
                hint="send text, or token ids of this model's tokenizer",
            )
        if longest + max(requested or 1, 1) > max_len:
            plus = f" plus {requested:,} requested" if requested else ""
            raise RequestError(
                ApiError(
                    400,
                    f"the prompt has {longest:,} tokens{plus}; the model's context is {max_len:,}",
                    "shorten the prompt, or request fewer tokens",
                    param="messages" if default is None else "prompt",
                    code="context_length_exceeded",
                )
            )
        if requested is not None:
            return requested
        return min(max_len - longest, default or max_len)

    def _echo(self, prompt: str | list[int]) -> str:
        if isinstance(prompt, str):
            return prompt.encode("utf-8", "replace").decode()
        return self.tokenizer.decode(prompt, skip_special_tokens=False)

    async def _tokenize(self, prompt: str | list[int], add_special_tokens: bool) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            return tuple(prompt)
        encode, options = self.tokenizer.encode, {"add_special_tokens": add_special_tokens}
        if len(prompt) < OFFLOAD_CHARS:
            ids = encode(prompt, **options)
        else:
            ids = await asyncio.to_thread(encode, prompt, **options)
        if not ids:
            raise Unprocessable("prompt: must not be empty", hint="give at least one token")
        return tuple(ids)

    async def _render(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None = None,
        variables: dict[str, Any] | None = None,
    ) -> str:
        plain = [message.plain() for message in messages]
        render = self.chat_format.render
        return await asyncio.to_thread(lambda: render(plain, tools, **(variables or {})))

    async def _tokenize_chat(self, text: str) -> tuple[int, ...]:
        encode = self.tokenizer.encode
        if len(text) >= OFFLOAD_CHARS:
            return tuple(await asyncio.to_thread(encode, text, add_special_tokens=False))
        ids = encode(text, add_special_tokens=False)
        if not ids:
            raise Unprocessable("messages: must not be empty", hint="give at least one token")
        return tuple(ids)

    def _respond(
        self, writer: Writer, ticket: Ticket, deadline: float, session: str | None
    ) -> Response:
        job = writer.job
        self._check_task(embeds=False)
        tokens = sum([len(p) + job.max_tokens for p in job.prompts]) * job.n
        self.admission.correct(ticket, tokens)
        completion = CompletionStream(writer, self.context(ticket, deadline, session))
        return EngineResponse(completion, ticket, admission=self.admission, metrics=self.metrics)

    def _check_text(self) -> None:
        """Raise a 400 unless the model has a tokenizer."""
        assert self.engine.info is not None
        if self.engine.info.signature is not None:
            message, hint = f"'{self.model}' is a classifier", f"use /v2/models/{self.model}/infer"
            raise RequestError(ApiError(400, message, hint, code="unsupported"))

    def _check_task(self, *, embeds: bool) -> None:
        """Raise a 400 unless the model computes embeddings, or generates text."""
        assert self.engine.info is not None
        if embeds == (self.engine.info.embedding_dim is not None):
            return
        message = (
            f"'{self.model}' {'does not support embeddings' if embeds else 'generates no text'}"
        )
        hint = "serve an embedding model" if embeds else "it has /v1/embeddings only"
        raise RequestError(ApiError(400, message, hint, code="unsupported"))

    def deadline(self, scope: Scope, timeout: float | None) -> float:
        """Return when a request fails; it may have waited for its model."""
        return scope["ingot.received_at"] + min(timeout or self.max_request_s, self.max_request_s)

    def context(
        self, ticket: Ticket, deadline: float, session: str | None = None
    ) -> RequestContext:
        """Return what a request needs of the server."""
        anonymous = ticket.tenant is ANONYMOUS
        return RequestContext(
            engine=self.engine,
            tokenizer=self.tokenizer,
            metrics=self.metrics,
            cache_salt=b"" if anonymous else ticket.tenant.cache_salt,
            priority=0 if anonymous else ticket.priority,
            deadline=deadline,
            session=f"{ticket.tenant.name} {session}" if session else "",
            on_end=self.on_end,
        )
