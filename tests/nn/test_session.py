from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot import ops
from ingot.core.errors import ConfigError, IngotError
from ingot.nn import BatchLayout, Decoder, Sampling, Session, preset
from ingot.nn.session import BLOCK_SIZE, CHUNK

CONFIG = dataclasses.replace(preset("tiny"), max_seq_len=1000)
DECODER = Decoder.from_config(CONFIG, seed=0, dtype=torch.bfloat16)
VOCABULARY = DECODER.config.vocab_size
prompts = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=40)


def by_whole_forwards(prompt: list[int], count: int, sampling: Sampling) -> list[int]:
    """What a session must write, nothing kept from one token to the next."""
    tokens = list(prompt)
    for _ in range(count):
        layout = BatchLayout.packed([len(tokens)])
        with torch.inference_mode():
            hidden = DECODER(torch.tensor(tokens), layout)
            logits = DECODER.logits(hidden[-1:])
            position = torch.tensor([len(tokens)])
            tokens.append(int(ops.sample(logits, *sampling.arguments(VOCABULARY), position)))
    return tokens[len(prompt) :]


@settings(max_examples=25)
@given(prompts, st.sampled_from([0.0, 1.0]), st.integers(0, 99))
def test_it_writes_what_whole_forwards_would(
    prompt: list[int], temperature: float, seed: int
) -> None:
    sampling = Sampling(temperature=temperature, top_p=0.9, seed=seed)
    written = list(Session(DECODER).stream(prompt, max_tokens=6, sampling=sampling))
    assert written == by_whole_forwards(prompt, 6, sampling)


@settings(max_examples=25)
@given(st.lists(prompts, min_size=2, max_size=4), st.integers(0, 40))
def test_what_was_kept_changes_nothing(turns: list[list[int]], shared: int) -> None:
    session = Session(DECODER)
    before: list[int] = []
    for turn in turns:
        prompt = (before[:shared] + turn)[:200]
        again = list(session.stream(prompt, max_tokens=5))
        assert again == list(Session(DECODER).stream(prompt, max_tokens=5))
        before = prompt + again


def test_a_prompt_that_was_there_already_computes_one_token() -> None:
    session, fed = Session(DECODER), []
    hook = DECODER.register_forward_pre_hook(lambda _, args: fed.append(len(args[0])))
    try:
        prompt = list(range(50))
        for _ in range(2):
            list(session.stream(prompt, max_tokens=1))
        list(session.stream([*prompt, 7, 8], max_tokens=1))
    finally:
        hook.remove()
    assert fed == [50, 1, 2]


def test_long_prompts_come_in_chunks_and_the_pool_grows() -> None:
    prompt = [i % VOCABULARY for i in range(CHUNK + 5)]
    session = Session(DECODER)
    list(session.stream(prompt[: BLOCK_SIZE // 2], max_tokens=2))
    assert list(session.stream(prompt, max_tokens=3)) == by_whole_forwards(prompt, 3, Sampling())


def test_it_ends_at_an_end_token_and_at_the_context() -> None:
    hot = Sampling(temperature=2.0)
    first, second, *_ = Session(DECODER).stream([1, 2, 3], max_tokens=4, sampling=hot)
    assert first != second
    ended = Session(DECODER).stream([1, 2, 3], max_tokens=4, sampling=hot, stop_token_ids={second})
    assert list(ended) == [first]
    context = DECODER.config.max_seq_len
    prompt = [5] * (context - 2)
    assert len(list(Session(DECODER).stream(prompt, max_tokens=99))) == 2
    assert list(Session(DECODER).stream([5] * context, max_tokens=99)) == []


@pytest.mark.parametrize(
    ("prompt", "hint"),
    [([], "give some text"), ([1] * 5000, "shorter"), ([-1], "tokenizer"), ([10**6], "tokenizer")],
)
def test_prompts_that_cannot_be_are_refused(prompt: list[int], hint: str) -> None:
    with pytest.raises(IngotError, match=hint):
        list(Session(DECODER).stream(prompt, max_tokens=1))


@pytest.mark.parametrize(
    "option",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 1.5},
        {"top_k": 0},
        {"min_p": -0.1},
        {"seed": -1},
        {"seed": 2**63},
    ],
)
def test_options_have_bounds(option: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(option))):
        Sampling(**option)  # pyright: ignore


def test_a_seed_repeats_and_another_differs() -> None:
    def drawn(seed: int) -> list[int]:
        sampling = Sampling(temperature=2.0, seed=seed)
        return list(Session(DECODER).stream([1], max_tokens=12, sampling=sampling))

    assert drawn(3) == drawn(3) != drawn(4)


WRITING = """
import sys
from ingot.nn import Decoder, Session, preset
decoder = Decoder.from_config(preset("tiny"), seed=0)
before = set(sys.modules)
list(Session(decoder).stream([1, 2], max_tokens=3))
late = {"torch._dynamo", "sympy"} & (set(sys.modules) - before)
assert not late, late
"""


def test_writing_imports_no_compiler() -> None:
    """torch._dynamo takes a second, in the middle of a sentence."""
    subprocess.run([sys.executable, "-c", WRITING], check=True)
