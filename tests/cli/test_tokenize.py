from __future__ import annotations

import json
import subprocess
from pathlib import Path

from ingot.data import TokenDataset
from tests.cli.conftest import Run


def write(path: Path) -> None:
    lines = [json.dumps({"body": f"post {i}: hello\n" * (i % 5 + 1)}) for i in range(40)]
    path.write_text("\n".join(lines))


def test_text_output(cli: Run, tmp_path: Path) -> None:
    write(tmp_path / "posts.jsonl")
    command = ("tokenize", "posts.jsonl", "tokens", "--field", "body", "--vocab-size", "300")
    result = cli(*command)
    assert result.returncode == 0, result.stderr
    corpus = TokenDataset(tmp_path / "tokens")
    assert corpus.hash in result.stdout
    assert "40 documents" in result.stdout
    assert "vocabulary 300" in result.stdout
    assert "written" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    again = cli(*command)
    assert "up to date" in again.stdout


def test_json_output(cli: Run, tmp_path: Path) -> None:
    write(tmp_path / "posts.jsonl")
    options = ("--field", "body", "--vocab-size", "257", "--validation", "0.25", "--json")
    found = json.loads(cli("tokenize", "posts.jsonl", "tokens", *options).stdout)
    corpus = TokenDataset(tmp_path / "tokens")
    assert found["new"] is True
    assert found["hash"] == corpus.hash
    assert found["tokens"] == len(corpus.train) + len(corpus.validation)
    # The vocabulary is the bytes and EOS: one token per byte, and one more per document.
    assert found["tokens"] == found["text_bytes"] + found["documents"] == found["text_bytes"] + 40
    assert found["tokens_per_byte"] == round(found["tokens"] / found["text_bytes"], 4)
    assert found["bytes"] == sum(p.stat().st_size for p in (tmp_path / "tokens").iterdir())


def test_tokenizer_of_a_model_is_used(cli: Run, tmp_path: Path, tiny: Path) -> None:
    write(tmp_path / "posts.jsonl")
    options = ("--field", "body", "--tokenizer", str(tiny), "--json")
    found = json.loads(cli("tokenize", "posts.jsonl", "tokens", *options).stdout)
    assert found["vocab_size"] == 256
    assert found["tokens"] == found["text_bytes"]


def test_missing_source_has_a_hint(cli: Run) -> None:
    result = cli("tokenize", "missing.txt", "tokens")
    assert result.returncode == 2
    assert "hint: name a text" in result.stderr
    assert "Traceback" not in result.stderr


def test_torch_and_transformers_are_not_imported(tmp_path: Path) -> None:
    import sys

    write(tmp_path / "posts.jsonl")
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from ingot.cli.tokenize import tokenize\n"
        "tokenize('posts.jsonl', Path('tokens'), field='body', vocab_size=300)\n"
        "assert not {'torch', 'transformers', 'pyarrow', 'sklearn'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True)
