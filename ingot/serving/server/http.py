"""The HTTP API: OpenAI's, for one model.

A request passes, in this order, before a single token of it is computed:

    the gate        its key (401), the server's state (503), the size of its body (413, 408)
    its schema      400 for what is no JSON, 422 for a field that is unknown or out of bounds
    admission       429 with Retry-After, by an estimate of its tokens
    the tokenizer   400 for more than the model's context
    the engine      422 for what can never run

Then `Reply` waits for the engine and for the client, whichever ends first: a client that is gone
ends its requests in the engine at once. Nothing is sent before there is a first token, so that
whatever fails until then has its right status.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ingot.core.errors import IngotError
from ingot.core.log import logger
from ingot.interop.chat import ChatError
from ingot.interop.tokenizer import Tokenizer
from ingot.serving.engine.detokenizer import Pieces
from ingot.serving.server.admission import Admission, Shed, Ticket, estimate
from ingot.serving.server.completion import Answer, Failure, Place
from ingot.serving.server.engine_client import Front
from ingot.serving.server.keys import ANYBODY, Keys, Tenant
from ingot.serving.server.metrics import Facts, Metrics
from ingot.serving.server.openai import (
    DEFAULT_TOKENS,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    Job,
    Message,
    TokenizeRequest,
    Unprocessable,
)
from ingot.serving.server.protocol import TRANSPORT

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

MAX_BODY = 1 << 22
MAX_BODIES = 1 << 27
"""Of all requests together."""
MAX_DISCARDED = 1 << 26
"""Bytes of a body that are read for nothing but to be able to answer."""
BODY_SECONDS = 60.0
MAX_UNREAD = 1 << 18
"""Bytes of a stream that a client may leave unread, besides what the system's buffers take."""
SLOW_SECONDS = 30.0
"""How long a client may take to read the end of its answer."""
GRACE = 0.5
"""Seconds that the engine has to say itself that a deadline has passed."""
_THREAD = 4096  # characters from which a text is tokenized in a thread
_OPEN = frozenset({"/healthz", "/readyz", "/openapi.json"})
_json = msgspec.json.Encoder().encode
_log = logger("ingot.serving.access")
_errors = logger(__name__)


@dataclass(kw_only=True)
class Service:
    """What requests meet: the engine, the tokenizer, who may enter, and what is counted."""

    model: str
    tokenizer: Tokenizer
    front: Front
    admission: Admission
    keys: Keys | None = None
    seconds: float = 600.0
    """The longest that a request may take."""
    metrics: Metrics = field(default_factory=Metrics)
    draining: bool = False
    stuck: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        self.created = int(time.time())
        self.pieces = Pieces(self.tokenizer)
        self.bodies = 0

    def unready(self) -> Failure | None:
        """Why no request can be taken, if so."""
        if self.draining:
            return Failure(503, "the server is about to stop", "ask another one", 5)
        if not self.front.ready:
            return Failure(503, f"the engine is {self.front.doing}", "try again soon", 2)
        if self.stuck():
            return Failure(503, "the engine is stuck and will be restarted", "try again soon", 5)
        return None

    def tenant(self, scope: Scope) -> Tenant | None:
        """Who asks, by their key; None for a wrong one."""
        if self.keys is None:
            return ANYBODY
        for name, value in _headers(scope):
            if name == b"authorization" and value[:7].lower() == b"bearer ":
                return self.keys.find(value[7:].strip().decode("latin-1"))
        return None

    # From a body to an answer

    async def complete(self, body: CompletionRequest, scope: Scope) -> Response:
        """Answer `/v1/completions`."""
        n, prompts = body.n or 1, body.prompts()
        limit = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
        ticket = self._enter(scope, body.model, n * len(prompts), limit)
        try:
            ids = [await self._encode(prompt, body.add_special_tokens) for prompt in prompts]
            echo: dict[str, Any] = {}
            if body.echo:
                echo["texts"] = [
                    _clean(p)
                    if isinstance(p, str)
                    else self.tokenizer.decode(p, skip_special_tokens=False)
                    for p in prompts
                ]
            job = Job(
                chat=False,
                model=self.model,
                prompts=ids,
                texts=echo.get("texts", []),
                n=n,
                max_tokens=self._room(ids, body.max_tokens, DEFAULT_TOKENS),
                options=body.options(
                    tuple(self.tokenizer.eos_token_ids),
                    random.getrandbits(63),
                    logprobs=body.logprobs,
                    prompt_logprobs=body.logprobs if body.echo else None,
                ),
                stops=body.stops(),
                stream=bool(body.stream),
                usage=bool(body.stream_options and body.stream_options.include_usage),
                silent=body.max_tokens == 0,
            )
            return self._reply(job, ticket, body.timeout)
        except BaseException:
            self.admission.leave(ticket, time.monotonic())
            raise

    async def chat(self, body: ChatRequest, scope: Scope) -> Response:
        """Answer `/v1/chat/completions`."""
        n = body.n or 1
        ticket = self._enter(scope, body.model, n, body.limit())
        try:
            ids = await self._chat_ids(body.messages, body.tools, body.chat_template_kwargs)
            job = Job(
                chat=True,
                model=self.model,
                prompts=[ids],
                texts=[],
                n=n,
                max_tokens=self._room([ids], body.limit(), None),
                options=body.options(
                    tuple(self.tokenizer.eos_token_ids),
                    random.getrandbits(63),
                    logprobs=(body.top_logprobs or 0) if body.logprobs else None,
                ),
                stops=body.stops(),
                stream=bool(body.stream),
                usage=bool(body.stream_options and body.stream_options.include_usage),
            )
            return self._reply(job, ticket, body.timeout)
        except BaseException:
            self.admission.leave(ticket, time.monotonic())
            raise

    async def tokenize(self, body: TokenizeRequest, scope: Scope) -> Response:
        """Answer `/tokenize`."""
        ticket = self._enter(scope, body.model, 1, 0)
        try:
            if body.messages is not None:
                ids = await self._chat_ids(body.messages, None, None)
            else:
                ids = await self._encode(body.prompt or "", body.add_special_tokens)
        finally:
            self.admission.leave(ticket, time.monotonic())
        found = {"tokens": ids, "count": len(ids), "max_model_len": self._context()}
        return _response(200, _json(found))

    def embed(self, body: EmbeddingRequest) -> Response:
        """Answer `/v1/embeddings`: a decoder was not trained to make any."""
        self.require(body.model)
        what = f"'{self.model}' writes text and makes no embeddings"
        return _failed(
            Failure(400, what, "use a model that was trained for them", code="unsupported")
        )

    def require(self, model: str) -> None:
        """Refuse the name of another model."""
        if model not in ("", self.model):
            raise _Refused(
                Failure(
                    404,
                    f"there is no model '{model}' here",
                    f"ask for '{self.model}'",
                    param="model",
                    code="model_not_found",
                )
            )

    def _enter(self, scope: Scope, model: str, choices: int, limit: int | None) -> Ticket:
        self.require(model)
        context = self._context()
        each = min(context, estimate(scope["ingot.size"]))
        tokens = choices * min(context, each + (context if limit is None else limit))
        return self.admission.enter(
            scope["ingot.tenant"], requests=choices, tokens=tokens, now=time.monotonic()
        )

    def _context(self) -> int:
        assert self.front.hello is not None
        return self.front.hello.context

    def _room(self, prompts: list[tuple[int, ...]], wanted: int | None, default: int | None) -> int:
        """How many tokens may be written; an error if those wanted do not fit."""
        assert self.front.hello is not None
        context, longest = self._context(), max(map(len, prompts))
        if max(map(max, prompts)) >= self.front.hello.vocabulary:
            raise Unprocessable(
                f"a token of the prompt is not among the model's {self.front.hello.vocabulary:,}",
                hint="send text, or tokens of this model's tokenizer",
            )
        if longest + max(wanted or 1, 1) > context:
            asked = f" and {wanted:,} are asked for" if wanted else ""
            raise _Refused(
                Failure(
                    400,
                    f"the prompt has {longest:,} tokens{asked}; the model's context is {context:,}",
                    "shorten the prompt, or ask for fewer tokens",
                    param="messages" if default is None else "prompt",
                    code="context_length_exceeded",
                )
            )
        if wanted is not None:
            return wanted
        return min(context - longest, default or context)

    async def _encode(self, prompt: str | list[int], special: bool) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            return tuple(prompt)
        if len(prompt) < _THREAD:
            ids = self.tokenizer.encode(prompt, add_special_tokens=special)
        else:
            ids = await asyncio.to_thread(self.tokenizer.encode, prompt, add_special_tokens=special)
        if not ids:
            raise Unprocessable("the prompt is empty", hint="give at least one token")
        return tuple(ids)

    async def _chat_ids(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None,
        variables: dict[str, Any] | None,
    ) -> tuple[int, ...]:
        plain = [message.plain() for message in messages]
        text = await asyncio.to_thread(
            lambda: self.tokenizer.render_chat(plain, tools, **(variables or {}))
        )
        if len(text) < _THREAD:
            return tuple(self.tokenizer.encode(text, add_special_tokens=False)) or _nothing()
        return tuple(await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens=False))

    def _reply(self, job: Job, ticket: Ticket, seconds: float | None) -> Response:
        tokens = sum([len(p) + job.max_tokens for p in job.prompts]) * job.n
        self.admission.correct(ticket, tokens)
        place = Place(
            front=self.front,
            tokenizer=self.tokenizer,
            pieces=self.pieces,
            metrics=self.metrics,
            cache_salt=b"" if ticket.tenant is ANYBODY else ticket.tenant.salt,
            priority=0 if ticket.tenant is ANYBODY else ticket.priority,
            deadline=time.monotonic() + min(seconds or self.seconds, self.seconds),
        )
        return Reply(self, Answer(job, place), ticket)


class _Refused(Exception):
    """Ends a request with a failure."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.what)
        self.failure = failure


def _nothing() -> tuple[int, ...]:
    raise Unprocessable("the messages are empty", hint="give at least one token")


def _clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


class Reply(Response):
    """A response that waits for the engine, and for the client to leave."""

    def __init__(self, service: Service, answer: Answer, ticket: Ticket) -> None:
        self.status_code = 200
        self.background = None
        self._service, self._answer, self._ticket = service, answer, ticket
        self._streaming = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        answer = self._answer
        gone = asyncio.ensure_future(_left(receive))
        try:
            answer.ask()
            if await self._wait(answer.began, gone) and answer.failure is None:
                if answer.job.stream:
                    await self._stream(scope, send, gone)
                elif await self._wait(answer.done, gone) and answer.failure is None:
                    await _response(200, answer.body())(scope, receive, send)
            if answer.failure is not None and not self._streaming:
                await _failed(answer.failure)(scope, receive, send)
        finally:
            left = gone.done() and not answer.done.done()
            gone.cancel()
            answer.cancel()
            self._over(left)

    async def _wait(self, event: asyncio.Future[None], gone: asyncio.Future[None]) -> bool:
        """Wait for it; False if the client left before. A deadline fails the answer."""
        deadline = self._answer.place.deadline
        assert deadline is not None
        left = deadline + GRACE - time.monotonic()
        await asyncio.wait((event, gone), timeout=left, return_when=asyncio.FIRST_COMPLETED)
        if not event.done() and not gone.done():
            what = "the answer was not complete in time"
            self._answer.fail(Failure(504, what, "give it more, or ask for less"))
        return event.done()

    async def _stream(self, scope: Scope, send: Send, gone: asyncio.Future[None]) -> None:
        answer = self._answer
        transport: asyncio.Transport = scope[TRANSPORT]
        self._streaming = True
        await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})

        def write(data: bytes) -> None:
            if transport.is_closing():
                return  # and `gone` is, or will be, done
            if transport.get_write_buffer_size() > MAX_UNREAD:
                transport.abort()
            else:
                transport.write(b"%x\r\n%b\r\n" % (len(data), data))

        answer.stream_to(write)
        await self._wait(answer.done, gone)
        answer.flush()
        if answer.done.done():
            try:
                last = send({"type": "http.response.body", "body": b"", "more_body": False})
                await asyncio.wait_for(last, SLOW_SECONDS)
            except TimeoutError:
                transport.abort()

    def _over(self, left: bool) -> None:
        answer, service, now = self._answer, self._service, time.monotonic()
        service.admission.leave(self._ticket, now)
        end = "abort" if left else "error" if answer.failure else answer.choices[0].finish
        seconds = now - answer.started
        service.metrics.answered(
            end or "error",
            first=answer.first,
            total=seconds,
            prompt=answer.prompted,
            generated=answer.generated,
        )
        fields = {
            "id": answer.id,
            "tenant": self._ticket.tenant.name,
            "end": end,
            "status": answer.failure.status if answer.failure else 200,
            "error": answer.failure.what if answer.failure else None,
            "choices": len(answer.choices),
            "prompt_tokens": answer.prompted,
            "cached_tokens": answer.cached,
            "tokens": answer.generated,
            "first_token_seconds": answer.first and round(answer.first, 4),
            "seconds": round(seconds, 4),
        }
        _log.info(
            "%s, %s: %s, %d tokens after %d in %.2f s",
            *(answer.id, fields["tenant"], fields["error"] or end),
            *(answer.generated, answer.prompted, seconds),
            extra={"fields": fields},
        )


_EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


async def _left(receive: Receive) -> None:
    """Return when the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Gate:
    """In front of the application: keys, the server's state, the size of bodies."""

    def __init__(self, service: Service, app: Callable[..., Awaitable[None]]) -> None:
        self._service, self._app = service, app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer what may not pass, and pass on the rest with its whole body."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        service = self._service

        async def counted(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                service.metrics.statuses[message["status"]] += 1
            await send(message)

        if scope["path"] in _OPEN:
            await self._app(scope, receive, counted)
            return
        body, held = _Body(receive), 0
        try:
            failure = self._refusal(scope) or await self._read(scope, body)
            if failure is not None:
                await body.discard()
                await _failed(failure, close=not body.ended)(scope, receive, counted)
                return
            held = scope["ingot.size"] = len(body.content)
            service.bodies += held
            await self._app(scope, body.replay, counted)
        finally:
            service.bodies -= held

    def _refusal(self, scope: Scope) -> Failure | None:
        tenant = self._service.tenant(scope)
        if tenant is None:
            hint = "send one of the server's keys: Authorization: Bearer KEY"
            return Failure(401, "the key is missing or wrong", hint, code="invalid_api_key")
        scope["ingot.tenant"] = tenant
        if scope["method"] != "POST":
            return None
        # A page in a browser may send other kinds to this machine without asking first.
        if not any(n == b"content-type" and _is_json(v) for n, v in _headers(scope)):
            what = "the body's type is not application/json"
            return Failure(415, what, "send Content-Type: application/json")
        return self._service.unready()

    async def _read(self, scope: Scope, body: _Body) -> Failure | None:
        """Read the body; a failure if it is too large, or too slow."""
        large = Failure(
            413, f"the body has more than {MAX_BODY:,} bytes", "send less in one request"
        )
        for name, value in _headers(scope):
            if name == b"content-length" and int(value) > MAX_BODY:
                return large
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while not body.ended:
                    body.content += await body.next()
                    if len(body.content) > MAX_BODY:
                        return large
                    if self._service.bodies + len(body.content) > MAX_BODIES:
                        return Failure(429, "too many large requests at a time", "wait", 1)
        except TimeoutError:
            return Failure(408, f"the body took more than {BODY_SECONDS:g} s", "send it faster")
        return None


class _Body:
    """A request's body as it comes."""

    def __init__(self, receive: Receive) -> None:
        self.content = bytearray()
        self.ended = False
        self._receive, self._replayed = receive, False

    async def next(self) -> bytes:
        """The next part of it."""
        message = await self._receive()
        self.ended = not message.get("more_body", False)
        return message.get("body", b"")

    async def discard(self) -> None:
        """Read the rest, as most clients hear nothing before they have sent it all; not forever."""
        self.content, left = bytearray(), MAX_DISCARDED
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BODY_SECONDS / 6):
                while not self.ended and left > 0:
                    left -= len(await self.next())

    async def replay(self) -> MutableMapping[str, Any]:
        """What the application receives: all of it, and then what comes."""
        if self._replayed:
            return await self._receive()
        self._replayed, content = True, bytes(self.content)
        self.content = bytearray()
        return {"type": "http.request", "body": content, "more_body": False}


def _headers(scope: Scope) -> list[tuple[bytes, bytes]]:
    return scope["headers"]


def _is_json(kind: bytes) -> bool:
    return kind.partition(b";")[0].strip().lower() == b"application/json"


def _response(status: int, body: bytes, **headers: str) -> Response:
    return Response(body, status, headers, media_type="application/json")


def _failed(failure: Failure, close: bool = False) -> Response:
    headers: dict[str, str] = {}
    if failure.retry is not None:
        headers["retry-after"] = str(failure.retry)
    if failure.status == 401:
        headers["www-authenticate"] = "Bearer"
    if close:
        headers["connection"] = "close"  # some of the body may not have been read
    return _response(failure.status, failure.body(), **headers)


_STATUSES: dict[int | str, dict[str, Any]] = {
    400: {"description": "no JSON, or more than the model's context"},
    401: {"description": "the key is missing or wrong"},
    404: {"description": "no such model"},
    408: {"description": "the body came too slowly"},
    413: {"description": "the body is too large"},
    415: {"description": "the body's type is not application/json"},
    422: {"description": "a field is unknown or out of bounds"},
    429: {"description": "shed: come back after Retry-After"},
    500: {"description": "the step failed"},
    503: {"description": "loading, draining or dead"},
    504: {"description": "past the deadline"},
}


def app(service: Service) -> Gate:
    """The application of the main listener."""
    made = FastAPI(title="ingot", docs_url=None, redoc_url=None, responses=_STATUSES)
    _add_errors(made)
    _add_health(made, service)

    @made.post("/v1/completions", response_class=Response)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await service.complete(body, request.scope)

    @made.post("/v1/chat/completions", response_class=Response)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await service.chat(body, request.scope)

    @made.post("/v1/embeddings", response_class=Response)
    async def embeddings(body: EmbeddingRequest) -> Response:
        return service.embed(body)

    @made.post("/tokenize", response_class=Response)
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        return await service.tokenize(body, request.scope)

    @made.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(service)]}

    @made.get("/v1/models/{name}")
    async def one_model(name: str) -> dict[str, Any]:
        service.require(name)
        return _model(service)

    return Gate(service, made)


def control(service: Service, facts: Facts, drain: Callable[[], None]) -> FastAPI:
    """The application of the control listener."""
    made = FastAPI(title="ingot control", docs_url=None, redoc_url=None)
    _add_health(made, service)

    @made.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        return Response(facts.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @made.post("/drain", response_class=Response)
    async def start_draining() -> Response:
        drain()
        return _response(202, _json({"status": "draining"}))

    return made


def _model(service: Service) -> dict[str, Any]:
    hello = service.front.hello
    return {
        "id": service.model,
        "object": "model",
        "created": service.created,
        "owned_by": "ingot",
        "max_model_len": hello.context if hello else None,
    }


def _add_health(made: FastAPI, service: Service) -> None:
    @made.get("/healthz", response_class=Response)
    async def healthz() -> Response:
        return _response(200, _json({"status": "ok"}))

    @made.get("/readyz", response_class=Response, responses={503: {"description": "not ready"}})
    async def readyz() -> Response:
        failure = service.unready()
        return _response(200, _json({"status": "ready"})) if failure is None else _failed(failure)


def _add_errors(made: FastAPI) -> None:
    async def refused(_: Request, error: Exception) -> Response:
        return _failed(cast(_Refused, error).failure)

    async def shed(_: Request, error: Exception) -> Response:
        found = cast(Shed, error)
        return _failed(Failure(429, found.message, found.hint, found.retry))

    async def unprocessable(_: Request, error: Exception) -> Response:
        found = cast(IngotError, error)
        status = 400 if isinstance(error, ChatError) else 422
        return _failed(Failure(status, found.message, found.hint))

    async def invalid(_: Request, error: Exception) -> Response:
        return _failed(_invalid(cast(RequestValidationError, error)))

    async def http(_: Request, error: Exception) -> Response:
        found = cast(HTTPException, error)
        hint = "see /openapi.json for what there is"
        response = _failed(Failure(found.status_code, str(found.detail), hint))
        response.headers.update(found.headers or {})
        return response

    async def bug(_: Request, error: Exception) -> Response:
        _errors.error("a request failed", exc_info=error)
        return _failed(Failure(500, "the server has made a mistake", "report it"))

    made.add_exception_handler(_Refused, refused)
    made.add_exception_handler(Shed, shed)
    made.add_exception_handler(IngotError, unprocessable)
    made.add_exception_handler(RequestValidationError, invalid)
    made.add_exception_handler(HTTPException, http)
    made.add_exception_handler(Exception, bug)


def _invalid(error: RequestValidationError) -> Failure:
    """The first thing that is wrong. What was sent is not repeated: it may be long or private."""
    first = error.errors()[0]
    place = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        return Failure(400, "the body is no JSON", "send an object as JSON")
    where = ".".join(place)
    what = f"{where}: {first['msg']}" if where else str(first["msg"])
    param = place[0] if place else None
    return Failure(422, what[:1000], "see /openapi.json for the fields", param=param)
