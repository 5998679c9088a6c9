"""`ingot tokenize --show`: samples with the tokens that are trained."""

from __future__ import annotations

from pathlib import Path

from ingot.core import config
from tests.cli.conftest import Run
from tests.workflows import chats


def test_samples_of_a_recipe(cli: Run, tmp_path: Path) -> None:
    config.save(chats.recipe(tmp_path), tmp_path / "recipe.toml")
    found = cli("tokenize", "recipe.toml", "--show", "2")
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("«") == found.stdout.count("»") >= 2
    assert "<|im_start|>assistant\n«" in found.stdout
    assert "<|im_end|>»" in found.stdout
    assert "sample 2, " in found.stdout
    assert "chats.jsonl: line" in found.stdout
    assert found.stdout.splitlines()[-1].startswith("2 samples, ")
    assert "trained (" in found.stdout.splitlines()[-1]


def test_trained_tokens_have_a_colour_in_a_terminal(cli: Run, tmp_path: Path) -> None:
    chats.recipe(tmp_path)
    options = ("--tokenizer", "tokenizer", "--show", "1")
    found = cli("tokenize", "chats.jsonl", *options, FORCE_COLOR="1")
    assert "\x1b[32m" in found.stdout
    assert "«" not in found.stdout
    assert "«" in cli("tokenize", "chats.jsonl", *options, FORCE_COLOR="1", NO_COLOR="1").stdout


def test_control_characters_are_escaped(cli: Run, tmp_path: Path) -> None:
    chats.recipe(tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"text": "a \\u001b[2J b"}')
    found = cli("tokenize", "bad.jsonl", "--tokenizer", "tokenizer", "--show", "1")
    assert "\\x1b[2J" in found.stdout
    assert "\x1b" not in found.stdout


def test_errors_have_hints(cli: Run, tmp_path: Path) -> None:
    chats.recipe(tmp_path)
    (tmp_path / "xor.toml").write_text(
        'name = "xor"\nsteps = 1\nglobal_batch_size = 1\n[data]\nkind = "xor"\n'
        "[model]\nin_features = 2\nhidden_dims = []\nout_features = 2\n"
    )
    for arguments, message in [
        (("chats.jsonl", "--show", "1"), "--tokenizer: needed"),
        (("xor.toml", "--show", "1"), "has no loss mask to show"),
        (("chats.jsonl", "--tokenizer", "tokenizer", "--show", "0"), "--show: must be from 1"),
        (("chats.jsonl",), "DST: missing"),
    ]:
        found = cli("tokenize", *arguments)
        assert found.returncode == 2
        assert message in " ".join(found.stderr.split())
        assert "hint: " in found.stderr
