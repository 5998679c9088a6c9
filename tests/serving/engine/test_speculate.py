from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from ingot.core.errors import ConfigError
from ingot.nn import Decoder, preset
from ingot.serving.engine.engine import Engine
from ingot.serving.engine.request import Request
from ingot.serving.engine.runner import Runner
from ingot.serving.engine.sampling_params import SamplingParams
from ingot.serving.engine.scheduler import SchedulerConfig
from ingot.serving.engine.speculate import (
    DraftModelProposer,
    NgramProposer,
    Proposer,
    QuantizedProposer,
    create_proposer,
    int4_copy,
)

BIG = Decoder.from_config(preset("tiny"), seed=0)
SMALL = Decoder.from_config(preset("tiny"), seed=1)
LIMITS = SchedulerConfig(num_blocks=40, block_size=8, max_num_batched_tokens=32, max_num_seqs=6)


@dataclass
class Book:
    request: Request = field(default_factory=lambda: Request(id=1, prompt=(1,), max_tokens=9))
    tokens: list[int] = field(default_factory=list)
    block_table: tuple[int, ...] = ()


def follow(tokens: list[int], max_tokens: int = 4, **options: int) -> tuple[int, ...]:
    return NgramProposer(**options).propose([Book(tokens=tokens)], max_tokens)[0]


def test_lookup_gives_what_followed_the_last_time() -> None:
    assert follow([1, 2, 3, 4, 1, 2, 5, 1, 2], n=2) == (5, 1, 2, 5)
    assert follow([1, 2, 3, 4, 5], n=2) == ()
    assert follow([1, 1, 1], n=2) == (1, 1, 1, 1)
    assert follow([7], n=2) == ()
    assert follow([1, 2, 9, 9, 1, 2], 99, n=2) == (9, 9, 1, 2) * 3 + (9, 9, 1)


def test_lookup_learns_as_the_text_grows_and_forgets() -> None:
    lookup, book = NgramProposer(n=2), Book()
    whole = [1, 2, 3, 1, 2, 4, 1, 2, 3, 1, 2, 4, 1, 2]
    for end in range(1, len(whole) + 1):
        book.tokens = whole[:end]
        assert lookup.propose([book], 3)[0] == follow(book.tokens, 3, n=2)
    lookup.forget(1)
    assert not lookup._ngrams
    lookup.forget(1)


def text(engine: Engine, requests: list[Request]) -> dict[int, list[Any]]:
    for request in requests:
        engine.add_request(request)
    found: dict[int, list[Any]] = {request.id: [] for request in requests}
    while engine.has_unfinished_requests:
        for output in engine.step():
            found[output.id] += zip(output.tokens, output.logprobs or (), strict=True)
    assert engine.stats().num_used_blocks == 0
    return found


def requests() -> list[Request]:
    random = torch.Generator().manual_seed(0)
    found: list[Request] = []
    for id, length in enumerate([1, 4, 17, 40, 61]):
        prompt = tuple(torch.randint(256, (length,), generator=random).tolist())
        options = SamplingParams(
            temperature=(0.0, 0.6, 1.0)[id % 3],
            seed=id,
            logprobs=1,
            frequency_penalty=0.5 if id == 3 else 0.0,
            stop_token_ids=(200, 201) if id == 2 else (),
        )
        found.append(Request(id=id, prompt=prompt, max_tokens=30, sampling_params=options))
    return found


@pytest.mark.parametrize("kind", ["lookup", "itself", "another", "cramped"])
def test_tokens_are_the_same_with_every_proposer(kind: str) -> None:
    wanted = text(Engine(BIG, scheduler_config=LIMITS), requests())
    proposer: Proposer = {
        "lookup": lambda: NgramProposer(n=1),
        "itself": lambda: DraftModelProposer(BIG, LIMITS, num_speculative_tokens=3),
        "another": lambda: DraftModelProposer(SMALL, LIMITS, num_speculative_tokens=3),
        "cramped": lambda: DraftModelProposer(
            BIG,
            SchedulerConfig(num_blocks=11, block_size=8, max_num_batched_tokens=9, max_num_seqs=3),
        ),
    }[kind]()
    engine = Engine(BIG, scheduler_config=LIMITS, proposer=proposer)
    assert text(engine, requests()) == wanted
    stats = engine.stats()
    assert stats.draft_tokens > 0
    assert stats.accepted_tokens <= stats.draft_tokens
    if kind == "itself":  # it knows of no penalties
        assert stats.accepted_tokens > 0.7 * stats.draft_tokens
    if isinstance(proposer, DraftModelProposer):
        assert not proposer._states
        assert sorted(proposer._free) == list(range(proposer.config.num_blocks))


def test_a_draft_model_reads_what_is_new_and_goes_back_where_it_was_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draft, read = DraftModelProposer(SMALL, LIMITS, num_speculative_tokens=3), list[int]()
    run = draft.runner.run

    def reading(work: Any) -> torch.Tensor:
        read.append(sum(len(item.tokens) for item in work))
        return run(work)

    monkeypatch.setattr(draft.runner, "run", reading)
    book = Book(tokens=list(range(20)))
    (found,) = draft.propose([book], 3)
    assert (len(found), read) == (3, [20, 1, 1])
    # All three were right, of which it has read two; one was right; none was, and one came.
    for right, new, count in ((3, [9], 2), (1, [256 - 1, 7], 2), (0, [5], 1)):
        wrong = [(token + (token == found[right % 3])) % 256 for token in new]
        book.tokens += [*found[:right], *wrong]
        read.clear()
        (found,) = draft.propose([book], 3)
        (fresh,) = DraftModelProposer(SMALL, LIMITS, num_speculative_tokens=3).propose(
            [Book(tokens=book.tokens)], 3
        )
        assert found == fresh
        assert read[0] == count
    draft.forget(1)
    assert len(draft._free) == LIMITS.num_blocks


@pytest.mark.parametrize(("size", "scratch"), [(1, 16), (8, 16), (8, 0), (128, 16)])
def test_a_quantized_copy_on_the_same_cache_changes_no_bit(size: int, scratch: int) -> None:
    config = SchedulerConfig(
        num_blocks=160 // size + 5, block_size=size, max_num_batched_tokens=32, max_num_seqs=6
    )
    wanted = text(Engine(BIG, scheduler_config=config), requests())
    runner = Runner(BIG, config, num_scratch_blocks=scratch)
    proposer = QuantizedProposer(runner)
    engine = Engine(BIG, scheduler_config=config, runner=runner, proposer=proposer)
    assert text(engine, requests()) == wanted
    stats = engine.stats()
    # Untrained, with temperatures: not all agree.
    assert 0.3 * stats.draft_tokens < stats.accepted_tokens < stats.draft_tokens
    assert not proposer._states


def test_a_quantized_copy_drafts_up_to_the_end_of_the_context() -> None:
    config = SchedulerConfig(num_blocks=40, block_size=16, max_num_batched_tokens=300)
    longest = BIG.config.max_seq_len
    prompt = tuple(index % 250 for index in range(longest - 9))
    request = Request(id=1, prompt=prompt, max_tokens=9, sampling_params=SamplingParams(logprobs=1))
    wanted = text(Engine(BIG, scheduler_config=config), [request])
    assert len(wanted[1]) == 9
    runner = Runner(BIG, config, num_scratch_blocks=16)
    proposer = QuantizedProposer(runner, num_speculative_tokens=7)
    engine = Engine(BIG, scheduler_config=config, runner=runner, proposer=proposer)
    assert text(engine, [request]) == wanted
    assert engine.stats().draft_tokens > 0


def test_a_quantized_copy_shares_what_it_does_not_quantize() -> None:
    copied = int4_copy(BIG)
    own = {tensor.data_ptr() for tensor in BIG.parameters()}
    assert {tensor.data_ptr() for tensor in copied.parameters()} < own
    assert not BIG.has_quantized_head
    with pytest.raises(ConfigError, match="quantized model"):
        int4_copy(copied)
    with pytest.raises(ConfigError, match="not a multiple of the group size 32"):
        int4_copy(Decoder.from_config(replace(preset("tiny"), ffn_dim=48), seed=0))


def test_proposers_by_name() -> None:
    assert create_proposer(None, BIG, LIMITS)[1] is None
    assert isinstance(create_proposer("ngram", BIG, LIMITS)[1], NgramProposer)
    runner, drafts = create_proposer("int4", BIG, LIMITS)
    assert isinstance(drafts, QuantizedProposer)
    assert drafts.runner.kv_cache is runner.kv_cache


def test_failing_proposer_costs_no_token() -> None:
    class Broken:
        def propose(self, sequences: Any, max_tokens: int) -> list[tuple[int, ...]]:
            raise RuntimeError("no memory")

        def forget(self, id: int) -> None:
            pass

    wanted = text(Engine(BIG, scheduler_config=LIMITS), requests())
    assert text(Engine(BIG, scheduler_config=LIMITS, proposer=Broken()), requests()) == wanted


def test_options_are_bounded() -> None:
    for wrong in ({"n": 0}, {"num_speculative_tokens": 0}, {"num_speculative_tokens": 65}):
        with pytest.raises(ConfigError):
            NgramProposer(**wrong)
    with pytest.raises(ConfigError):
        DraftModelProposer(BIG, LIMITS, num_speculative_tokens=0)
