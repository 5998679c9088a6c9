"""The grammar of tool calls: names of the given functions, arguments of their JSON schemas.

With `required`, a reply is calls and nothing else. Otherwise it is text, and from the format's
trigger on it is calls: a call that has begun is valid at its end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ingot.core.errors import ConfigError
from ingot.interop.tokenizer import Tokenizer
from ingot.interop.tool_format import ToolFormat
from ingot.serving.engine.reply import END_THINK
from ingot.serving.engine.sampling_params import Grammar

MAX_CALLS = 16
"""Calls of one reply."""


def tool_grammar(
    format: ToolFormat,
    functions: Mapping[str, Mapping[str, Any] | None],
    tokenizer: Tokenizer,
    *,
    required: bool = False,
    parallel: bool = True,
    content_schema: Mapping[str, Any] | None = None,
    in_reasoning: bool = False,
) -> Grammar:
    """Return the grammar of replies that may call functions, given as names and schemas.

    Args:
        format: How the model writes calls.
        functions: JSON schemas of the arguments by name.
        tokenizer: Special tokens of the format are those of this tokenizer.
        required: Whether the reply must be a call.
        parallel: Whether it may be several calls.
        content_schema: JSON schema of a reply that is not a call; None for free text.
        in_reasoning: Whether the reply begins with reasoning, which is free text.
    """

    def spell(text: str) -> str:
        return _spell(text, tokenizer)

    calls = [f"call_{index}" for index in range(len(functions))]
    repeat = f"({spell(format.separator)} call){{0,{MAX_CALLS - 1}}}" if parallel else ""
    rules = [
        f"calls: call {repeat} {spell(format.end)}",
        f"call: {' | '.join(calls)}",
    ]
    for rule, (name, schema) in zip(calls, functions.items(), strict=True):
        head, tail = spell(f"{format.open}{name}{format.middle}"), spell(format.close)
        rules.append(f"{rule}: {head} %json {_json_schema(name, schema)} {tail}")
    rules += [r"TEXT: /(.|\n)*/", *_until("thoughts", END_THINK, tokenizer)]
    if required:
        reply = f"{spell(format.start)} calls"
    elif content_schema is not None:
        content = Grammar.of_schema(content_schema)
        reply = f"{spell(format.start)} calls | %json {content.text}"
    elif not format.trigger:
        reply = r"calls | /[^{](.|\n)*/ |"
    else:
        reply = f"TEXT | before {spell(format.start.removeprefix(format.trigger))} calls"
        rules += _until("before", format.trigger, tokenizer)
    start = r"start: thoughts /\n*/ reply" if in_reasoning else "start: reply"
    lines = ["%llguidance {}", start, f"reply: {reply}", *rules]
    return Grammar(kind="lark", text="\n".join(lines))


def _until(rule: str, marker: str, tokenizer: Tokenizer) -> list[str]:
    """Return the rule of text up to and with the marker; lazy, so that the marker ends it."""
    lazy = "" if marker in tokenizer.special_token_ids else "[lazy]"
    return [f"{rule}{lazy}: TEXT {_spell(marker, tokenizer)}"]


def _spell(text: str, tokenizer: Tokenizer) -> str:
    """Return terminals for the text: special tokens by id, as text never matches them."""
    special = {token: id for token, id in tokenizer.special_token_ids.items() if token in text}
    if not special:
        return json.dumps(text) if text else ""
    found = re.split(f"({'|'.join(map(re.escape, special))})", text)
    spelled = [f"<[{special[part]}]>" if part in special else json.dumps(part) for part in found]
    return " ".join(one for one in spelled if one != '""')


def _json_schema(name: str, schema: Mapping[str, Any] | None) -> str:
    given = schema or {"properties": {}, "additionalProperties": False}
    if given.get("type", "object") != "object":
        raise ConfigError(
            f"tools: the parameters of '{name}' must be an object", hint='use "type": "object"'
        )
    return Grammar.of_schema({**given, "type": "object"}).text
