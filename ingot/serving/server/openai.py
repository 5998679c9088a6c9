"""Request bodies of OpenAI's API, validated.

Every number is bounded and finite, every list and string has a maximum length; violations are
answered with 422 and the field's name. Fields are of three kinds:

- parameters of the engine, including some of vLLM's (`top_k`, `min_p`, `repetition_penalty`,
  `ignore_eos`...), which clients pass as `extra_body`;
- fields that OpenAI's clients send and that do not change the output (`user`, `metadata`...):
  accepted and ignored;
- all others are rejected, as OpenAI does: a silently dropped field (`logit_bais`) would be a wrong
  answer that goes unnoticed.

Both kinds of request become a `GenerationJob`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from ingot.core.errors import IngotError
from ingot.serving.engine.reply import ReplyParser
from ingot.serving.engine.sampling_params import (
    MAX_GRAMMAR_CHARS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    Grammar,
    SamplingParams,
)

MAX_TOKENS = 1 << 20
MAX_TEXT = 1 << 22
MAX_CHOICES = 128
MAX_INPUTS = 2048
"""Texts of a request for embeddings, as OpenAI's."""
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_MESSAGES = 4096
MAX_TOOLS = 128
MAX_SECONDS = 3600.0
DEFAULT_MAX_TOKENS = 16
"""`max_tokens` of a completion, as OpenAI's. A chat may fill the model's context."""

_Token = Annotated[int, Field(ge=0, lt=2**32)]
_Tokens = Annotated[list[_Token], Field(min_length=1, max_length=MAX_TOKENS)]
Text = Annotated[str, Field(max_length=MAX_TEXT)]
ShortText = Annotated[str, Field(max_length=256)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
JsonObject = Annotated[dict[str, Any], Field(max_length=256)]


def _bias(value: dict[str, float]) -> dict[str, float]:
    for token in value:
        if not (token.isascii() and token.isdigit() and len(token) <= 10):
            raise ValueError("keys must be token ids")
    return value


def _as_list(value: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """Return one or several texts as a list; a list of numbers is one text."""
    if isinstance(value, str) or isinstance(value[0], int):
        return [value]  # pyright: ignore[reportReturnType]
    return list(value)  # pyright: ignore[reportReturnType, reportArgumentType]


class Strict(BaseModel):
    """A part of a request body; unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class StreamOptions(Strict):
    """`stream_options`."""

    include_usage: bool = False
    include_obfuscation: bool = False


class JsonSchema(Strict):
    """`json_schema` of `response_format`."""

    name: ShortText = ""
    description: Annotated[str, Field(max_length=4096)] | None = None
    schema_: dict[str, Any] = Field(default_factory=dict[str, Any], alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """Constraint on the output; `regex` and `grammar` are extensions."""

    type: Literal["text", "json_object", "json_schema", "regex", "grammar"] = "text"
    json_schema: JsonSchema | None = None
    regex: Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARS)] | None = None
    grammar: Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARS)] | None = None

    @model_validator(mode="after")
    def _complete(self) -> ResponseFormat:
        if self.type in ("json_schema", "regex", "grammar") and getattr(self, self.type) is None:
            raise ValueError(f"a response_format of type {self.type} needs {self.type}")
        return self

    def constraint(self) -> Grammar | None:
        """Return the grammar for the engine."""
        if self.regex is not None and self.type == "regex":
            return Grammar(kind="regex", text=self.regex)
        if self.grammar is not None and self.type == "grammar":
            return Grammar(kind="lark", text=self.grammar)
        if self.json_schema is not None and self.type == "json_schema":
            return Grammar.of_schema(self.json_schema.schema_)
        if self.type == "json_object":
            return Grammar.of_schema({"type": "object"})
        return None


class CommonParams(Strict):
    """Fields that completions and chats have in common."""

    model: ShortText = ""
    """Name of the served model or of an adapter; empty for the served model."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: (
        Annotated[
            dict[str, Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=MAX_LOGIT_BIAS),
            AfterValidator(_bias),
        ]
        | None
    ) = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None

    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    """Extension, as in vLLM; 0 and -1 disable it."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    ignore_eos: bool = False
    """Generate `max_tokens`, ignoring EOS."""
    timeout: Annotated[float, Field(gt=0, le=MAX_SECONDS)] | None = None
    """Seconds after which the request fails with 504."""
    prompt_cache_key: ShortText | None = None
    """Requests of one key prefer the same replica, where their prefix is cached."""
    user: Any = None
    """Requests of a user get the same version of the model: see `user_of`."""
    safety_identifier: Any = None
    """As OpenAI calls it now."""

    # Ignored: they do not change the output.
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    prompt_cache_retention: Any = None

    def stop_strings(self) -> tuple[str, ...]:
        """Return the stop strings."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def sampling_params(
        self, eos_token_ids: tuple[int, ...], seed: int, **more: Any
    ) -> SamplingParams:
        """Return the engine's parameters; `seed` is used if the request has none."""
        given: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k if self.top_k is not None and self.top_k > 0 else None,
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            **more,
        }
        grammar = None if self.response_format is None else self.response_format.constraint()
        return SamplingParams(
            seed=seed if self.seed is None else self.seed,
            logit_bias=tuple(
                (int(token), value) for token, value in (self.logit_bias or {}).items()
            ),
            stop_token_ids=() if self.ignore_eos else eos_token_ids,
            grammar=grammar,
            **{name: value for name, value in given.items() if value is not None},
        )


class CompletionRequest(CommonParams):
    """The body of `/v1/completions`."""

    prompt: (
        Text
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES)]
        | _Tokens
        | Annotated[list[_Tokens], Field(min_length=1, max_length=MAX_CHOICES)]
    )
    """Text or token ids; or a list of them."""
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    suffix: Literal[""] | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _possible(self) -> CompletionRequest:
        if self.best_of not in (None, self.n or 1):
            raise ValueError("best_of other than n is not supported")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens of 0 needs echo")
        if len(self.prompts()) * (self.n or 1) > MAX_CHOICES:
            raise ValueError(f"at most {MAX_CHOICES} choices: prompts times n")
        return self

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts as a list."""
        return _as_list(self.prompt)


class Function(Strict):
    """A function that a model may call."""

    name: Annotated[str, Field(max_length=64, pattern=r"^[a-zA-Z0-9_.-]+$")]
    description: Annotated[str, Field(max_length=1 << 14)] | None = None
    parameters: JsonObject | None = None
    """JSON schema of the arguments; None for a function without any."""
    strict: bool | None = None
    """Ignored: arguments always match their schema."""


class Tool(Strict):
    """An element of `tools`."""

    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    """The name in a `tool_choice`."""

    name: ShortText


class NamedTool(Strict):
    """A `tool_choice` of one function."""

    type: Literal["function"]
    function: FunctionName


class TextPart(Strict):
    """A part of a message's content; only text is supported."""

    type: Literal["text"]
    text: Text


class FunctionArguments(FunctionName):
    """A function that was called, with its arguments as JSON."""

    arguments: Text


class MessageToolCall(Strict):
    """A tool call of an earlier reply."""

    id: ShortText = ""
    type: Literal["function"] = "function"
    function: FunctionArguments
    index: Any = None  # of streamed calls, which some clients send back


class Message(BaseModel):
    """A chat message. Further fields are kept: chat templates may read them."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, frozen=True)

    role: Annotated[str, Field(min_length=1, max_length=64)]
    tool_calls: Annotated[list[MessageToolCall], Field(max_length=MAX_TOOLS)] | None = None
    content: Text | Annotated[list[TextPart], Field(max_length=1024)] | None = None

    def plain(self) -> dict[str, Any]:
        """Return the message for the template: content as a string, `developer` as `system`."""
        fields = self.model_dump(exclude_unset=True)
        if self.content is not None and not isinstance(self.content, str):
            fields["content"] = "".join(part.text for part in self.content)
        if self.content is None:
            fields["content"] = ""
        if self.role == "developer":
            fields["role"] = "system"
        return fields


class ChatRequest(CommonParams):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    """`auto` by default: the model decides whether to call a function."""
    parallel_tool_calls: bool | None = None
    """Whether a reply may have several calls; true by default."""
    modalities: list[Literal["text"]] | None = None
    chat_template_kwargs: JsonObject | None = None
    """Variables of the chat template, such as `enable_thinking`."""

    @model_validator(mode="after")
    def _possible(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs")
        taken = {"messages", "tools", "documents", "add_generation_prompt"}
        if taken & set(self.chat_template_kwargs or {}):
            raise ValueError(f"chat_template_kwargs may not set {', '.join(sorted(taken))}")
        self._check_tools()
        return self

    def _check_tools(self) -> None:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise ValueError("tools: two functions have the same name")
        if self.tool_choice not in (None, "none", "auto") and not names:
            raise ValueError("tool_choice needs tools")
        choice = self.tool_choice
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise ValueError(f"tool_choice: tools have no function '{choice.function.name}'")

    def functions(self) -> dict[str, dict[str, Any] | None]:
        """Return the schemas of the functions that may be called, by name."""
        choice = self.tool_choice
        if choice == "none":
            return {}
        schemas = {tool.function.name: tool.function.parameters for tool in self.tools or ()}
        if isinstance(choice, NamedTool):
            return {choice.function.name: schemas[choice.function.name]}
        return schemas

    def limit(self) -> int | None:
        """Return the maximum number of tokens to generate, if given."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class EmbeddingRequest(Strict):
    """The body of `/v1/embeddings`."""

    model: ShortText = ""
    input: (
        Text
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_INPUTS)]
        | _Tokens
        | Annotated[list[_Tokens], Field(min_length=1, max_length=MAX_INPUTS)]
    )
    """Text or token ids; or a list of them."""
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=1 << 16)] | None = None
    """Elements of an embedding: those of the model are not shortened."""
    user: Any = None

    def inputs(self) -> list[str | list[int]]:
        """Return the inputs as a list."""
        return _as_list(self.input)


class TokenizeRequest(Strict):
    """The body of `/tokenize`: a prompt or messages."""

    model: ShortText = ""
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class LoadAdapterRequest(Strict):
    """The body of `/v1/load_lora_adapter`, as vLLM's."""

    lora_name: Annotated[str, Field(min_length=1, max_length=128)]
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    """A PEFT directory on the server's machine."""
    model: ShortText = ""
    """Name of the base model; needed if there are several."""
    load_inplace: bool = False
    """Whether to replace an adapter of the same name."""


class UnloadAdapterRequest(Strict):
    """The body of `/v1/unload_lora_adapter`, as vLLM's."""

    lora_name: Annotated[str, Field(min_length=1, max_length=128)]


@dataclass(frozen=True, kw_only=True)
class GenerationJob:
    """What to generate for one HTTP request."""

    model: str
    """Name in the response."""
    prompts: list[tuple[int, ...]]
    echo: list[str]
    """With `echo`: the text of each prompt, which precedes its completion."""
    n: int
    max_tokens: int
    sampling_params: SamplingParams
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    """Whether a stream ends with the token counts."""
    prompt_only: bool = False
    """Whether `max_tokens` was 0: the output is dropped."""
    adapter: str = ""
    """Name of a LoRA adapter; empty for the base model."""
    version: str = ""
    """Of the model."""
    parser: Callable[[], ReplyParser] | None = None
    """Divides a reply into reasoning, content and tool calls; None for a text."""
    visible: tuple[str, ...] = ()
    """Special tokens that `parser` has to see."""


def user_of(body: CommonParams | EmbeddingRequest) -> str:
    """Return the name of the user, or of the session, that a request gives; empty for none.

    >>> user_of(CompletionRequest(prompt="Hi", user="alice", prompt_cache_key="chat 7"))
    'alice'
    """
    names = ("user", "safety_identifier", "prompt_cache_key")
    given = [getattr(body, name, None) for name in names]
    return next((value for value in given if value and isinstance(value, str)), "")


def error_body(
    message: str, kind: str, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return an error in OpenAI's format, which is also Anthropic's.

    >>> error_body("too long", "invalid_request_error")["error"]["type"]
    'invalid_request_error'
    """
    error = {"message": message, "type": kind, "param": param, "code": code}
    return {"type": "error", "error": error}


class Unprocessable(IngotError):
    """A well-formed request that this server can never answer."""
