"""Trained tokens are the assistant's words and the end token, after the prompt of a server."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from functools import cache
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.interop.chat import ChatError, ChatTemplate
from ingot.interop.loss_mask import MaskedTokens, SampleEncoder
from ingot.interop.tokenizer import Tokenizer
from tests.interop import templates
from tests.interop.templates import FAMILIES, Family, Message

INNER = templates.train_inner()
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]

WORDS = st.one_of(
    st.text(st.sampled_from("the user said\n\n ,é🦀<|>"), max_size=24),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
)


@cache
def tokenizer_of(name: str) -> Tokenizer:
    return templates.tokenizer(FAMILIES[name], INNER)


def trained_parts(sample: MaskedTokens) -> list[tuple[list[int], list[int]]]:
    """Return the tokens before each run of trained tokens, and the run."""
    parts, at = [], 0
    for trained, group in groupby(sample.trained):
        count = len(list(group))
        if trained:
            parts.append((sample.tokens[:at], sample.tokens[at : at + count]))
        at += count
    return parts


@st.composite
def conversations(draw: st.DrawFn, family: Family) -> tuple[list[Message], list[Any] | None]:
    """Draw turns of user and assistant, with tool calls and reasoning where the family has them."""
    messages: list[Message] = []
    if family.system and draw(st.booleans()):
        messages.append({"role": "system", "content": draw(WORDS)})
    tools = TOOLS if family.tools and draw(st.booleans()) else None
    for turn in range(draw(st.integers(1, 4))):
        messages.append({"role": "user", "content": draw(WORDS)})
        if tools and draw(st.booleans()):
            arguments = {"a": draw(st.integers()), "b": draw(WORDS)}
            given = draw(st.sampled_from([arguments, json.dumps(arguments)]))
            function = {"name": "add", "arguments": given}
            call = {"id": f"call{turn:05}", "type": "function", "function": function}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "content": json.dumps(draw(WORDS))})
        answer: Message = {"role": "assistant", "content": draw(WORDS)}
        if family.thinking and draw(st.booleans()):
            answer["reasoning_content"] = draw(WORDS)
        messages.append(answer)
    return messages, tools


def with_objects(message: Message) -> Message:
    """Return the message with the arguments of its tool calls as objects."""
    calls = [dict(call) for call in message.get("tool_calls", [])]
    for call in calls:
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str):
            call["function"] = {**call["function"], "arguments": json.loads(arguments)}
    return {**message, "tool_calls": calls} if calls else message


@pytest.mark.parametrize("name", FAMILIES)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_trained_tokens_are_the_words_and_the_end_token(name: str, data: st.DataObject) -> None:
    family, tokenizer = FAMILIES[name], tokenizer_of(name)
    messages, tools = data.draw(conversations(family))
    samples = SampleEncoder(tokenizer).encode_chat(messages, tools)
    parts = [part for sample in samples for part in trained_parts(sample)]
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    for i, (prompt, completion) in zip(answers, parts, strict=True):
        written = tokenizer.decode(completion, skip_special_tokens=False)
        assert written == family.written(with_objects(messages[i]))
        assert prompt == tokenizer.encode_chat(messages[:i], tools)


@pytest.mark.parametrize("name", FAMILIES)
def test_turns_share_a_sample_unless_the_template_changes_earlier_turns(name: str) -> None:
    messages = [
        {"role": "user", "content": "the user"},
        {"role": "assistant", "content": "said", "reasoning_content": "what"},
        {"role": "user", "content": "and"},
        {"role": "assistant", "content": "they"},
    ]
    samples = SampleEncoder(tokenizer_of(name)).encode_chat(messages, TOOLS)
    assert len(samples) == (2 if name in ("qwen3", "mistral") else 1)
    for sample in samples:
        assert sample.trained[-1]
        assert not sample.trained[0]


def test_a_prompt_of_messages_is_not_trained() -> None:
    messages = [
        {"role": role, "content": word}
        for role, word in zip(["user", "assistant"] * 2, "abcd", strict=True)
    ]
    for name in ("smollm2", "generation"):
        tokenizer = tokenizer_of(name)
        (sample,) = SampleEncoder(tokenizer).encode_chat(messages, num_prompt=3)
        ((_, completion),) = trained_parts(sample)
        assert tokenizer.decode(completion, skip_special_tokens=False) == "d<|im_end|>"
        assert SampleEncoder(tokenizer).encode_chat(messages[:1]) == []


def test_variables_of_the_template_apply() -> None:
    tokenizer = tokenizer_of("qwen3")
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (sample,) = SampleEncoder(tokenizer, {"enable_thinking": False}).encode_chat(messages)
    ((_, completion),) = trained_parts(sample)
    assert tokenizer.decode(completion, skip_special_tokens=False) == "b<|im_end|>"


def test_a_template_that_changes_the_prompt_is_refused_with_both_texts() -> None:
    encoder = SampleEncoder(tokenizer_of("qwen3"), {"enable_thinking": False})
    answer = {"role": "assistant", "content": "b", "reasoning_content": "why"}
    with pytest.raises(ChatError) as caught:
        encoder.encode_chat([{"role": "user", "content": "a"}, answer])
    assert "message 1" in caught.value.message
    assert r"assistant\n<think>\n\n</think>\n\n'" in caught.value.message
    assert r"assistant\n<think>\nwhy\n</think>\n\nb" in caught.value.message
    assert "enable_thinking" in caught.value.hint


def test_a_system_message_that_disappears_is_refused() -> None:
    """The template of Mistral 7B v0.3 places it in the user's message if that is the last one."""
    messages = [{"role": r, "content": f"the {r}"} for r in ("system", "user", "assistant")]
    with pytest.raises(ChatError) as caught:
        SampleEncoder(tokenizer_of("mistral")).encode_chat(messages)
    assert r"[INST] the system\n\nthe user[/INST]" in caught.value.message
    assert "[INST] the user[/INST] the assistant</s>" in caught.value.message


def test_a_turn_without_an_eos_token_is_refused() -> None:
    family = Family(templates.SMOLLM2, "</s>", lambda m: "")
    encoder = SampleEncoder(templates.tokenizer(family, INNER))
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(ChatError, match="none of the model's EOS tokens") as caught:
        encoder.encode_chat(messages)
    assert "eos_token_id" in caught.value.hint


def test_a_completion_ends_with_its_first_eos_token() -> None:
    """Phi-3's template writes another one after a whole conversation."""
    source = templates.SMOLLM2 + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
    family = Family(source, "</s>", lambda m: "")
    eos_token_ids = frozenset(INNER.token_to_id(name) for name in ("<|im_end|>", "</s>"))
    tokenizer = replace(templates.tokenizer(family, INNER), eos_token_ids=eos_token_ids)
    question = {"role": "user", "content": "a"}
    (sample,) = SampleEncoder(tokenizer).encode_chat(
        [question, {"role": "assistant", "content": "b"}]
    )
    ((_, completion),) = trained_parts(sample)
    assert tokenizer.decode(completion, skip_special_tokens=False) == "b<|im_end|>"
    answer = {"role": "assistant", "content": "write <|im_end|> to end"}
    with pytest.raises(ChatError, match="EOS token ends a message before its last word"):
        SampleEncoder(tokenizer).encode_chat([question, answer])


def test_a_conversation_that_the_assistant_begins_is_refused() -> None:
    with pytest.raises(ChatError, match="begins with an assistant message"):
        SampleEncoder(tokenizer_of("qwen2.5")).encode_chat([{"role": "assistant", "content": "a"}])


def test_generation_without_the_end_token_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    source = templates.MARKED.replace(
        " + '<|im_end|>' }}{% endgeneration %}", " }}{% endgeneration %}<|im_end|>"
    )
    family = Family(source, "<|im_end|>", lambda m: "")
    encoder = SampleEncoder(templates.tokenizer(family, INNER))
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with caplog.at_level(logging.WARNING, "ingot"):
        for _ in range(2):
            (sample,) = encoder.encode_chat(messages)
    ((_, completion),) = trained_parts(sample)
    assert encoder.tokenizer.decode(completion) == "b"
    assert len([r for r in caplog.records if "excludes the EOS token" in r.message]) == 1


def test_a_prompt_that_merges_with_its_completion_is_encoded_alone() -> None:
    """A server's prompt ends after the space; the token for the space and a word is not there."""
    tokenizer = tokenizer_of("smollm2")
    assert len(tokenizer.encode(" said")) < len(tokenizer.encode(" ") + tokenizer.encode("said"))
    sample = SampleEncoder(tokenizer).encode_text("they ", "said")
    ((prompt, completion),) = trained_parts(sample)
    assert prompt == tokenizer.encode("they ")
    assert tokenizer.decode(completion, skip_special_tokens=False) == "said<|im_end|>"


@given(prompt=WORDS, completion=WORDS)
@settings(max_examples=40, deadline=None)
def test_the_completion_of_a_text_is_trained(prompt: str, completion: str) -> None:
    tokenizer = tokenizer_of("smollm2")
    tokens, trained = SampleEncoder(tokenizer).encode_text(prompt, completion)
    start = len(tokenizer.encode(prompt))
    assert trained == [0 < i >= start for i in range(len(tokens))]
    assert tokens[:start] == tokenizer.encode(prompt)
    text = tokenizer.decode(tokens[start:], skip_special_tokens=False)
    assert text == completion + "<|im_end|>"


def test_templates_that_cannot_be_located_are_refused() -> None:
    source = "{% macro f(m) %}:{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}"
    template = ChatTemplate(source + "-{% for m in messages %}{{ f(m) }}{% endfor %}")
    with pytest.raises(ChatError, match="inside a macro"):
        template.render_with_spans([{"role": "assistant", "content": "a"}])
