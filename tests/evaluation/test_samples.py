"""The file of samples survives what stops its process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ingot.core.errors import DataError
from ingot.evaluation.samples import Sample, SampleFile


def sample(line: int, number: int = 0, **fields: object) -> Sample:
    return {"line": line, "sample": number, **fields}


def test_samples_are_kept_and_read_in_order(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    with SampleFile(path) as file:
        for line, number in ((2, 1), (1, 0), (2, 0)):
            file.append(sample(line, number))
        assert ((2, 1) in file, (1, 1) in file, len(file)) == (True, False, 3)
    with SampleFile(path) as file:
        assert [(one["line"], one["sample"]) for one in file] == [(1, 0), (2, 0), (2, 1)]
        file.rewrite(lambda one: {**one, "score": one["line"]})
        file.append(sample(0))
        assert [one.get("score") for one in file] == [None, 1, 2, 2]
    assert [json.loads(line)["line"] for line in path.read_text().splitlines()] == [1, 2, 2, 0]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.text(), min_size=1, max_size=8), data=st.data())
def test_a_file_cut_anywhere_has_the_samples_before(
    tmp_path: Path, texts: list[str], data: st.DataObject
) -> None:
    path = tmp_path / "samples.jsonl"
    path.unlink(missing_ok=True)
    with SampleFile(path) as file:
        for line, text in enumerate(texts):
            file.append(sample(line, text=text.encode("utf-8", "replace").decode()))
    content = path.read_bytes()
    cut = data.draw(st.integers(0, len(content)))
    path.write_bytes(content[:cut])
    complete = content[:cut].count(b"\n")
    with SampleFile(path) as file:
        assert [one["line"] for one in file] == list(range(complete))
        file.append(sample(99))
    with SampleFile(path) as file:
        assert [one["line"] for one in file] == [*range(complete), 99]


def test_another_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text('{"name": "x"}\n')
    with pytest.raises(DataError, match="line 1 is not a sample"):
        SampleFile(path)
    assert path.read_text() == '{"name": "x"}\n'
