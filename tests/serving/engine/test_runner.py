from __future__ import annotations

import random

import pytest
import torch

from ingot.core.errors import ConfigError
from ingot.nn import BatchLayout, Decoder, preset
from ingot.serving.engine import runner as module
from ingot.serving.engine.runner import Runner
from ingot.serving.engine.scheduler import ScheduledSeq, SchedulerConfig

LIMITS = SchedulerConfig(num_blocks=60, block_size=4, max_num_batched_tokens=64, max_num_seqs=8)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def decoder(request: pytest.FixtureRequest) -> Decoder:
    return Decoder.from_config(preset("tiny"), seed=0, dtype=request.param)


@torch.inference_mode()
def packed(decoder: Decoder, tokens: list[int]) -> torch.Tensor:
    layout = BatchLayout.packed([len(tokens)])
    return decoder(torch.tensor(tokens), layout)


@torch.inference_mode()
def serve(runner: Runner, texts: list[list[int]], seed: int) -> list[torch.Tensor]:
    """Compute the texts in random chunks, orders and batches, each in blocks of its own."""
    numbers = random.Random(seed)
    free = list(range(LIMITS.num_blocks))
    numbers.shuffle(free)
    tables: list[tuple[int, ...]] = [() for _ in texts]
    found: list[list[torch.Tensor]] = [[] for _ in texts]
    done = [0] * len(texts)
    while any(count < len(text) for count, text in zip(done, texts, strict=True)):
        left = [i for i, text in enumerate(texts) if done[i] < len(text)]
        chosen = numbers.sample(left, numbers.randint(1, len(left)))
        work: list[ScheduledSeq] = []
        for i in chosen:
            most = numbers.choice([1, 1, 1, 2, 9])
            tokens = tuple(texts[i][done[i] : done[i] + most])
            while len(tables[i]) * LIMITS.block_size < done[i] + len(tokens):
                tables[i] += (free.pop(),)
            work.append(ScheduledSeq(i, done[i], tokens, tables[i], False))
        hidden = runner.run(work).split([len(item.tokens) for item in work])
        for item, states in zip(work, hidden, strict=True):
            found[item.id].append(states)
            done[item.id] += len(item.tokens)
    return [torch.cat(states) for states in found]


def test_hidden_states_equal_a_packed_forward_for_any_chunks(decoder: Decoder) -> None:
    numbers = random.Random(1)
    lengths = [1, 3, 5, 17, 33, 41, 60]  # more blocks than a row of the table has at first
    texts = [[numbers.randrange(256) for _ in range(length)] for length in lengths]
    wanted = [packed(decoder, text) for text in texts]
    runner = Runner(decoder, LIMITS)
    for seed in range(6):
        for got, want in zip(serve(runner, texts, seed), wanted, strict=True):
            assert torch.equal(got, want)
    assert runner._captures


def test_row_of_the_block_table_can_change_its_request(decoder: Decoder) -> None:
    runner = Runner(decoder, LIMITS)
    with torch.inference_mode():
        runner.run([ScheduledSeq(1, 0, (5, 6), (0,), True), ScheduledSeq(2, 0, (7, 8), (1,), True)])
        for _ in range(3):  # computed, captured, replayed
            got = runner.run(
                [ScheduledSeq(2, 1, (8,), (1,), True), ScheduledSeq(1, 1, (6,), (0,), True)]
            )
    assert torch.equal(got[0], packed(decoder, [7, 8])[1])
    assert torch.equal(got[1], packed(decoder, [5, 6])[1])


def test_number_of_captures_is_limited(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CAPTURES", 2)
    monkeypatch.setattr(module, "MAX_CAPTURED_TOKENS", 4)
    runner = Runner(decoder, LIMITS)
    with torch.inference_mode():
        for count in (1, 2, 3, 4, 5):
            tokens = tuple(range(count))
            for _ in range(3):
                got = runner.run([ScheduledSeq(1, 0, tokens, (3, 4), True)])
                assert torch.equal(got, packed(decoder, list(tokens)))
    assert list(runner._captures) == [(3, 1, False), (4, 1, False)]


def test_selected_rows_are_those_after_which_a_token_is_sampled(decoder: Decoder) -> None:
    runner = Runner(decoder, LIMITS)
    steps = [
        # A chunk of a prompt, the end of a prompt, and a token with two drafts.
        [
            ScheduledSeq(1, 0, (5, 6), (0,), False),
            ScheduledSeq(2, 0, (7, 8), (1,), True),
            ScheduledSeq(3, 4, (9, 1, 2), (2, 3), True, num_draft_tokens=2),
        ],
        [ScheduledSeq(1, 2, (7,), (0,), True), ScheduledSeq(2, 2, (9,), (1,), True)],
        [ScheduledSeq(1, 3, (8,), (0,), False), ScheduledSeq(2, 3, (1,), (1,), True)],
    ]
    wanted = [([3, 4, 5, 6], [2, 5, 6, 7]), ([0, 1], [3, 3]), ([1], [4])]
    with torch.inference_mode():
        for step, (rows, positions) in zip(steps, wanted, strict=True):
            hidden = runner.run(step)
            selected, found = runner.select_sampled(hidden)
            assert torch.equal(selected, hidden[rows])
            assert found.tolist() == positions


def test_an_int8_cache_needs_a_cpu() -> None:
    decoder = Decoder.on_meta(preset("tiny"))
    decoder.set_kv_cache_dtype("int8")
    with pytest.raises(ConfigError, match="int8 is supported on a CPU only, got device meta"):
        Runner(decoder, LIMITS)
