from __future__ import annotations

from tools import syntax


def test_a_text_is_parsed_once_until_it_is_forgotten() -> None:
    tree = syntax.parse("x = 1")
    assert syntax.parse("x = 1") is tree
    assert syntax.nodes("x = 1")[0] is tree
    syntax.forget()
    assert syntax.parse("x = 1") is not tree
