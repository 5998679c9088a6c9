"""Chat templates of well-known families in short form: what they do to the assistant's words.

Instructions about tools are shortened and rare branches are left out; roles, tags, whitespace and
the treatment of earlier turns are those of the published templates.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, pre_tokenizers
from tokenizers import Tokenizer as Inner

from ingot.data.tokenizer import DocumentTokenizer
from ingot.interop.chat import ChatTemplate
from ingot.interop.tokenizer import Tokenizer

Message = dict[str, Any]

SPECIAL_TOKENS = [
    *("<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>"),
    *("<|end_header_id|>", "<|eot_id|>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"),
    *("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
]

SMOLLM2 = """\
{%- for m in messages %}
    {%- if loop.first and m.role != 'system' %}
        {{- '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

_CHATML_TOOLS = """\
{%- macro calls(m, first) %}
    {%- for call in m.tool_calls or [] %}
        {{- ('\\n' if first or not loop.first else '') + '<tool_call>\\n{"name": "' }}
        {{- call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
        {{- '}\\n</tool_call>' }}
    {%- endfor %}
{%- endmacro %}
{%- macro response(m, before, after) %}
    {{- '' if before == 'tool' else '<|im_start|>user' }}
    {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
    {{- '' if after == 'tool' else '<|im_end|>\\n' }}
{%- endmacro %}
{%- set system = messages[0].content if messages[0].role == 'system' else default %}
{%- if system or tools %}{{ '<|im_start|>system\\n' + system }}
    {%- for tool in tools or [] %}{{ '\\n' + tool | tojson }}{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
"""

QWEN25 = (
    "{%- set default = 'You are Qwen' %}\n"
    + _CHATML_TOOLS
    + """\
{%- for m in messages %}
    {%- set before = loop.previtem.role if not loop.first else '' %}
    {%- set after = loop.nextitem.role if not loop.last else '' %}
    {%- if m.role == 'user' or m.role == 'assistant' and not m.tool_calls %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|im_start|>assistant' + ('\\n' + m.content if m.content else '') }}
        {{- calls(m, true) + '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}{{ response(m, before, after) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
)

QWEN3 = (
    "{%- set default = '' %}\n"
    + _CHATML_TOOLS
    + """\
{%- set ns = namespace(last_query=messages|length - 1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last_query = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
    {%- set before = loop.previtem.role if not loop.first else '' %}
    {%- set after = loop.nextitem.role if not loop.last else '' %}
    {%- set content = m.content if m.content is string else '' %}
    {%- if m.role == 'user' %}{{ '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set thought = m.reasoning_content or '' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_query and (loop.last or thought) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}{{ content }}
        {%- endif %}
        {{- calls(m, content) + '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}{{ response(m, before, after) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
)

LLAMA3 = """\
{{- bos_token }}
{%- set system = '' %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}{% set messages = messages[1:] %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: 26 Jul 2024\\n\\n' + system }}
{{- '<|eot_id|>' }}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + m.content | tojson }}
        {{- '<|eot_id|>' }}
    {%- elif 'tool_calls' in m %}
        {%- if m.tool_calls | length != 1 %}{{ raise_exception('only single calls') }}{% endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", ' }}
        {{- '"parameters": ' + call.arguments | tojson + '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim }}
        {%- if loop.first and tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}
        {%- endif %}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

MISTRAL = """\
{%- set system = '' %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content + '\\n\\n' %}{% set messages = messages[1:] %}
{%- endif %}
{%- set ns = namespace(last_user=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last_user = loop.index0 %}{% endif %}
{%- endfor %}
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- if tools and loop.index0 == ns.last_user %}
            {{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + (system if loop.last else '') + m.content + '[/INST]' }}
    {%- elif m.tool_calls is defined %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in m.tool_calls %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
            {{- ']' + eos_token if loop.last else ', ' }}
        {%- endfor %}
    {%- elif m.role == 'assistant' %}{{ ' ' + m.content | trim + eos_token }}
    {%- elif m.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + m.content + '}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}"""

MARKED = """\
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.role == 'assistant' %}
        {%- generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
    {%- else %}{{ m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


@dataclass(frozen=True)
class Family:
    """A template, its EOS token, and the text that a model of it writes for a message."""

    template: str
    eos: str
    written: Callable[[Message], str]
    tools: bool = False
    thinking: bool = False
    system: bool = True
    """False if a system message disappears from a whole conversation, which is refused."""


def _chatml(m: Message) -> str:
    calls = [f"<tool_call>\n{_call(c, 'arguments')}\n</tool_call>" for c in m.get("tool_calls", [])]
    return "\n".join([*([m["content"]] if m["content"] else []), *calls]) + "<|im_end|>"


def _qwen3(m: Message) -> str:
    thought = m.get("reasoning_content", "").strip("\n")
    content = m["content"].lstrip("\n")
    calls = [f"<tool_call>\n{_call(c, 'arguments')}\n</tool_call>" for c in m.get("tool_calls", [])]
    joined = "\n".join([*([content] if m["content"] else []), *calls])
    return f"<think>\n{thought}\n</think>\n\n{joined}<|im_end|>"


def _llama3(m: Message) -> str:
    if m.get("tool_calls"):
        return _call(m["tool_calls"][0], "parameters") + "<|eot_id|>"
    return m["content"].strip() + "<|eot_id|>"


def _mistral(m: Message) -> str:
    if m.get("tool_calls"):
        calls = [{**c["function"], "id": c["id"]} for c in m["tool_calls"]]
        return f"[TOOL_CALLS] {json.dumps(calls, ensure_ascii=False)}</s>"
    return f" {m['content'].strip()}</s>"


def _call(call: Message, key: str) -> str:
    function = call["function"]
    return json.dumps({"name": function["name"], key: function["arguments"]}, ensure_ascii=False)


FAMILIES = {
    "smollm2": Family(SMOLLM2, "<|im_end|>", lambda m: m["content"] + "<|im_end|>"),
    "qwen2.5": Family(QWEN25, "<|im_end|>", _chatml, tools=True),
    "qwen3": Family(QWEN3, "<|im_end|>", _qwen3, tools=True, thinking=True),
    "llama3": Family(LLAMA3, "<|eot_id|>", _llama3, tools=True),
    "mistral": Family(MISTRAL, "</s>", _mistral, tools=True, system=False),
    "generation": Family(MARKED, "<|im_end|>", lambda m: m["content"] + "<|im_end|>"),
}


def train_inner() -> Inner:
    """Return a byte-level BPE with merges of letters, spaces and newlines, and special tokens."""
    text = "the user and the assistant\n\nsaid   what\n\n they, said\n" * 8
    inner = DocumentTokenizer.train(iter([text]), 320)._inner  # pyright: ignore[reportPrivateUsage]
    # Splits as Llama 3 and Qwen: newlines at the end of a prompt are a token, whatever follows.
    split = pre_tokenizers.Split(Regex(r"\s*[\r\n]+|\s+(?!\S)| ?\p{L}+|.|\s+"), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    inner.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL_TOKENS])
    inner.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    return inner


def tokenizer(family: Family, inner: Inner) -> Tokenizer:
    """Return the tokenizer of a family."""
    eos_id = inner.token_to_id(family.eos)
    assert eos_id is not None
    return Tokenizer(
        inner=inner,
        special_tokens={
            "bos_token": "<s>" if family.eos == "</s>" else "<|begin_of_text|>",
            "eos_token": family.eos,
        },
        eos_token_ids=frozenset({eos_id}),
        chat_template=ChatTemplate(family.template),
    )


def save(family: Family, inner: Inner, directory: Path) -> Path:
    """Write the files of the tokenizer of a family."""
    directory.mkdir(parents=True, exist_ok=True)
    inner.save(str(directory / "tokenizer.json"))
    found = tokenizer(family, inner)
    settings = {**found.special_tokens, "chat_template": family.template}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory
