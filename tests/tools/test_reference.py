"""The generated reference pages."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from ingot.cli import SUMMARIES
from ingot.training.recipe import Recipe
from tools import reference

ROOT = reference.PACKAGE.parent
DOCS = ROOT / "docs"
WRITTEN = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
_PATH = re.compile(
    r"(?<![\w/])(?:benchmarks|docs|examples|ingot|recipes|tests|tools)/[\w/-]+\.[a-z]+\b"
)
_CODE = re.compile(r"^```(?:bash|console)\n(.*?)^```|`([^`\n]+)`", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"^(?:\$ )?ingot ([a-z][^#\n]*)", re.MULTILINE)
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9.-]*")


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


def undocumented_options(text: str, commands: str) -> list[str]:
    """List the commands of a text with an option that `commands`, their help, does not have."""
    sections = dict(re.findall(r"^##+ ingot ([^\n]+)\n(.*?)(?=^##|\Z)", commands, re.M | re.S))
    unknown: list[str] = []
    code = "\n".join(block or inline for block, inline in _CODE.findall(text))
    for line in map(str.strip, _COMMAND.findall(code)):
        names = [n for n in sections if f"{line} ".startswith(f"{n} ")]
        known = _OPTION.findall(sections[max(names, key=len)]) if names else []
        unknown += [f"ingot {line}"] * (not names or not set(_OPTION.findall(line)) <= set(known))
    return unknown


def test_undocumented_options_are_found() -> None:
    commands = "## ingot info\n--json\n\n## ingot bench\n\n### ingot bench ops\n--plot FILE\n"
    good = "```bash\ningot info DIR --json  # --x\n```\nand `ingot bench ops --plot a.png`"
    assert undocumented_options(good, commands) == []
    bad = "```bash\ningot info --plot\n$ ingot inspect\n```"
    assert undocumented_options(bad, commands) == ["ingot info --plot", "ingot inspect"]


def test_pages_name_existing_commands_and_options() -> None:
    commands = reference.render_commands()
    for path in WRITTEN:
        assert undocumented_options(path.read_text(), commands) == [], path


def test_pages_name_existing_files() -> None:
    for path in WRITTEN:
        named = set(_PATH.findall(path.read_text()))
        assert not {name for name in named if not (ROOT / name).exists()}, path


_MODULE = re.compile(
    r"^::: ([\w.]+)\n(?:    options:\n(?:      .*\n)*?      members: \[(.*?)\])?", re.M
)


def test_pages_document_existing_names() -> None:
    """mkdocs omits a name that is missing or imported from another module without a warning."""
    for path in WRITTEN:
        for module, members in _MODULE.findall(path.read_text()):
            source = importlib.import_module(module)
            for name in members.split(", ") if members else ():
                assert hasattr(source, name), f"{path}: {module}.{name}"
                home = getattr(getattr(source, name), "__module__", module)
                assert home == module, f"{path}: {name} is in {home}, not in {module}"


def test_the_metrics_page_has_vllm_and_ingot_metrics() -> None:
    text = reference.render_metrics()
    assert "| `vllm:time_to_first_token_seconds` | histogram |" in text
    assert "| `vllm:generation_tokens_total` | counter |" in text
    assert "| `ingot:engine_up` | gauge |" in text


def test_field_docs_are_the_strings_below_the_fields(tmp_path: Path) -> None:
    docs = reference.field_docs(Recipe)
    assert set(docs) <= set(Recipe.__dataclass_fields__)
    assert len(docs) > 5
