"""`ingot.evaluate`: on a directory and on a served model, interrupted and resumed."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ingot
from ingot.core.errors import ConfigError, DataError, IngotError
from ingot.evaluation import answer
from ingot.workflows import evaluate as workflow
from ingot.workflows.evaluate import EvalReport
from ingot.workflows.llm import LLM
from ingot.workflows.local_model import LocalModel
from tests import models
from tests.serving.conftest import Served, serving

TEXTS = ["Hello world", "The quick brown fox", "é", "ab" * 40, "\N{CHOCOLATE BAR} bar"]
ANSWERS = [{"prompt": f"{n} plus {n} is", "answer": str(2 * n)} for n in range(12)]
CHATS = [{"prompt": [{"role": "user", "content": f"Say {n}"}], "answer": "x"} for n in range(4)]
CHOICES = [
    {"prompt": f"The number {n} is", "choices": ["odd", "even", "not a number"], "answer": n % 2}
    for n in range(8)
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.small(tmp_path_factory.mktemp("model") / "small")


@pytest.fixture(scope="module")
def served(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(directory, tmp_path_factory.mktemp("server"), "--max-requests", "8") as made:
        yield made


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's directory of results."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path / "data"


def write(folder: Path, rows: list[Any], name: str = "task.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def samples(report: EvalReport) -> list[dict[str, Any]]:
    lines = Path(report.directory, "samples.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_perplexity_is_that_of_score(directory: Path, tmp_path: Path) -> None:
    llm = LLM(directory)
    report = ingot.evaluate(write(tmp_path, [{"text": text} for text in TEXTS]), directory)
    scores = [llm.score(text) for text in TEXTS]
    found = samples(report)
    assert [one["logprob"] for one in found] == [score.logprob for score in scores]
    total = sum(score.logprob for score in scores)
    count = sum(len(score.logprobs) for score in scores)
    assert report.metrics["perplexity"].value == math.exp(-total / count)
    assert report.num_tokens == count
    # A token is a byte: "é" begins with the first of its two bytes, which is not a text.
    sizes = [len(text.encode()) - 1 for text in TEXTS]
    assert [one["num_bytes"] for one in found][:2] == sizes[:2]
    assert [one["num_bytes"] for one in found][2] == sizes[2] + 1


def test_a_text_longer_than_the_context_is_scored_in_windows(
    directory: Path, tmp_path: Path
) -> None:
    llm = LLM(directory)
    text = "".join(chr(97 + n * n % 26) for n in range(700))
    size = llm.max_seq_len - 1
    (found,) = samples(ingot.evaluate(write(tmp_path, [{"text": text}]), directory))
    ids, expected = llm.tokenizer.encode(text), list[float]()
    for start, stop, count in ((0, size, size - 1), (size - 1, 2 * size - 1, size - 1)):
        expected += llm.score(ids[start:stop]).logprobs[-count:]
    expected += llm.score(ids[-size:]).logprobs[2 * size - 1 - len(ids) :]
    assert found["num_tokens"] == len(expected) == 699
    assert found["logprob"] == math.fsum(expected)


def test_answers_are_those_of_generate(directory: Path, tmp_path: Path) -> None:
    llm, path = LLM(directory), write(tmp_path, [*ANSWERS, *CHATS])
    report = ingot.evaluate(path, directory, max_tokens=5)
    prompts = [row["prompt"] for row in ANSWERS]
    expected = [one.text for one in llm.generate(prompts, max_tokens=5)]
    expected += [llm.chat(row["prompt"], max_tokens=5).text for row in CHATS]  # type: ignore
    found = samples(report)
    assert [one["output"] for one in found] == expected
    assert [one["line"] for one in found] == list(range(1, 17))
    assert report.metrics["exact_match"].value == 0.0
    assert (report.num_truncated, report.num_tokens, report.complete) == (16, 80, True)


def test_a_correct_answer_is_found_by_expression_and_by_text(
    directory: Path, tmp_path: Path
) -> None:
    outputs = [
        c.text for c in LLM(directory).generate([r["prompt"] for r in ANSWERS], max_tokens=5)
    ]
    rows = [
        {"prompt": row["prompt"], "answer": ["?", f" {text}\n"] if n % 3 else "?"}
        for n, (row, text) in enumerate(zip(ANSWERS, outputs, strict=True))
    ]
    report = ingot.evaluate(write(tmp_path, rows), directory, max_tokens=5)
    scores = [int(n % 3 > 0) for n in range(12)]
    assert [one["score"] for one in samples(report)] == scores
    assert report.metrics["exact_match"].value == 8 / 12
    last = [{"prompt": row["prompt"], "answer": "x"} for row in ANSWERS]
    header = {"settings": {"extract": "(?s)^.*(.)$", "max_tokens": 5}}
    found = samples(ingot.evaluate(write(tmp_path, [header, *last]), directory))
    assert [one["extracted"] for one in found] == [text[-1] for text in outputs]


def test_pass_at_k_counts_samples_with_their_own_seeds(directory: Path, tmp_path: Path) -> None:
    path = write(tmp_path, ANSWERS)
    settings: dict[str, Any] = {"temperature": 2.0, "max_tokens": 2, "extract": "[a-zA-Z]"}
    report = ingot.evaluate(path, directory, samples=6, **settings)
    assert list(report.metrics) == ["pass@1", "pass@2", "pass@4", "pass@6"]
    found = samples(report)
    assert len(found) == 72
    assert len({one["output"] for one in found}) > 40
    again = ingot.evaluate(path, directory, samples=6, output=tmp_path / "again", **settings)
    assert samples(again) == found
    # More samples continue: the first six are those from before.
    more = ingot.evaluate(path, directory, samples=8, **settings)
    assert more.directory == report.directory
    assert [one for one in samples(more) if one["sample"] < 6] == found


def test_choices_are_scored_after_their_prompt(directory: Path, tmp_path: Path) -> None:
    llm = LLM(directory)
    report = ingot.evaluate(write(tmp_path, CHOICES), directory)
    for row, found in zip(CHOICES, samples(report), strict=True):
        expected = [
            math.fsum(llm.score(f"{row['prompt']} {choice}").logprobs[len(row["prompt"]) - 1 :])
            for choice in row["choices"]
        ]
        assert found["logprobs"] == expected
        assert found["output"] == expected.index(max(expected))
    correct = sum(one["score"] for one in samples(report))
    assert report.metrics["acc"].value == correct / 8
    chat = ingot.evaluate(write(tmp_path, CHOICES), directory, chat=True)
    ids = llm.apply_chat_template([{"role": "user", "content": CHOICES[0]["prompt"]}])
    scored = llm.score([*ids, *llm.tokenizer.encode("odd")]).logprobs[-3:]
    assert samples(chat)[0]["logprobs"][0] == math.fsum(scored)


@pytest.mark.parametrize("rows", [[{"text": text} for text in TEXTS], CHOICES, [*ANSWERS, *CHATS]])
def test_a_server_gives_the_same_digits(
    directory: Path, served: Served, tmp_path: Path, rows: list[Any]
) -> None:
    """With more requests under way than the server admits: it rejects some with 429."""
    path = write(tmp_path, rows)
    generated = "answer" in rows[0] and "choices" not in rows[0]
    settings = {"samples": 3, "temperature": 1.5, "max_tokens": 6} if generated else {}
    local = ingot.evaluate(path, directory, **settings)
    before = served.metric("ingot:http_responses_total", status="429")
    remote = ingot.evaluate(path, served.url, concurrency=12, **settings)
    if generated:
        assert served.metric("ingot:http_responses_total", status="429") > before
    assert samples(remote) == samples(local)
    assert remote.metrics == local.metrics
    assert remote.model == {"url": f"{served.url}/v1", "name": "small"}


def test_rows_that_are_done_are_not_computed_again(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, computed = write(tmp_path, ANSWERS), list[int]()
    first = ingot.evaluate(path, directory, limit=5, max_tokens=3)
    assert (first.num_rows, first.num_samples, first.complete) == (5, 5, True)
    generate = LocalModel.generate

    def counted(self: LocalModel, requests: Any) -> Any:
        for request, output in generate(self, requests):
            computed.append(request.row.line)
            yield request, output

    monkeypatch.setattr(LocalModel, "generate", counted)
    whole = ingot.evaluate(path, directory, max_tokens=3)
    assert sorted(computed) == list(range(6, 13))
    assert whole.directory == first.directory
    assert samples(whole)[:5] == samples(ingot.evaluate(path, directory, limit=5, max_tokens=3))[:5]
    assert ingot.evaluate(path, directory, limit=5, max_tokens=3).num_samples == 5
    assert len(computed) == 7
    # Another expression only scores again.
    other = ingot.evaluate(path, directory, max_tokens=3, extract="(?s).")
    assert len(computed) == 7
    assert other.directory == whole.directory
    assert all(len(one["extracted"]) == 1 for one in samples(other))


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_what_was_computed_is_kept_and_continued(
    directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException],
) -> None:
    path = write(tmp_path, ANSWERS)
    expected = samples(ingot.evaluate(path, directory, output=tmp_path / "whole", max_tokens=4))
    generate = LocalModel.generate

    def broken(self: LocalModel, requests: Any) -> Any:
        for number, found in enumerate(generate(self, requests)):
            if number == 7:
                raise error
            yield found

    with monkeypatch.context() as patch:
        patch.setattr(LocalModel, "generate", broken)
        with pytest.raises(error):
            ingot.evaluate(path, directory, output=tmp_path / "out", max_tokens=4)
    results = json.loads((tmp_path / "out/results.json").read_text())
    assert (results["complete"], results["num_samples"], results["num_rows"]) == (False, 7, 12)
    assert results["metrics"]["exact_match"]["value"] == 0.0
    with (tmp_path / "out/samples.jsonl").open("ab") as file:
        file.write(b'{"line": 1')  # a process that was killed while it wrote
    report = ingot.evaluate(path, directory, output=tmp_path / "out", max_tokens=4)
    assert report.complete
    assert samples(report) == expected


def test_results_say_what_was_evaluated(directory: Path, tmp_path: Path) -> None:
    path = write(tmp_path, [{"text": "Hello"}])
    report = ingot.evaluate(path, directory)
    stored = json.loads(Path(report.directory, "results.json").read_text())
    assert stored["task"] == {
        "file": "task.jsonl",
        "sha256": report.task["sha256"],
        "kind": "perplexity",
        "num_rows": 1,
    }
    assert stored["model"]["name"] == "small"
    assert len(stored["model"]["sha256"]) == 64
    assert stored["model"]["lineage"] == []
    assert stored["settings"]["max_tokens"] == 256
    assert set(stored["versions"]) == {"ingot", "torch"}
    assert stored["metrics"]["perplexity"]["stderr"] is None


def test_results_of_another_evaluation_are_not_mixed(directory: Path, tmp_path: Path) -> None:
    path, output = write(tmp_path, ANSWERS), tmp_path / "out"
    ingot.evaluate(path, directory, output=output, max_tokens=2)
    with pytest.raises(DataError, match="another evaluation: settings differ"):
        ingot.evaluate(path, directory, output=output, max_tokens=3)
    with pytest.raises(DataError, match="another evaluation: task differ"):
        ingot.evaluate(write(tmp_path, ANSWERS[:3]), directory, output=output, max_tokens=2)
    other = shutil.copytree(directory, tmp_path / "other")
    settings = json.loads((other / "tokenizer_config.json").read_text())
    settings["chat_template"] += " "
    (other / "tokenizer_config.json").write_text(json.dumps(settings))
    write(tmp_path, ANSWERS)
    with pytest.raises(DataError, match="another evaluation: model differ"):
        ingot.evaluate(path, other, output=output, max_tokens=2)
    moved = shutil.copytree(directory, tmp_path / "moved/small")
    assert ingot.evaluate(path, moved, output=output, max_tokens=2).complete
    with pytest.raises(DataError, match="has other files"):
        ingot.evaluate(path, directory, output=tmp_path)


def test_an_expression_that_hangs_loses_no_output(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer, "SECONDS", 0.3)
    path, output = write(tmp_path, ANSWERS), tmp_path / "out"
    with pytest.raises(ConfigError, match=r"line 1: extract: .* does not finish") as error:
        ingot.evaluate(
            path, directory, output=output, max_tokens=60, extract=r"(?s)(.*.*.*.*.*)*\0"
        )
    assert "outputs are kept" in error.value.hint
    monkeypatch.setattr(LocalModel, "generate", None)
    assert ingot.evaluate(path, directory, output=output, max_tokens=60, extract="a").complete


def test_errors_come_before_the_model_computes(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workflow.SampleFile, "append", None)
    long = write(tmp_path, [*ANSWERS, {"prompt": "x" * 300, "answer": "y"}])
    with pytest.raises(DataError, match=r"line 13: prompt has 300 tokens, and .* 256"):
        ingot.evaluate(long, directory)
    choice = {"prompt": "x" * 260, "choices": ["a", "b"], "answer": 0}
    with pytest.raises(DataError, match="line 9: prompt with choice has 262 tokens"):
        ingot.evaluate(write(tmp_path, [*CHOICES, choice]), directory)
    with pytest.raises(DataError, match="line 2: at least 2 tokens have to be scored, got 1"):
        ingot.evaluate(write(tmp_path, [{"text": "ab"}, {"text": "a"}]), directory)
    bad = write(tmp_path, [{"prompt": [{"role": 1}], "answer": "y"}])
    with pytest.raises(DataError, match="line 1: prompt: each message must have a role"):
        ingot.evaluate(bad, directory)
    path = write(tmp_path, ANSWERS)
    with pytest.raises(ConfigError, match="extract: '\\('"):
        ingot.evaluate(path, directory, extract="(")
    with pytest.raises(ConfigError, match="limit"):
        ingot.evaluate(path, directory, limit=0)
    with pytest.raises(IngotError, match="not found"):
        ingot.evaluate(path, tmp_path / "missing")


def test_a_context_error_of_the_server_names_the_row(served: Served, tmp_path: Path) -> None:
    path = write(tmp_path, [{"prompt": "x" * 300, "answer": "y"}])
    with pytest.raises(DataError, match="line 1: the server answers 400: the prompt has 300"):
        ingot.evaluate(path, served.url)


def test_the_default_directory_depends_on_all_that_changes_samples(
    directory: Path, data: Path, tmp_path: Path
) -> None:
    path = write(tmp_path, ANSWERS[:2])
    changes: list[dict[str, Any]] = [{}, {"seed": 1}, {"extract": "a"}, {"top_p": 0.5}]
    reports = [ingot.evaluate(path, directory, max_tokens=2, **change) for change in changes]
    names = [Path(report.directory).name for report in reports]
    assert len(set(names)) == 3
    assert names[0] == names[2]
    assert all(name.startswith("task-small-") for name in names)
    assert set(os.listdir(data / "ingot/evals")) >= set(names)


@pytest.mark.slow
def test_smollm2_has_the_perplexity_of_its_scores(smollm2: Path, tmp_path: Path) -> None:
    texts = ["The capital of France is Paris.", "Once upon a time, there was a little girl."]
    report = ingot.evaluate(write(tmp_path, [{"text": text} for text in texts]), smollm2)
    scores = [LLM(smollm2).score(text) for text in texts]
    total, count = sum(s.logprob for s in scores), sum(len(s.logprobs) for s in scores)
    assert report.metrics["perplexity"].value == math.exp(-total / count)
    assert 5 < report.metrics["perplexity"].value < 20
