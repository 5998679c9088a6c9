"""A planted duplicate, a long function and a long file are found."""

from __future__ import annotations

from pathlib import Path

from tools import structure

LONG = "def f():\n" + "    pass\n" * structure.MAX_FUNCTION


def test_a_class_name_that_is_used_twice_is_found() -> None:
    sources = {
        Path("a.py"): "class Plan: ...\nclass _Local: ...",
        Path("b.py"): "class Other: ...\nclass Plan: ...\nclass _Local: ...",
    }
    assert structure.duplicate_classes(sources) == ["Plan: a.py:1, b.py:2"]


def test_a_long_function_is_found_unless_the_file_says_why() -> None:
    assert structure.long_functions(Path("a.py"), LONG)
    assert not structure.long_functions(Path("a.py"), LONG.replace("    pass\n", "", 1))
    assert not structure.long_functions(Path("a.py"), f"# Long because of a table.\n{LONG}")


def test_a_long_file_is_found_unless_it_says_why(tmp_path: Path) -> None:
    long, short, explained = (tmp_path / name for name in ("a.h", "b.py", "c.cpp"))
    long.write_text("x\n" * (structure.MAX_FILE + 1))
    short.write_text("x\n" * structure.MAX_FILE)
    explained.write_text("// Tables.\n// Long because it is one table.\n" + long.read_text())
    found = structure.long_files([long, short, explained])
    assert found == [f"{long}: 601 lines, more than 600"]


def test_a_reason_far_below_the_top_does_not_count() -> None:
    assert not structure.explains_length("\n" * structure.HEAD + "# Long because\n")
