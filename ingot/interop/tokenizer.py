"""Text to tokens and back, with the tokenizer.json of a model directory.

    tokenizer = Tokenizer.load(Path("smollm2"))
    tokenizer.decode(tokenizer.encode("Hello")) == "Hello"
    tokenizer.encode_chat([{"role": "user", "content": "Hello"}])  # the tokens of a prompt

Built on Hugging Face's `tokenizers`. It and jinja2 are core dependencies rather than extras:
every command that reads or writes text needs them (generate, chat, serve, data), and they are
small.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import tokenizers

from ingot.core.errors import IngotError
from ingot.interop.chat import ChatError, ChatTemplate, Message

MAX_TOKENIZER_BYTES = 1 << 27  # the largest in use have about 35 MB
MAX_JSON_BYTES = 1 << 22
MAX_TOKEN_ID = 1 << 31
MAX_PENDING_TOKENS = 64
"""Tokens that `DecodeStream` holds back while they do not form whole characters."""
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_SPECIAL_TOKEN_NAMES = (
    *("bos_token", "eos_token", "unk_token"),
    *("pad_token", "sep_token", "cls_token"),
)


class TokenizerError(IngotError):
    """A tokenizer that is missing or malformed."""


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """The tokenizer of a model directory."""

    inner: tokenizers.Tokenizer
    special_tokens: Mapping[str, str] = field(default_factory=dict[str, str])
    """Special tokens by role, such as `{"eos_token": "<|im_end|>"}`."""
    eos_token_ids: frozenset[int] = frozenset()
    """Ids that end a generation."""
    chat_template: ChatTemplate | None = None
    """Formats messages as text; None for a model without chat."""

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Load tokenizer.json and the settings around it; code from the directory is never run."""
        settings = _read_json(directory / "tokenizer_config.json")
        special_tokens = _special_tokens(settings)
        inner = _load_inner(directory / "tokenizer.json")
        template = _chat_template(directory, settings)
        return cls(
            inner=inner,
            special_tokens=special_tokens,
            eos_token_ids=_eos_token_ids(directory, inner, special_tokens),
            chat_template=None if template is None else ChatTemplate(template),
        )

    @classmethod
    def empty(cls) -> Tokenizer:
        """Return a tokenizer without tokens, for a model without text.

        >>> Tokenizer.empty().encode("text")
        []
        """
        return cls(inner=tokenizers.Tokenizer(tokenizers.models.BPE()))

    @property
    def vocab_size(self) -> int:
        """Number of tokens, including added ones."""
        return self.inner.get_vocab_size()

    @cached_property
    def special_token_ids(self) -> Mapping[str, int]:
        """Ids of the tokens that are not part of texts."""
        added = self.inner.get_added_tokens_decoder()
        return {token.content: id for id, token in added.items() if token.special}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of the text.

        `add_special_tokens` adds the tokens that begin or end every text, if the tokenizer has
        any. Special tokens that are spelled out in the text are recognized, as in transformers.
        """
        return self.inner.encode(
            _replace_surrogates(text), add_special_tokens=add_special_tokens
        ).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of the token ids."""
        return self.inner.decode(ids, skip_special_tokens=skip_special_tokens)

    def decode_stream(self, visible: Collection[str] = ()) -> DecodeStream:
        """Return a decoder for token ids that arrive one by one; special tokens are left out,
        except these."""
        return DecodeStream(self, visible)

    def render_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Format the messages with the chat template."""
        if self.chat_template is None:
            raise ChatError(
                "the model has no chat template",
                hint="use a chat model, or complete plain text with `ingot generate`",
            )
        return self.chat_template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            **{**self.special_tokens, **variables},
        )

    def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """Return the token ids of the messages, formatted with the chat template."""
        text = self.render_chat(messages, tools, add_generation_prompt, **variables)
        return self.encode(text, add_special_tokens=False)  # the template writes them itself


class DecodeStream:
    """Decodes token ids one by one into whole characters.

    The concatenated results equal `Tokenizer.decode` of all ids. Only the tokens since the last
    whole character are decoded again, after those of the previous result: some tokenizers drop a
    space at the beginning of a text, so a token is never decoded without one before it.
    (`tokenizers.decoders.DecodeStream` holds back tokens without bound if they never form a whole
    character.)
    """

    def __init__(self, tokenizer: Tokenizer, visible: Collection[str] = ()) -> None:
        self._tokenizer = tokenizer
        ids = tokenizer.special_token_ids
        self._visible = {ids[token]: token for token in visible if token in ids}
        self._hidden = frozenset(ids.values()) - self._visible.keys()
        self._ids: list[int] = []
        self._context = 0  # tokens at the head of `_ids` whose text was returned before
        self._returned = 0  # characters of `_ids` that were returned

    def feed(self, token: int) -> str:
        """Add a token id; return the text that is final now, often that of this token."""
        if token in self._hidden:
            return ""
        if token in self._visible:
            return self.finish() + self._visible[token]
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        if text.endswith(_REPLACEMENT) and len(self._ids) - self._context < MAX_PENDING_TOKENS:
            return self._take(text.rstrip(_REPLACEMENT))
        new = self._take(text)
        if text:
            del self._ids[: self._context]
            self._context = len(self._ids)
            self._returned = len(self._tokenizer.decode(self._ids))
        return new

    def finish(self) -> str:
        """Return the text held back: a generation may end in the middle of a character."""
        return self._take(self._tokenizer.decode(self._ids)) if self._ids else ""

    def _take(self, text: str) -> str:
        new = text[self._returned :]
        self._returned = max(self._returned, len(text))
        return new


def _replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which `tokenizers` rejects."""
    return text.encode("utf-8", "replace").decode()


def _load_inner(path: Path) -> tokenizers.Tokenizer:
    content = _read(path, MAX_TOKENIZER_BYTES)
    if content is None and not path.parent.is_dir():
        raise TokenizerError(
            f"directory not found: {path.parent}",
            hint="name a model directory; `ingot import` creates one from a GGUF file or a "
            "Hugging Face directory",
        )
    if content is None:
        raise TokenizerError(
            f"{path.name} not found in {path.parent}",
            hint="copy it from the model's source; transformers' save_pretrained converts a "
            "tokenizer of another format",
        )
    try:
        inner = tokenizers.Tokenizer.from_buffer(content)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a Rust panic is not an Exception
        raise _malformed(path, str(error)[:500]) from error
    inner.no_truncation()  # a tokenizer.json may enable either; transformers ignores both
    inner.no_padding()
    return inner


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    special_tokens: dict[str, str] = {}
    for name in _SPECIAL_TOKEN_NAMES:
        value = settings.get(name)
        if isinstance(value, dict):  # older versions of transformers write an object
            value = cast(dict[str, Any], value).get("content")
        if isinstance(value, str):
            special_tokens[name] = value
    return special_tokens


def _chat_template(directory: Path, settings: dict[str, Any]) -> str | None:
    content = _read(directory / "chat_template.jinja", MAX_JSON_BYTES)
    if content is not None:
        return content.decode("utf-8", "replace")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several templates by name
        entries = cast(list[dict[str, Any]], [e for e in template if type(e) is dict])  # pyright: ignore
        template = {e.get("name"): e.get("template") for e in entries}.get("default")
    return template if isinstance(template, str) else None


def _eos_token_ids(
    directory: Path, inner: tokenizers.Tokenizer, special_tokens: Mapping[str, str]
) -> frozenset[int]:
    """Return the ids that end a generation, from the first file that lists any."""
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        value = _read_json(path).get("eos_token_id")
        ids = cast(list[Any], value if isinstance(value, list) else [value])
        if value is not None and not all(type(n) is int and 0 <= n < MAX_TOKEN_ID for n in ids):
            raise _malformed(path, f"its eos_token_id is {str(ids)[:100]}")
        if value is not None:
            return frozenset(ids)
    eos = inner.token_to_id(special_tokens.get("eos_token", ""))
    return frozenset() if eos is None else frozenset({eos})


def _read_json(path: Path) -> dict[str, Any]:
    content = _read(path, MAX_JSON_BYTES)
    try:
        value: Any = {} if content is None else json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _malformed(path, str(error)) from error
    if not isinstance(value, dict):
        raise _malformed(path, "it is not an object")
    return cast(dict[str, Any], value)


def _read(path: Path, max_bytes: int) -> bytes | None:
    """Return the content of a file; None if it does not exist."""
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _malformed(path, error.strerror or str(error)) from error
    if len(content) > max_bytes:
        raise _malformed(path, f"it is larger than {max_bytes:,} bytes")
    return content


def _malformed(path: Path, why: str) -> TokenizerError:
    return TokenizerError(
        f"cannot read {path}: {why}",
        hint="copy the file again from the model's source, or import the model again",
    )
