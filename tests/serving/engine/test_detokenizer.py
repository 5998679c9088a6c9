"""The chunks are the text up to the first stop string, however tokens split it."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from ingot.interop.tokenizer import Tokenizer
from ingot.serving.engine.detokenizer import StreamingDetokenizer


def byte_tokenizer() -> Tokenizer:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[])
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(inner=inner)


TOKENIZER = byte_tokenizer()


def cut(text: str, stops: tuple[str, ...]) -> str:
    """Up to the stop string that is complete first; the longest, of several."""
    for end in range(len(text) + 1):
        if met := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(map(len, met))]
    return text


@given(
    st.text("abé", max_size=30),
    st.lists(st.text("abé", min_size=1, max_size=4), max_size=3).map(tuple),
    st.integers(1, 4),
)
def test_chunks_are_the_text_up_to_the_first_stop(
    text: str, stops: tuple[str, ...], width: int
) -> None:
    ids = TOKENIZER.encode(text)
    made, shown = StreamingDetokenizer(TOKENIZER, stops), ""
    for start in range(0, len(ids), width):
        shown += made.feed(ids[start : start + width])
        assert cut(text, stops).startswith(shown), "what was shown cannot be taken back"
    shown += made.finish()
    assert shown == cut(text, stops)
    assert made.stopped == any(stop in text for stop in stops)


@given(st.text("ab", max_size=30), st.text("ab", min_size=1, max_size=4))
def test_no_more_is_held_back_than_could_begin_a_stop(text: str, stop: str) -> None:
    made, shown = StreamingDetokenizer(TOKENIZER, (stop,)), ""
    for number, token in enumerate(TOKENIZER.encode(text), start=1):
        shown += made.feed([token])
        if made.stopped:
            break
        held = text[len(shown) : number]
        assert stop.startswith(held)
        assert held != stop


def test_half_a_character_is_given_at_the_end() -> None:
    made = StreamingDetokenizer(TOKENIZER)
    ids = TOKENIZER.encode("é")
    assert len(ids) == 2
    assert made.feed(ids[:1]) == ""
    assert made.finish() == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("stops", [(), ("zz",)])
def test_nothing_comes_of_nothing(stops: tuple[str, ...]) -> None:
    made = StreamingDetokenizer(TOKENIZER, stops)
    assert made.feed([]) + made.finish() == ""
    assert not made.stopped
