from __future__ import annotations

from pathlib import Path

import pytest

from tools import readme


def test_blocks_are_found_and_installing_is_left_out() -> None:
    text = (
        "a\n```bash\npip install x\ningot ops\n```\nb\n```python\nprint(1)\n```\n```text\nno\n```\n"
    )
    assert readme.blocks(text) == [("bash", "ingot ops\n"), ("python", "print(1)\n")]


def test_the_readme_has_commands_of_both_kinds() -> None:
    assert {language for language, _ in readme.blocks(readme.README.read_text())} == {
        "bash",
        "python",
    }


@pytest.mark.parametrize(
    ("block", "failures"),
    [
        ("```bash\ntrue\n```", 0),
        ("```bash\nfalse\ntrue\n```", 1),
        ("```bash\nfalse | true\n```", 1),
        ("```python\nraise SystemExit(3)\n```", 1),
    ],
)
def test_a_command_that_fails_is_counted(
    block: str, failures: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "README.md").write_text(block)
    monkeypatch.setattr(readme, "README", tmp_path / "README.md")
    assert readme.main() == failures
