"""Templates render as in transformers; hostile ones end in an error, soon."""

from __future__ import annotations

import gc
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from ingot.interop import chat
from ingot.interop.chat import ChatError, ChatTemplate
from ingot.interop.tokenizer import Tokenizer

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {{- "You have these functions:\\n\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if message.role not in ["user", "assistant", "tool"] %}{% continue %}{% endif %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) and message.role != "tool" %}
        {{- raise_exception("roles must alternate user/assistant") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" and message.content %}
        {% generation %}
        {{- " " + message["content"]|trim + eos_token}}
        {% endgeneration %}
    {%- endif %}
{%- endfor %}
"""

SHORT = [{"role": "user", "content": "What is the capital of France?"}]
LONG = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": 'Grüße <b>"quoted"</b> & 日本語 {{ 7*7 }} {% if %}'},
    {"role": "assistant", "content": "  Yes.  "},
    {"role": "user", "content": ""},
]
CALLS = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"function": {"name": "weather", "arguments": {"where": "Zürich", "n": 1.5}}}
        ],
    },
    {"role": "tool", "content": {"degrees": 3, "note": "<kühl>"}},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'The weather\'s "state" now → é',
            "parameters": {"type": "object", "properties": {"where": {"type": "string"}}},
        },
    }
]


@pytest.fixture(scope="module")
def ours(smollm2: Path) -> Tokenizer:
    return Tokenizer.load(smollm2)


@pytest.fixture(scope="module")
def theirs(smollm2: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(smollm2)


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("messages", [SHORT, LONG, CALLS])
@pytest.mark.parametrize("source", [None, CHATML, LLAMA3, MISTRAL])
def test_templates_render_as_in_transformers(
    ours: Tokenizer, theirs: Any, source: str | None, messages: list[Any], tools: Any, prompt: bool
) -> None:
    assert ours.chat_template is not None
    theirs.chat_template = source or ours.chat_template.source
    if source is not None:
        ours = replace(ours, chat_template=ChatTemplate(source))
    arguments: dict[str, Any] = {"tools": tools, "add_generation_prompt": prompt}

    def expected(tokenize: bool) -> Any:
        options = {**arguments, "tokenize": tokenize, "date_string": "15 Nov 2026"}
        return theirs.apply_chat_template(messages, return_dict=False, **options)

    try:
        text, ids = expected(False), expected(True)
    except Exception:  # a dictionary joined to a string: each says so in its own way
        assert messages is CALLS
        with pytest.raises(ChatError):
            ours.render_chat(messages, **arguments, date_string="15 Nov 2026")
        return
    assert ours.render_chat(messages, **arguments, date_string="15 Nov 2026") == text
    assert ours.encode_chat(messages, **arguments, date_string="15 Nov 2026") == ids


def test_templates_can_format_the_date() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}").render([]) == time.strftime("%Y")


def test_rejected_messages_raise_the_explanation_of_the_template() -> None:
    template = ChatTemplate(MISTRAL)
    twice = [SHORT[0], SHORT[0]]
    with pytest.raises(ChatError, match="rejects the messages: roles must alternate") as raised:
        template.render(twice, bos_token="", eos_token="")
    assert raised.value.hint == "change the messages accordingly"
    renderer = template._renderer
    assert renderer is not None
    assert (
        template.render(SHORT, bos_token="<s>") == "<s>[INST] What is the capital of France?[/INST]"
    )
    assert template._renderer is renderer  # and its process is still running


HOSTILE = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in "
    "range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
    "long string": "{{ 'a' * 10**9 }}",
    "string of unknown length": "{{ 'a' * (messages|length * 10**9) }}",
    "doubling": "{% set n = namespace(a='x') %}{% for i in range(99) %}{% set n.a = n.a + n.a %}"
    "{% endfor %}{{ n.a }}",
    "long list": "{% set x = [1] * 10**8 %}{{ x|length }}",
    "long number, when compiled": "{{ 10 ** (10 ** 10) }}",
    "long number, when rendered": "{{ (9 + messages|length) ** (10 ** 10) }}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "wide macro": "{% macro m(n) %}{% for i in range(9999) %}{{ m(n) if n else '' }}{% endfor %}"
    "{% endmacro %}{{ m(1) }}" + "{{ m(0) }}" * 9999,
    "endless output": "{% for a in range(99999) %}{{ 'a' * 10**5 }}{% endfor %}",
    "padding": "{{ 'x'|center(10**10) }}",
    "format": "{{ '%1000000000d' % 1 }}",
    "format method": "{{ '{:1000000000}'.format(1) }}",
    "indent": "{{ [[[1]]]|tojson(indent=10**9) }}",
    "lipsum": "{{ lipsum(n=10**6) }}",
    "range": "{{ range(10**9)|list }}",
    "parentheses": "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
    "syntax": "{% if %}",
    "insides": "{{ ''.__class__.__mro__ }}",
    "globals": "{{ cycler.__init__.__globals__ }}",
    "file": "{% include '/etc/passwd' %}",
    "change of the messages": "{{ messages.append(1) }}",
    "undefined": "{{ nothing.at.all }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_adversarial_templates_raise_quickly(name: str) -> None:
    template = ChatTemplate(HOSTILE[name])
    start = time.perf_counter()
    with pytest.raises(ChatError, match="chat template is invalid") as raised:
        template.render(SHORT)
    # 2 s to render, or 3 to compile, and the time a busy machine takes to start a process.
    assert time.perf_counter() - start < 6
    assert raised.value.hint


def test_rendering_works_after_an_error() -> None:
    template = ChatTemplate("{% if long %}{{ 'a' * 10**9 }}{% endif %}b")
    with pytest.raises(ChatError, match="too much memory"):
        template.render([], long=True)
    assert template.render([]) == "b"


def test_oversized_inputs_raise_before_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ChatError, match=r"300,000 characters, more than 262,144"):
        ChatTemplate("a" * 300_000)
    with pytest.raises(ChatError, match="not JSON-serializable"):
        ChatTemplate("a").render([{"role": object()}])
    monkeypatch.setattr(chat, "MAX_CHARACTERS", 100)
    with pytest.raises(ChatError, match="shorten the messages"):
        ChatTemplate("a").render([{"role": "user", "content": "a" * 200}])


def test_megabytes_of_messages_render(ours: Tokenizer) -> None:
    content = "é" * 1_000_000
    text = ours.render_chat([{"role": "user", "content": content}])
    assert content in text


def test_threads_share_a_template() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    found: dict[int, str] = {}

    def render(number: int) -> None:
        for _ in range(20):
            found[number] = template.render([{"role": "user", "content": str(number)}])

    threads = [threading.Thread(target=render, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: str(number) for number in range(8)}


def test_process_stops_with_the_template() -> None:
    def children() -> set[str]:
        return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())

    before = children()
    template = ChatTemplate("a")
    assert template.render([]) == "a"
    assert len(children() - before) == 1
    del template
    gc.collect()
    assert not children() - before


def test_dead_process_is_restarted() -> None:
    template = ChatTemplate("a")
    template.render([])
    assert template._renderer is not None
    template._renderer._process.kill()
    template._renderer._process.wait()
    assert template.render([]) == "a"
