"""What all models share: windows over long texts, and where a choice begins."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ingot.evaluation.model import num_scored_bytes, split_choice, windows


@given(length=st.integers(1, 200), size=st.integers(2, 50))
def test_windows_score_every_token_but_the_first_once(length: int, size: int) -> None:
    scored: list[int] = []
    for start, stop, first in windows(length, size):
        assert 0 <= start < first
        assert stop - start <= size
        scored += range(first, stop)
    assert scored == list(range(1, length))


@given(length=st.integers(2, 200), size=st.integers(2, 50))
def test_later_windows_are_full(length: int, size: int) -> None:
    _, *later = windows(length, size)
    assert all(stop - start == size for start, stop, _ in later)


@given(prompt=st.text(min_size=1), delimiter=st.sampled_from(["", " "]), choice=st.text(min_size=1))
def test_no_text_is_lost_between_prompt_and_choice(
    prompt: str, delimiter: str, choice: str
) -> None:
    context, continuation = split_choice(prompt, delimiter, choice)
    assert context + continuation in (prompt + choice, prompt + delimiter + choice)
    assert not context[-1:].isspace()


def test_bytes_are_those_after_the_first_token() -> None:
    assert num_scored_bytes("é1", "é") == 1
    assert num_scored_bytes("é1", "\N{REPLACEMENT CHARACTER}") == 3
    assert num_scored_bytes("abc", "") == 3
