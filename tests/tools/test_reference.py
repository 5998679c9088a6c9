"""The generated reference pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from ingot.cli import SUMMARIES
from ingot.training.recipe import Recipe
from tools import reference

DOCS = reference.PACKAGE.parent / "docs"


def test_every_variable_of_the_package_is_documented() -> None:
    named: set[str] = set()
    for path in reference.PACKAGE.rglob("*.py"):
        named |= reference.variables_in(path.read_text())
    assert named <= set(reference.VARIABLES)


@pytest.mark.parametrize(("page", "render"), reference.PAGES.items())
def test_a_page_has_the_marker_that_its_content_replaces(page: str, render: object) -> None:
    assert (DOCS / page).read_text().count(reference.MARKER) == 1


def test_the_recipe_page_has_every_key_with_its_meaning() -> None:
    text = reference.render_recipe()
    for key in ("`steps`", "`optimizer.lr`", "`model.vocab_size`", "`clip.max_norm`"):
        assert key in text
    undocumented = [line for line in text.splitlines() if line.endswith("|  |")]
    assert len(undocumented) <= MAX_UNDOCUMENTED, undocumented


MAX_UNDOCUMENTED = 0


def test_the_command_page_has_every_command_and_its_options() -> None:
    text = reference.render_commands()
    for verb in SUMMARIES:
        assert f"## ingot {verb}" in text
    assert "--max-tokens" in text
    assert "### ingot bench ops" in text


def test_the_metrics_page_has_vllm_and_ingot_metrics() -> None:
    text = reference.render_metrics()
    assert "| `vllm:time_to_first_token_seconds` | histogram |" in text
    assert "| `vllm:generation_tokens_total` | counter |" in text
    assert "| `ingot:engine_up` | gauge |" in text


def test_field_docs_are_the_strings_below_the_fields(tmp_path: Path) -> None:
    docs = reference.field_docs(Recipe)
    assert set(docs) <= set(Recipe.__dataclass_fields__)
    assert len(docs) > 5
