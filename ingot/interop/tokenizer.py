"""Text into tokens and back, by a model directory's tokenizer.json.

    tokenizer = Tokenizer.load(Path("smollm2"))
    tokenizer.decode(tokenizer.encode("Hello")) == "Hello"
    tokenizer.chat([{"role": "user", "content": "Hello"}])  # the tokens of a prompt

HF's `tokenizers` does the work. It and jinja2 are dependencies of the core and not extras:
whatever takes or gives text needs them (generate, chat, serve, data), and they are small.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import tokenizers

from ingot.core.errors import IngotError
from ingot.interop.chat import ChatError, ChatTemplate, Message

MAX_TOKENIZER = 1 << 27  # bytes; the largest in use have about 35 MB
MAX_JSON = 1 << 22
MAX_ID = 1 << 31
# Tokens a stream may hold back while they do not make whole characters.
MAX_HELD = 64
_BROKEN = "\N{REPLACEMENT CHARACTER}"
_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


class TokenizerError(IngotError):
    """A tokenizer that is missing or broken."""


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """The tokenizer of a model directory.

    `special` names the special tokens ("eos_token": "<|im_end|>"), `eos_token_ids` are the ids that
    end an answer, `template` turns messages into text and is None if the model does not chat.
    """

    inner: tokenizers.Tokenizer
    special: Mapping[str, str] = field(default_factory=dict[str, str])
    eos_token_ids: frozenset[int] = frozenset()
    template: ChatTemplate | None = None

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Read tokenizer.json and the facts around it; no code from there is ever run."""
        settings = _json(directory / "tokenizer_config.json")
        special = _special_tokens(settings)
        inner = _inner(directory / "tokenizer.json")
        source = _template(directory, settings)
        return cls(
            inner=inner,
            special=special,
            eos_token_ids=_eos_token_ids(directory, inner, special),
            template=None if source is None else ChatTemplate(source),
        )

    @property
    def size(self) -> int:
        """Return the number of tokens."""
        return self.inner.get_vocab_size()

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the ids of the text; `special` adds what begins or ends every text, if anything.

        The names of special tokens in the text become those tokens, as in transformers.
        """
        return self.inner.encode(_clean(text), add_special_tokens=special).ids

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Return the text of the ids; `special` keeps the special tokens in it."""
        return self.inner.decode(ids, skip_special_tokens=not special)

    def stream(self) -> Stream:
        """Return a decoder for ids that come one by one."""
        return Stream(self)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Return the text that the chat template makes of the messages."""
        if self.template is None:
            raise ChatError(
                "the model has no chat template",
                hint="use a model that was tuned to chat, or have it complete plain text",
            )
        return self.template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            **{**self.special, **variables},
        )

    def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """Return the ids of the text that the chat template makes of the messages."""
        text = self.render(messages, tools, add_generation_prompt, **variables)
        return self.encode(text, special=False)  # the template writes them itself


class Stream:
    """Decodes ids one by one, in whole characters; the pieces together are the decoded text.

    Only the tokens since the last whole character, and those of one piece before them, are
    decoded again: a space at the beginning of a text is dropped by some tokenizers, so a token
    is never decoded without one before it. (`tokenizers.decoders.DecodeStream` holds tokens back
    without end if they make no whole character.)
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._skipped = _skipped(tokenizer.inner)
        self._ids: list[int] = []
        self._context = 0  # tokens at the head of `_ids` whose text was given before
        self._given = 0  # characters of their text, and of what was given since

    def feed(self, token: int) -> str:
        """Take the next id; return the text that is certain now, often that of this id."""
        if token in self._skipped:
            return ""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        if text.endswith(_BROKEN) and len(self._ids) - self._context < MAX_HELD:
            return self._give(text.rstrip(_BROKEN))
        piece = self._give(text)
        if text:
            del self._ids[: self._context]
            self._context = len(self._ids)
            self._given = len(self._tokenizer.decode(self._ids))
        return piece

    def finish(self) -> str:
        """Return what was held back: an answer may end in the middle of a character."""
        return self._give(self._tokenizer.decode(self._ids)) if self._ids else ""

    def _give(self, text: str) -> str:
        piece = text[self._given :]
        self._given = max(self._given, len(text))
        return piece


def _skipped(inner: tokenizers.Tokenizer) -> frozenset[int]:
    added = inner.get_added_tokens_decoder()
    return frozenset(number for number, token in added.items() if token.special)


def _clean(text: str) -> str:
    """Replace lone surrogates, which no tokenizer takes."""
    return text.encode("utf-8", "replace").decode()


def _inner(path: Path) -> tokenizers.Tokenizer:
    content = _read(path, MAX_TOKENIZER)
    if content is None and not path.parent.is_dir():
        raise TokenizerError(
            f"there is no directory {path.parent}",
            hint="name a model directory; `ingot import` makes one of a GGUF file or of a "
            "Hugging Face directory",
        )
    if content is None:
        raise TokenizerError(
            f"there is no {path.name} in {path.parent}",
            hint="copy it there from where the model comes from; a tokenizer of another format "
            "is written as one by transformers' save_pretrained",
        )
    try:
        return tokenizers.Tokenizer.from_buffer(content)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in Rust is no Exception
        raise _broken(path, str(error)[:500]) from error


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _NAMES:
        value = settings.get(name)
        if isinstance(value, dict):  # as older versions of transformers write them
            value = cast(dict[str, Any], value).get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _template(directory: Path, settings: dict[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    content = _read(path, MAX_JSON)
    if content is not None:
        return content.decode("utf-8", "replace")
    found = settings.get("chat_template")
    if isinstance(found, list):  # several, each with its name
        entries = cast(list[dict[str, Any]], [e for e in found if type(e) is dict])  # pyright: ignore
        found = {e.get("name"): e.get("template") for e in entries}.get("default")
    return found if isinstance(found, str) else None


def _eos_token_ids(
    directory: Path, inner: tokenizers.Tokenizer, special: Mapping[str, str]
) -> frozenset[int]:
    """Return the ids that end an answer, from the first file that names any."""
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        value = _json(path).get("eos_token_id")
        ids = cast(list[Any], value if isinstance(value, list) else [value])
        if value is not None and not all(type(one) is int and 0 <= one < MAX_ID for one in ids):
            raise _broken(path, f"its eos_token_id is {str(ids)[:100]}")
        if value is not None:
            return frozenset(ids)
    end = inner.token_to_id(special.get("eos_token", ""))
    return frozenset() if end is None else frozenset({end})


def _json(path: Path) -> dict[str, Any]:
    content = _read(path, MAX_JSON)
    try:
        found: Any = {} if content is None else json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _broken(path, str(error)) from error
    if not isinstance(found, dict):
        raise _broken(path, "it is not an object")
    return cast(dict[str, Any], found)


def _read(path: Path, limit: int) -> bytes | None:
    """Return the content of the file; None if there is none."""
    try:
        with path.open("rb") as file:
            content = file.read(limit + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _broken(path, error.strerror or str(error)) from error
    if len(content) > limit:
        raise _broken(path, f"it is larger than {limit:,} bytes")
    return content


def _broken(path: Path, why: str) -> TokenizerError:
    return TokenizerError(
        f"cannot read {path}: {why}",
        hint="copy the file again from where the model comes from, or import the model anew",
    )
