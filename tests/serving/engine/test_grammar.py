from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator

import pytest
import tokenizers

from ingot.interop.tokenizer import Tokenizer
from ingot.nn import Decoder, preset
from ingot.serving.engine.engine import Engine
from ingot.serving.engine.grammar import GrammarCompiler, GrammarError, GrammarMatcher
from ingot.serving.engine.request import FinishReason, Request
from ingot.serving.engine.sampling_params import Grammar, SamplingParams
from ingot.serving.engine.scheduler import SchedulerConfig

DECODER = Decoder.from_config(preset("tiny"), seed=0)
END = 255
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"enum": [1, 22, 333]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def bytewise() -> Tokenizer:
    """A token for each byte; the last one ends a text."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {c: i for i, c in enumerate(alphabet[:END])} | {"<end>": END}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(["<end>"])
    return Tokenizer(inner=inner, eos_token_ids=frozenset({END}))


TOKENIZER = bytewise()


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine(DECODER, scheduler_config=SchedulerConfig(num_blocks=64), tokenizer=TOKENIZER)
    yield engine
    assert engine.stats().num_used_blocks == 0


def write(engine: Engine, *grammars: Grammar | None) -> list[tuple[FinishReason, str, str | None]]:
    """What becomes of texts with these grammars, written together."""
    for id, grammar in enumerate(grammars):
        options = SamplingParams(seed=id, grammar=grammar, logit_bias=((END, -2.0),))
        engine.add_request(
            Request(id=id, prompt=(1, 2, 3), max_tokens=300, sampling_params=options)
        )
    tokens: dict[int, list[int]] = {id: [] for id in range(len(grammars))}
    ends: dict[int, tuple[FinishReason, str | None]] = {}
    while engine.has_unfinished_requests:
        for output in engine.step():
            tokens[output.id] += output.tokens
            if output.finish_reason:
                ends[output.id] = output.finish_reason, output.error
    return [(ends[id][0], TOKENIZER.decode(tokens[id]), ends[id][1]) for id in range(len(grammars))]


def test_texts_keep_their_grammars(engine: Engine) -> None:
    schema = Grammar(kind="json_schema", text=json.dumps(SCHEMA))
    lark = Grammar(kind="lark", text='start: "a" start | "b"')
    pattern = r"(yes|no), [0-9]{3}"
    found = write(engine, schema, Grammar(kind="regex", text=pattern), lark, schema, None)
    for reason, text, error in found[:4]:
        assert (reason, error) == (FinishReason.STOP, None), text
    for index in (0, 3):
        assert set(json.loads(found[index][1])) == {"name", "age"}
    assert re.fullmatch(pattern, found[1][1])
    assert re.fullmatch("a*b", found[2][1])
    assert found[4][0] is FinishReason.LENGTH
    assert found[4] == write(engine, None, None, None, None, None)[4]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "("),
        ("regex", "(" * 20_000 + "a" + ")" * 20_000),
        ("json_schema", "{"),
        ("json_schema", "[]"),
        ("json_schema", '{"type": "nothing"}'),
        ("json_schema", '{"$ref": "http://localhost:1/x"}'),
        ("json_schema", '{"not":' * 3000 + "{}" + "}" * 3000),
        ("lark", "start: missing"),
    ],
)
def test_invalid_grammar_fails_only_its_own_request(engine: Engine, kind: str, text: str) -> None:
    wrong = Grammar(kind=kind, text=text)  # type: ignore[arg-type]
    (refused, ok) = write(engine, wrong, Grammar(kind="regex", text="ok"))
    assert refused[:2] == (FinishReason.REJECTED, "")
    assert "grammar" in (refused[2] or "")
    assert ok == (FinishReason.STOP, "ok", None)


@pytest.mark.parametrize(
    "text",
    [
        "((a{0,1000}){0,1000}){0,1000}",
        "(.*[ab].{20}c){8}",
        "(a|b|c|d|e){1,5000}x(a|b){5000}",
    ],
)
def test_a_hostile_grammar_ends_in_time_and_alone(engine: Engine, text: str) -> None:
    begin = time.process_time()
    hostile, ok = write(engine, Grammar(kind="regex", text=text), Grammar(kind="regex", text="ok"))
    assert time.process_time() - begin < 20
    assert hostile[0] in (FinishReason.FAILED, FinishReason.REJECTED, FinishReason.LENGTH)
    assert (hostile[0] is FinishReason.LENGTH) == (hostile[2] is None)
    assert ok == (FinishReason.STOP, "ok", None)


def test_who_leaves_while_it_is_compiled() -> None:
    engine = Engine(DECODER, scheduler_config=SchedulerConfig(num_blocks=64), tokenizer=TOKENIZER)
    options = SamplingParams(grammar=Grammar(kind="regex", text="ok"))
    engine.add_request(Request(id=1, prompt=(1,), max_tokens=9, sampling_params=options))
    engine.abort(1, FinishReason.CANCELLED)
    assert engine.has_unfinished_requests
    assert [(output.id, output.finish_reason) for output in engine.step()] == [
        (1, FinishReason.CANCELLED)
    ]
    assert not engine.has_unfinished_requests


def test_a_grammar_is_compiled_once() -> None:
    grammars = GrammarCompiler(TOKENIZER, 256)
    first, second = (grammars.compile(Grammar(kind="regex", text="ab")).result() for _ in "12")
    assert len(grammars._compiled) == 1
    a, b = TOKENIZER.encode("ab")
    first.accept([a])
    assert not first.mask()[a]
    assert first.mask()[b]
    assert second.mask()[a]
    first.accept([b])
    assert first.done
    assert not second.done
    second.accept([b])
    assert second.error
    assert second.mask().all()


def test_the_compiled_ones_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ingot.serving.engine.grammar.MAX_CACHED_GRAMMARS", 2)
    grammars = GrammarCompiler(TOKENIZER, 256)
    for text in ("a", "b", "a", "c"):
        grammars.compile(Grammar(kind="regex", text=text)).result()
    assert [grammar.text for grammar in grammars._compiled] == ["a", "c"]
    with pytest.raises(GrammarError):
        grammars.compile(Grammar(kind="regex", text="[")).result()


class Panic(BaseException):
    pass


def test_a_panic_is_an_error_of_its_request() -> None:
    class Broken:
        def compute_bitmask(self) -> bytes:
            raise Panic("index out of bounds")

        def consume_tokens(self, tokens: list[int]) -> None:
            raise Panic("index out of bounds")

    for name in ("mask", "accept"):
        matcher = GrammarMatcher(Broken(), 256)
        getattr(matcher, name)(*([[1]] if name == "accept" else []))
        assert "index out of bounds" in (matcher.error or "")
        assert matcher.mask().all()
