"""A model directory under evaluation: rows are read lazily, and the engine is kept full."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ingot.core.errors import DataError, IngotError
from ingot.evaluation.model import SampleRequest
from ingot.evaluation.task import AnswerRow, EvalTask, PerplexityRow
from ingot.interop import hf
from ingot.workflows.local_model import LocalModel, encode_choice
from tests import adapters, models


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.small(tmp_path_factory.mktemp("model") / "small")


def model(directory: Path, folder: Path, row: Any, **settings: Any) -> LocalModel:
    path = folder / "task.jsonl"
    path.write_text(json.dumps(row) + "\n")
    return LocalModel(task=EvalTask.read(path, settings), model=str(directory))


def test_the_model_is_loaded_when_it_computes(directory: Path, tmp_path: Path) -> None:
    local = model(directory, tmp_path, {"text": "abc"})
    described = local.describe()
    assert (described["name"], described["device"]) == ("small", local._device.type)
    assert "llm" not in vars(local)
    local.check(local.task.rows())
    assert "llm" in vars(local)


def test_an_adapter_is_evaluated_and_described(directory: Path, tmp_path: Path) -> None:
    adapter = adapters.save(hf.load(directory), tmp_path / "adapter", seed=1)
    base = model(directory, tmp_path, {"text": "Hello world"})
    adapted = LocalModel(task=base.task, model=str(directory), adapter=adapter)
    row = PerplexityRow(1, "Hello world")
    scores = [next(local.score_texts(iter([row])))[1] for local in (base, adapted)]
    assert scores[1].logprob == adapted.llm.score("Hello world", adapter="adapter").logprob
    assert scores[0].logprob != scores[1].logprob
    described = adapted.describe()
    assert described.pop("adapter")
    assert described == base.describe()
    with pytest.raises(IngotError, match="adapter_config"):
        LocalModel(task=base.task, model=str(directory), adapter=directory)


def test_rows_are_read_as_the_engine_gets_to_them(directory: Path, tmp_path: Path) -> None:
    local = model(directory, tmp_path, {"text": "abc"}, max_tokens=2)
    max_active, taken = 2 * local.llm.engine.config.max_num_seqs, list[int]()
    count = 3 * max_active

    def rows() -> Iterator[PerplexityRow]:
        for line in range(count):
            taken.append(line)
            yield PerplexityRow(line, "ab" * (1 + line % 5))

    sizes, done = list[int](), 0
    local.llm.engine.on_step = lambda plan, seconds: sizes.append(len(plan.scheduled))
    for _ in local.score_texts(rows()):
        assert len(taken) - done <= max_active + 1
        done += 1
    assert done == count
    # All but the last steps have as many requests as run together.
    full = local.llm.engine.config.max_num_seqs
    assert [size for size in sizes[:-2] if size < full] == []

    def requests() -> Iterator[SampleRequest]:
        return (SampleRequest(AnswerRow(n, "ab", ("x",)), 0, n) for n in range(count))

    lines = [request.row.line for request, _ in local.generate(requests())]
    assert sorted(lines) == list(range(count))


def test_a_choice_without_tokens_of_its_own_is_an_error(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"prompt": "a", "choices": ["b", "c"], "answer": 0}
    local = model(directory, tmp_path, row)
    assert encode_choice(local.llm, "ab ", " ", "cd")[1] == 2
    monkeypatch.setattr("ingot.workflows.local_model.encode_choice", lambda *_: ([1, 2], 2))
    with pytest.raises(DataError, match="line 1: choice 'b' has no tokens of its own"):
        local.check(local.task.rows())


def test_an_error_of_the_chat_template_names_the_row(directory: Path, tmp_path: Path) -> None:
    row = {"prompt": [{"role": "user", "content": "x" * 20_000_000}], "answer": "b"}
    local = model(directory, tmp_path, row)
    with pytest.raises(DataError, match="line 1: the messages have 20,"):
        local.check(local.task.rows())
