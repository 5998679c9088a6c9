from __future__ import annotations

from types import SimpleNamespace

from ingot import ops
from tools import catalogue


def test_every_op_stands_on_the_page_with_its_reference() -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="ops.md"))
    text = catalogue.on_page_markdown(f"# Ops\n{catalogue.PLACE}", page)
    for name in ops.registry():
        assert f"### {name}\n" in text
        assert f"def {name}(" in text


def test_other_pages_are_left_alone() -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="index.md"))
    assert catalogue.on_page_markdown(catalogue.PLACE, page) == catalogue.PLACE
