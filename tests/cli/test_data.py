from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

from ingot.data import Corpus

Run = Callable[..., subprocess.CompletedProcess[str]]


def write(path: Path) -> None:
    lines = [json.dumps({"body": f"post {i}: hello\n" * (i % 5 + 1)}) for i in range(40)]
    path.write_text("\n".join(lines))


def test_lines_for_people(ingot: Run, tmp_path: Path) -> None:
    write(tmp_path / "posts.jsonl")
    command = ("data", "posts.jsonl", "tokens", "--field", "body", "--vocab", "300")
    result = ingot(*command)
    assert result.returncode == 0, result.stderr
    corpus = Corpus(tmp_path / "tokens")
    assert corpus.hash in result.stdout
    assert "40 documents" in result.stdout
    assert "of 300 kinds" in result.stdout
    assert "written" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    again = ingot(*command)
    assert "was there already" in again.stdout


def test_json_has_the_figures(ingot: Run, tmp_path: Path) -> None:
    write(tmp_path / "posts.jsonl")
    options = ("--field", "body", "--vocab", "257", "--validation", "0.25", "--json")
    found = json.loads(ingot("data", "posts.jsonl", "tokens", *options).stdout)
    corpus = Corpus(tmp_path / "tokens")
    assert found["new"] is True
    assert found["hash"] == corpus.hash
    assert found["tokens"] == len(corpus.train) + len(corpus.validation)
    # The vocabulary is the bytes and the end: each byte a token, each document one more.
    assert found["tokens"] == found["text_bytes"] + found["documents"] == found["text_bytes"] + 40
    assert found["tokens_per_byte"] == round(found["tokens"] / found["text_bytes"], 4)
    assert found["bytes"] == sum(p.stat().st_size for p in (tmp_path / "tokens").iterdir())


def test_a_models_tokenizer(ingot: Run, tmp_path: Path, tiny: Path) -> None:
    write(tmp_path / "posts.jsonl")
    options = ("--field", "body", "--tokenizer", str(tiny), "--json")
    found = json.loads(ingot("data", "posts.jsonl", "tokens", *options).stdout)
    assert found["vocabulary"] == 256
    assert found["tokens"] == found["text_bytes"]


def test_a_wrong_source_has_a_hint(ingot: Run) -> None:
    result = ingot("data", "missing.txt", "tokens")
    assert result.returncode == 2
    assert "hint: name a text" in result.stderr
    assert "Traceback" not in result.stderr


def test_neither_torch_nor_transformers_is_loaded_to_tokenize(tmp_path: Path) -> None:
    import sys

    write(tmp_path / "posts.jsonl")
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from ingot.cli.data import data\n"
        "data('posts.jsonl', Path('tokens'), field='body', vocab=300)\n"
        "assert not {'torch', 'transformers', 'pyarrow', 'sklearn'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True)
