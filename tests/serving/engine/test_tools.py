"""Grammars of tool calls: what they accept, in each format."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from ingot.core.errors import ConfigError
from ingot.interop.tokenizer import Tokenizer
from ingot.interop.tool_format import FORMATS, HERMES, LLAMA3, SMOLLM2, ToolFormat
from ingot.serving.engine.grammar import GrammarCompiler
from ingot.serving.engine.reply import ReplyParser
from ingot.serving.engine.sampling_params import Grammar
from ingot.serving.engine.tools import MAX_CALLS, tool_grammar

FUNCTIONS: dict[str, dict[str, Any] | None] = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 9}, "days": {"enum": [1, 2]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "now": None,
}
WEATHER = ("weather", '{"city": "Oslo", "days": 2}')


@pytest.fixture(scope="module", params=[False, True], ids=["text", "special"])
def tokenizer(request: pytest.FixtureRequest, smollm2: Path) -> Tokenizer:
    """A real tokenizer, in which the markers are text or special tokens."""
    found = Tokenizer.load(smollm2)
    if request.param:
        found.inner.add_special_tokens(["[TOOL_CALLS]", "[ARGS]", "<tool_call>", "</think>"])
    return found


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, tokenizer.vocab_size)


def accepts(compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: Grammar, text: str) -> bool:
    """Whether the grammar allows each token of the text, and the end after it."""
    matcher = compiler.compile(grammar).result()
    for token in [*tokenizer.encode(text), *list(tokenizer.eos_token_ids)[:1]]:
        if matcher.done and token in tokenizer.eos_token_ids:
            return True
        if not matcher.mask()[token]:
            return False
        matcher.accept((token,))
        assert matcher.error is None
    return True


@pytest.mark.parametrize("format", FORMATS, ids=lambda one: one.name)
def test_what_is_allowed(
    format: ToolFormat, tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    def check(grammar: Grammar, text: str) -> bool:
        return accepts(compiler, tokenizer, grammar, text)

    one, two = format.write([WEATHER]), format.write([WEATHER, ("now", "{}")])
    wrong = [
        format.write([("weather", '{"town": "Oslo"}')]),
        format.write([("weather", '{"city": "Oslo", "days": 3}')]),
        format.write([("storm", '{"city": "Oslo"}')]),
        one[:-3],
    ]
    required = tool_grammar(format, FUNCTIONS, tokenizer, required=True)
    assert check(required, one)
    assert check(required, two)
    assert not check(required, "Hello")
    assert not check(required, "")
    auto = tool_grammar(format, FUNCTIONS, tokenizer)
    assert check(auto, one)
    assert check(auto, two)
    assert check(auto, "Hello {}.")
    assert check(auto, "")
    if format.trigger:
        assert check(auto, f"Let me see. {two}")
    for text in wrong:
        assert not check(required, text), text
        assert not check(auto, text), text
    single = tool_grammar(format, FUNCTIONS, tokenizer, parallel=False)
    assert check(single, one)
    assert not check(single, two)
    thinking = tool_grammar(format, FUNCTIONS, tokenizer, required=True, in_reasoning=True)
    assert check(thinking, f"Hm <tool_call\n</think>\n\n{one}")
    assert not check(thinking, one)


def test_content_may_have_a_schema(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    grammar = tool_grammar(HERMES, FUNCTIONS, tokenizer, content_schema=schema)
    assert accepts(compiler, tokenizer, grammar, '{"x": 1}')
    assert accepts(compiler, tokenizer, grammar, HERMES.write([WEATHER]))
    assert not accepts(compiler, tokenizer, grammar, "Hello")


def test_parameters_are_an_object(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="the parameters of 'f' must be an object"):
        tool_grammar(SMOLLM2, {"f": {"type": "string"}}, tokenizer)


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Return a schema of finite values."""
    kinds = ["string", "integer", "boolean", "enum", "array", "object"]
    kind = rng.choice(kinds if depth < 2 else kinds[:4])
    if kind == "enum":
        return {"enum": rng.sample(["red", "green", 'bl"ue', 7, None, True], 3)}
    if kind == "string":
        return {"type": "string", "maxLength": rng.randrange(1, 12)}
    if kind == "integer":
        low = rng.randrange(-50, 50)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(100)}
    if kind == "array":
        return {
            "type": "array",
            "items": random_schema(rng, depth + 1),
            "maxItems": rng.randrange(1, 4),
        }
    return random_object(rng, depth + 1) if kind == "object" else {"type": kind}


def random_object(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Return the schema of an object."""
    names = rng.sample(["a", "city", "b_2", "größe", 'quo"te', "x y"], rng.randrange(1, 4))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth) for name in names},
        "required": rng.sample(names, rng.randrange(len(names) + 1)),
        "additionalProperties": False,
    }


@pytest.mark.parametrize("format", [HERMES, LLAMA3, SMOLLM2], ids=lambda one: one.name)
def test_random_tokens_of_the_grammar_are_valid_calls(
    format: ToolFormat, tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    """Any model will do: tokens are sampled from those that are allowed."""
    for seed in range(12):
        rng = random.Random(seed)
        functions = {f"f{index}": random_object(rng) for index in range(rng.randrange(1, 4))}
        grammar = tool_grammar(format, functions, tokenizer, required=True)
        matcher, ids = compiler.compile(grammar).result(), list[int]()
        while not matcher.done and len(ids) < 4000:
            allowed = matcher.mask().nonzero()[0].tolist()
            token = rng.choice(allowed)
            if token in tokenizer.eos_token_ids:
                break
            matcher.accept((token,))
            ids.append(token)
        assert matcher.error is None
        parser = ReplyParser(tools=format)
        stream = tokenizer.decode_stream(list(tokenizer.special_token_ids))
        deltas = [delta for id in ids for delta in parser.feed(stream.feed(id))]
        assert 1 <= parser.num_calls <= MAX_CALLS
        names = [delta.text for delta in deltas if delta.kind == "call"]
        for index, name in enumerate(names):
            parts = [d.text for d in deltas if d.kind == "arguments" and d.call == index]
            assert jsonschema_rs.is_valid(functions[name], json.loads("".join(parts)))
