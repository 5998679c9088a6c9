"""Chat formats of models, as their tokenizers and templates say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ingot.interop.chat import ChatTemplate
from ingot.interop.tokenizer import Tokenizer
from ingot.serving.engine.chat import ChatFormat
from ingot.serving.engine.reply import Delta

USER: list[Any] = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]
QWEN = (
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}"
    "{% for m in messages %}{{ m.content }}{{ m.tool_calls | default('') }}{% endfor %}"
    "{% if enable_thinking %}<think>\n{% else %}<think></think>{% endif %}"
)


def test_a_template_without_tools_gets_a_system_message(smollm2: Path) -> None:
    chat = ChatFormat(Tokenizer.load(smollm2))
    assert (chat.tools.name, chat.reasoning, chat.visible) == ("smollm2", False, ())
    assert '<tools>[{"type": "function"' in chat.render(USER, TOOLS)
    assert "tools" not in chat.render(USER)


def test_a_template_with_tools_and_reasoning(smollm2: Path) -> None:
    tokenizer = replace(Tokenizer.load(smollm2), chat_template=ChatTemplate(QWEN))
    tokenizer.inner.add_special_tokens(["<tool_call>", "[INST]"])
    chat = ChatFormat(tokenizer)
    assert (chat.tools.name, chat.reasoning) == ("hermes", True)
    assert chat.visible == ("<tool_call>",)
    thinking = chat.render(USER, TOOLS, enable_thinking=True)
    assert thinking.startswith('[{"type": "function"')
    assert chat.parser(thinking, True).feed("Hm</think>Yes") == [
        Delta("reasoning", "Hm"),
        Delta("content", "Yes"),
    ]
    assert chat.parser(chat.render(USER), True).feed("Yes") == [Delta("content", "Yes")]
    assert "thoughts" in chat.grammar({"f": None}, thinking).text.splitlines()[1]
