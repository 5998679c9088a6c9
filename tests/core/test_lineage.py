from __future__ import annotations

import json
from pathlib import Path

import pytest

import ingot
from ingot.core import lineage
from ingot.core.errors import IngotError


def test_steps_are_kept_in_order_with_date_and_version(tmp_path: Path) -> None:
    assert lineage.read(tmp_path).steps == ()
    lineage.append(tmp_path, "import", source="model.gguf", size=5)
    lineage.append(tmp_path, "quantize", bits=4)
    first, second = lineage.read(tmp_path).steps
    assert (first["step"], first["source"], first["size"]) == ("import", "model.gguf", 5)
    assert (second["step"], second["bits"]) == ("quantize", 4)
    assert first["ingot"] == ingot.__version__
    assert first["date"].startswith("20")
    assert [path.name for path in tmp_path.iterdir()] == ["ingot.json"]
    written = json.loads((tmp_path / "ingot.json").read_text())
    assert written == {"format": 1, "steps": [first, second]}


def test_facts_of_unknown_steps_survive(tmp_path: Path) -> None:
    step = {"step": "from the future", "deep": {"a": [1, None, "é"]}}
    (tmp_path / "ingot.json").write_text(json.dumps({"format": 1, "steps": [step]}))
    assert lineage.append(tmp_path, "import").steps[0] == step
    assert lineage.read(tmp_path).steps[0] == step


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot read"),
        (b"{", "cannot read"),
        (b"\xff", "cannot read"),
        (b"[]", "cannot read"),
        (b"[" * 100_000, "cannot read"),
        (b'{"format": 1, "steps": 5}', "cannot read"),
        (b'{"format": 1, "steps": [{}]}', "each with a name"),
        (b'{"format": 1, "steps": [{"step": 5}]}', "each with a name"),
        (b'{"format": 1, "steps": [' + b'{"step":"a"},' * 1000 + b'{"step":"a"}]}', "at most 1000"),
        (b'{"format": 2, "steps": []}', "expected format 1, got 2"),
        (b" " * (lineage.MAX_BYTES + 1), "expected at most 1,048,576 bytes"),
    ],
    ids=range(11),
)
def test_what_is_not_a_lineage_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "ingot.json").write_bytes(content)
    with pytest.raises(IngotError, match=message) as raised:
        lineage.read(tmp_path)
    assert raised.value.hint
    assert (tmp_path / "ingot.json").read_bytes() == content


def test_a_file_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "ingot.json").mkdir()
    with pytest.raises(IngotError, match="Is a directory"):
        lineage.read(tmp_path)


def test_it_does_not_grow_without_end(tmp_path: Path) -> None:
    lineage.append(tmp_path, "import")
    before = (tmp_path / "ingot.json").read_bytes()
    with pytest.raises(IngotError, match="expected at most 1000 steps"):
        lineage.append(tmp_path, "import", note="a" * lineage.MAX_BYTES)
    assert (tmp_path / "ingot.json").read_bytes() == before
