from __future__ import annotations

from tools.examples import fenced


def test_every_example_is_fenced_and_text_is_left_alone() -> None:
    text = "One.\n\n>>> a\n1\n\nTwo.\n\n>>> b\n>>> c\n3\n"
    expected = "One.\n\n```pycon\n>>> a\n1\n```\n\nTwo.\n\n```pycon\n>>> b\n>>> c\n3\n```\n"
    assert fenced(text) == expected
