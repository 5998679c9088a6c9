from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
import torch

from ingot.core.errors import IngotError
from ingot.nn import BatchLayout, Decoder, preset
from ingot.serving.engine import engine as module
from ingot.serving.engine.adapters import AdapterPool
from ingot.serving.engine.engine import Engine, config_for_memory
from ingot.serving.engine.output import Output
from ingot.serving.engine.request import FinishReason, Request
from ingot.serving.engine.sampling_params import Grammar, SamplingParams
from ingot.serving.engine.scheduler import SchedulerConfig
from ingot.serving.engine.speculate import create_proposer
from tests import adapters, oracle
from tests.serving.engine.test_grammar import END, TOKENIZER

DECODER = Decoder.from_config(preset("tiny"), seed=0, dtype=torch.bfloat16)
LIMITS = SchedulerConfig(num_blocks=24, block_size=8, max_num_batched_tokens=24, max_num_seqs=5)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    random = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(256, (length,), generator=random).tolist())


def asked(id: int, length: int = 9, max_tokens: int = 5, **options: Any) -> Request:
    given = SamplingParams(**{"seed": id, "temperature": 0.9, **options})
    return Request(id=id, prompt=prompt(length, id), max_tokens=max_tokens, sampling_params=given)


def finish(engine: Engine) -> dict[int, list[Output]]:
    """All outputs until every request has finished."""
    found: dict[int, list[Output]] = {}
    while engine.has_unfinished_requests:
        for output in engine.step():
            found.setdefault(output.id, []).append(output)
    check_idle(engine)
    return found


def check_idle(engine: Engine) -> None:
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
    assert engine.step() == []
    assert [*engine._sequences, *engine._events, *engine._reported_finished] == []


def tokens(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.tokens]


@torch.inference_mode()
def logprobs(text: list[int]) -> list[float]:
    layout = BatchLayout.packed([len(text)])
    hidden = DECODER(torch.tensor(text), layout)
    return DECODER.logprobs(hidden[:-1], torch.tensor(text[1:])).tolist()


def test_many_together_get_what_each_would_get_alone() -> None:
    requests = [
        asked(id, length, 20, logprobs=0, prompt_logprobs=0 if id % 2 else None)
        for id, length in enumerate([1, 3, 17, 60, 9, 33, 8, 7, 40])
    ]
    config = SchedulerConfig(num_blocks=12, block_size=8, max_num_batched_tokens=24, max_num_seqs=5)
    engine = Engine(DECODER, scheduler_config=config)
    for request in requests:
        engine.add_request(request)
    found = finish(engine)
    assert engine.stats().preemptions > 0
    for request in requests:
        outputs, options = found[request.id], request.sampling_params
        text = [*request.prompt, *oracle.generate(DECODER, request.prompt, 20, options)]
        assert [*request.prompt, *tokens(outputs)] == text
        of_prompt = [one.logprob for o in outputs for one in o.prompt_logprobs or ()]
        of_tokens = [one.logprob for o in outputs for one in o.logprobs or ()]
        scored = options.prompt_logprobs is not None
        wanted = logprobs(text) if scored else logprobs(text)[len(request.prompt) - 1 :]
        assert of_prompt + of_tokens == wanted
        assert [o.finish_reason for o in outputs if o.finish_reason] == [FinishReason.LENGTH]
        assert [o.num_cached_tokens for o in outputs if o.num_cached_tokens is not None] == [0]


def test_a_prefix_is_found_and_changes_nothing() -> None:
    engine, whole = Engine(DECODER, scheduler_config=LIMITS), prompt(30)
    answers: list[list[int]] = []
    for id, salt in enumerate([b"", b"", b"x"]):
        engine.add_request(Request(id=id, prompt=whole, max_tokens=4, cache_salt=salt))
        (outputs,) = finish(engine).values()
        answers.append(tokens(outputs))
        assert outputs[0].num_cached_tokens == (24 if id == 1 else 0)
    assert answers[0] == answers[1] == answers[2]
    engine.add_request(
        Request(id=7, prompt=whole, max_tokens=4, sampling_params=SamplingParams(prompt_logprobs=0))
    )
    (outputs,) = finish(engine).values()
    assert outputs[0].num_cached_tokens == 0
    assert len([one for o in outputs for one in o.prompt_logprobs or ()]) == 29


@pytest.mark.parametrize("start", [0, 1, 2, 16, 17, 23, 29, 30])
def test_logprobs_of_the_end_of_a_prompt_reuse_its_beginning(start: int) -> None:
    engine, whole = Engine(DECODER, scheduler_config=LIMITS), prompt(30)
    wanted = logprobs(list(whole))
    for id in range(2):  # the second finds all blocks of the first, and must compute some again
        params = SamplingParams(prompt_logprobs=0, prompt_logprobs_start=start)
        engine.add_request(Request(id=id, prompt=whole, max_tokens=1, sampling_params=params))
        (outputs,) = finish(engine).values()
        found = [one.logprob for o in outputs for one in o.prompt_logprobs or ()]
        assert found == wanted[max(start - 1, 0) :]
        assert outputs[0].num_cached_tokens == (max(start - 1, 0) // 8 * 8 if id else 0)


def test_stop_token_ends_a_request_and_is_reported() -> None:
    engine = Engine(DECODER, scheduler_config=LIMITS)
    engine.add_request(asked(1, max_tokens=8))
    whole = tokens(finish(engine)[1])
    for count in (1, 5, 8):
        end = whole[count - 1]
        engine.add_request(asked(1, max_tokens=8, stop_token_ids=(end, 255)))
        outputs = finish(engine)[1]
        assert tokens(outputs) == whole[: whole.index(end) + 1]
        assert outputs[-1].finish_reason is FinishReason.STOP


def test_abort_is_reported_and_releases_the_blocks() -> None:
    engine = Engine(DECODER, scheduler_config=LIMITS)
    for id in (1, 2):
        engine.add_request(asked(id, max_tokens=50))
    engine.step()
    engine.abort(1, FinishReason.CANCELLED)
    engine.abort(9, FinishReason.CANCELLED)
    outputs = {output.id: output for output in engine.step()}
    assert outputs[1] == Output(1, finish_reason=FinishReason.CANCELLED)
    assert outputs[2].tokens
    assert engine.stats().num_running == 1
    engine.add_request(asked(1, max_tokens=50))  # the number is free again
    engine.abort(1, FinishReason.STOP)
    assert Output(1, finish_reason=FinishReason.STOP) in engine.step()
    engine.abort(2, FinishReason.STOP)
    assert engine.step() == [Output(2, finish_reason=FinishReason.STOP)]
    check_idle(engine)


def test_a_number_is_used_again_at_once() -> None:
    engine = Engine(DECODER, scheduler_config=LIMITS)
    engine.add_request(asked(2, max_tokens=30))
    for _ in range(5):
        engine.add_request(asked(1, max_tokens=2))
        assert [o.finish_reason for o in engine.step() if o.id == 1] == [None]
        assert [o.finish_reason for o in engine.step() if o.id == 1] == [FinishReason.LENGTH]
    assert len(tokens(finish(engine)[2])) == 20


def test_a_deadline_passes() -> None:
    now = [0.0]
    engine = Engine(DECODER, scheduler_config=LIMITS, clock=lambda: now[0])
    engine.add_request(Request(id=1, prompt=(1, 2), max_tokens=50, deadline=2.0))
    assert engine.step()[0].tokens
    now[0] = 2.5
    assert engine.step() == [Output(1, finish_reason=FinishReason.DEADLINE)]
    check_idle(engine)


class Broken(RuntimeError):
    pass


@pytest.mark.parametrize("where", ["runner.run", "sampler.sample", "sampler.score"])
def test_a_step_that_breaks_ends_its_requests_and_the_engine_lives(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(DECODER, scheduler_config=LIMITS)
    request = asked(1, 30, 9, prompt_logprobs=0)
    engine.add_request(request)
    before = tokens(finish(engine)[1])
    part, name = where.split(".")

    def out_of_memory(*_: Any) -> Any:
        raise Broken("can't allocate memory: you tried to allocate 9999999999 bytes")

    # The second waits: it is not in the step, and continues.
    config = SchedulerConfig(num_blocks=8, block_size=8, max_num_batched_tokens=24, max_num_seqs=1)
    engine = Engine(DECODER, scheduler_config=config)
    engine.add_request(request)
    engine.add_request(asked(2, 30, 9, prompt_logprobs=0))
    with monkeypatch.context() as patch:
        patch.setattr(getattr(engine, part), name, out_of_memory)
        outputs = engine.step()
        while not outputs[-1].finish_reason:  # the first step of a long prompt draws nothing
            outputs = engine.step()
    assert outputs == [Output(1, finish_reason=FinishReason.FAILED, error=outputs[0].error)]
    assert "allocate" in (outputs[0].error or "")
    assert engine.stats().failed_steps == 1
    assert list(finish(engine)) == [2]
    engine.add_request(request)
    assert tokens(finish(engine)[1]) == before


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"prompt": (1,) * 512}, "context"),
        ({"prompt": (256,)}, "vocabulary"),
        ({"sampling_params": SamplingParams(logit_bias=((256, 1.0),))}, "vocabulary"),
        ({"sampling_params": SamplingParams(stop_token_ids=(999,))}, "vocabulary"),
        ({"prompt": (1,) * 200}, "memory"),
        ({"sampling_params": SamplingParams(grammar=Grammar(kind="regex", text="a"))}, "tokenizer"),
        ({"id": 7}, "duplicate"),
    ],
)
def test_what_can_never_run_is_refused(wrong: dict[str, Any], what: str) -> None:
    engine = Engine(DECODER, scheduler_config=LIMITS)
    engine.add_request(asked(7))
    with pytest.raises(IngotError, match=what):
        engine.add_request(Request(**{"id": 1, "prompt": (1,), "max_tokens": 1, **wrong}))
    assert list(finish(engine)) == [7]


def test_a_request_is_cut_to_the_context() -> None:
    engine = Engine(DECODER, scheduler_config=SchedulerConfig(num_blocks=64, block_size=8))
    engine.add_request(Request(id=1, prompt=prompt(500), max_tokens=10**6))
    outputs = finish(engine)[1]
    assert len(tokens(outputs)) == 12
    assert outputs[-1].finish_reason is FinishReason.LENGTH


def test_too_many_that_wait_are_refused() -> None:
    config = SchedulerConfig(
        num_blocks=24, block_size=8, max_num_batched_tokens=24, max_num_seqs=1, max_queue=2
    )
    engine = Engine(DECODER, scheduler_config=config)
    for id in range(4):
        engine.add_request(asked(id))
    found = finish(engine)
    assert [found[id][-1].finish_reason for id in range(4)] == [FinishReason.LENGTH] * 2 + [
        FinishReason.REJECTED
    ] * 2


def test_what_is_counted() -> None:
    engine = Engine(DECODER, scheduler_config=LIMITS)
    for _ in range(2):
        engine.add_request(asked(1, 17, 5))
        finish(engine)
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.cached_tokens, stats.generated_tokens) == (34, 16, 10)
    assert stats.steps == 10
    assert stats.num_blocks == 24


def test_memory_becomes_blocks() -> None:
    size = 32 * DECODER.kv_spec.bytes_per_token
    assert config_for_memory(DECODER, kv_cache_bytes=5 * size + 1).num_blocks == 5
    assert config_for_memory(DECODER).num_blocks == 64 * 512 // 32  # all that can be used
    with pytest.raises(IngotError, match="bytes"):
        config_for_memory(DECODER, kv_cache_bytes=size - 1)


def test_steps_of_many_tokens_have_no_drafts() -> None:
    assert module.MAX_SPECULATIVE_STEP_TOKENS >= 2
    asked_of: list[int] = []

    class Watching:
        def propose(self, sequences: Any, max_tokens: int) -> list[tuple[int, ...]]:
            asked_of.append(len(sequences) * (max_tokens + 1))
            return [(0,) * max_tokens for _ in sequences]

        def forget(self, id: int) -> None:
            pass

    config = SchedulerConfig(
        num_blocks=200, block_size=8, max_num_batched_tokens=512, max_num_seqs=60
    )
    engine = Engine(DECODER, scheduler_config=config, proposer=Watching())
    for id in range(40):
        engine.add_request(asked(id, 2, 3 + id % 7))
    finish(engine)
    assert asked_of
    assert max(asked_of) <= module.MAX_SPECULATIVE_STEP_TOKENS


class Knowing:
    """Drafts these tokens, and more than requested."""

    def __init__(self, whole: list[int]) -> None:
        self.whole = whole

    def propose(self, sequences: Any, max_tokens: int) -> list[tuple[int, ...]]:
        return [tuple(self.whole[len(one.tokens) - 9 :]) for one in sequences]

    def forget(self, id: int) -> None:
        pass


def test_stop_token_among_accepted_drafts_ends_a_request() -> None:
    engine = Engine(DECODER, scheduler_config=LIMITS)
    engine.add_request(asked(1, max_tokens=8))
    whole = tokens(finish(engine)[1])
    for count in (2, 4, 8):
        engine = Engine(DECODER, scheduler_config=LIMITS, proposer=Knowing(whole))
        engine.add_request(asked(1, max_tokens=8, stop_token_ids=(whole[count - 1],)))
        outputs = finish(engine)[1]
        assert tokens(outputs) == whole[: whole.index(whole[count - 1]) + 1]
        assert outputs[-1].finish_reason is FinishReason.STOP
        assert len(outputs) == 2


def test_a_prompt_is_scored_once_though_it_is_computed_twice() -> None:
    config = SchedulerConfig(num_blocks=8, block_size=8, max_num_batched_tokens=16, max_num_seqs=1)
    for steps in (1, 2, 4):  # preempted in the prompt, at its end, after it
        engine = Engine(DECODER, scheduler_config=config, clock=lambda: 0.0)
        engine.add_request(asked(1, 30, 5, prompt_logprobs=0, logprobs=0))
        heard = [output for _ in range(steps) for output in engine.step()]
        engine.add_request(Request(id=2, prompt=prompt(40), max_tokens=3, priority=-1))
        heard += finish(engine)[1]
        assert engine.stats().preemptions == 1
        found = [one for o in heard for one in (*(o.prompt_logprobs or ()), *(o.logprobs or ()))]
        text = [*prompt(30, 1), *tokens(heard)]
        assert [one.logprob for one in found] == logprobs(text)
        assert [one.token for one in found] == text[1:]


def test_an_int8_cache_has_nearly_twice_as_many_blocks() -> None:
    decoder = Decoder.from_config(preset("tiny"), seed=0, dtype=torch.bfloat16)
    blocks = config_for_memory(decoder, kv_cache_bytes=1 << 20).num_blocks
    decoder.set_kv_cache_dtype("int8")
    width = decoder.config.head_dim
    found = config_for_memory(decoder, kv_cache_bytes=1 << 20).num_blocks
    assert found == blocks * 2 * width // (width + 4)
    engine = Engine(decoder, scheduler_config=config_for_memory(decoder, 1 << 20))
    assert engine.runner.kv_cache.memory.nbytes <= 1 << 20


def continuing_engine(decoder: Decoder, kind: Any = None, num_blocks: int = 200) -> Engine:
    """A fresh engine with an adapter `a`."""
    config = SchedulerConfig(
        num_blocks=num_blocks, block_size=8, max_num_batched_tokens=32, max_num_seqs=8
    )
    runner, proposer = create_proposer(kind, decoder, config)
    pool = AdapterPool(decoder, 1, 8)
    pool.load("a", adapters.adapter(decoder, 1))
    return Engine(
        decoder,
        scheduler_config=config,
        tokenizer=TOKENIZER,
        proposer=proposer,
        adapters=pool,
        runner=runner,
    )


def random_request(id: int, rng: random.Random) -> Request:
    texts = ["[a-f ]{3,40}", "(yes|no), [0-9]{3}( [a-z]+){2,9}"]
    grammar = Grammar(kind="regex", text=rng.choice(texts)) if rng.random() < 0.3 else None
    penalized = rng.random() < 0.4
    params = SamplingParams(
        temperature=rng.choice((0.0, 0.0, 0.7, 1.3)),
        top_k=rng.choice((None, 5)),
        top_p=rng.choice((1.0, 0.8)),
        seed=rng.getrandbits(40),
        presence_penalty=rng.choice((0.0, 0.9)) if penalized else 0.0,
        frequency_penalty=rng.choice((0.0, 0.7)) if penalized else 0.0,
        repetition_penalty=rng.choice((1.0, 1.7)) if penalized else 1.0,
        logit_bias=((END, -2.0), (rng.randrange(200), 1.5)) if rng.random() < 0.3 else (),
        stop_token_ids=tuple(rng.sample(range(256), rng.choice((0, 6)))),
        logprobs=rng.choice((None, 0, 3)),
        logprobs_mode=rng.choice(("raw", "processed")),
        grammar=grammar,
    )
    return Request(
        id=id,
        prompt=tuple(rng.randrange(256) for _ in range(rng.choice((1, 8, 25, 70)))),
        max_tokens=rng.randrange(2, 50),
        adapter=rng.choice(("", "a")),
        sampling_params=params,
    )


def cut(request: Request, outputs: list[Output], count: int) -> tuple[Request, list[Any]]:
    """The request to continue after `count` tokens, and what follows them undisturbed."""
    whole = tokens(outputs)
    scored = [one for output in outputs for one in output.logprobs or ()]
    rest = [whole[count:], scored[count:], outputs[-1].finish_reason]
    return msgspec.structs.replace(request, generated=tuple(whole[:count])), rest


@pytest.mark.parametrize(("kind", "num_blocks"), [(None, 16), ("ngram", 200), ("int4", 16)])
def test_a_request_continues_on_another_engine_with_the_same_bits(
    kind: str | None, num_blocks: int
) -> None:
    decoder = Decoder.from_config(preset("tiny"), seed=0, dtype=torch.bfloat16)
    rng = random.Random(5)
    requests = [random_request(id, rng) for id in range(40)]
    engine = continuing_engine(decoder)
    for request in requests:
        engine.add_request(request)
    undisturbed = finish(engine)
    engine, wanted = continuing_engine(decoder, kind, num_blocks), dict[int, list[Any]]()
    for request in requests:
        outputs = undisturbed[request.id]
        rest, wanted[request.id] = cut(request, outputs, rng.randrange(len(tokens(outputs))))
        engine.add_request(rest)
    continued = finish(engine)
    assert {request.id: cut(request, continued[request.id], 0)[1] for request in requests} == wanted
    stats = engine.stats()
    assert (stats.preemptions > 0) == (num_blocks == 16)
    assert (stats.draft_tokens > 0) == (kind is not None)
    assert {end for *_, end in wanted.values()} == {FinishReason.STOP, FinishReason.LENGTH}


def test_tokens_that_leave_no_room_cannot_be_continued() -> None:
    engine = Engine(DECODER, scheduler_config=SchedulerConfig(num_blocks=64, block_size=8))
    given: dict[str, Any] = {"id": 1, "prompt": prompt(500), "max_tokens": 99}
    with pytest.raises(IngotError, match="has finished"):
        engine.add_request(Request(**given, generated=prompt(12)))
    with pytest.raises(IngotError, match="vocabulary"):
        engine.add_request(Request(id=1, prompt=(1,), max_tokens=9, generated=(300,)))


def test_generated_tokens_that_the_grammar_forbids_are_rejected() -> None:
    engine = continuing_engine(DECODER)
    params = SamplingParams(grammar=Grammar(kind="regex", text="[a-z]+"))
    wrong = tuple(TOKENIZER.encode("ab1"))
    engine.add_request(
        Request(id=1, prompt=(1,), max_tokens=9, generated=wrong, sampling_params=params)
    )
    assert finish(engine)[1][-1].finish_reason is FinishReason.REJECTED
