"""Evaluate a model on a task: perplexity, exact match, pass@k or multiple choice.

    report = ingot.evaluate("capitals.jsonl", "smollm2")
    report.metrics["exact_match"].value
    ingot.evaluate("capitals.jsonl", "http://127.0.0.1:8000", samples=16, temperature=0.8)

`ingot.evaluation.task` describes the files. The results are kept in a directory: `results.json`,
and `samples.jsonl` with every prompt, output and score. An evaluation that was interrupted
continues where it stopped; one that is complete is not computed again.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from ingot.core import log, paths
from ingot.core.errors import ConfigError, DataError
from ingot.evaluation import metric
from ingot.evaluation.answer import Extractor, is_correct
from ingot.evaluation.client import HttpModel
from ingot.evaluation.metric import Estimate, TextScore
from ingot.evaluation.model import EvalModel, SampleRequest
from ingot.evaluation.samples import Sample, SampleFile
from ingot.evaluation.task import AnswerRow, ChoiceRow, EvalTask, PerplexityRow, Row

if TYPE_CHECKING:
    from ingot.workflows.local_model import LocalModel

RESULTS, SAMPLES = "results.json", "samples.jsonl"
FORMAT = 1
_SCORING_SETTINGS = ("extract", "samples")
"""Settings that may change without computing samples again."""
_log = log.logger(__name__)


class EvalReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an evaluation, as `results.json` has it."""

    format: int = FORMAT
    task: dict[str, Any]
    """Name of the file, its SHA-256, kind and number of rows."""
    model: dict[str, Any]
    """SHA-256, lineage, device and dtype of a directory; address and name of a served model."""
    settings: dict[str, Any]
    versions: dict[str, str]
    metrics: dict[str, Estimate]
    num_rows: int
    """Rows that were to be evaluated: all, or those within `limit`."""
    num_samples: int
    """Samples that were computed: one for each row, or `samples` for each."""
    num_tokens: int
    """Tokens that were generated or scored."""
    num_truncated: int = 0
    """Answers that ended because of `max_tokens`."""
    complete: bool
    """Whether all samples of all rows were computed."""
    date: str
    seconds: float
    """Duration of the last run; earlier ones computed the other samples."""
    directory: str = ""
    """Where the results are."""


def evaluate(
    task: Path | str,
    model: Path | str,
    *,
    output: Path | str | None = None,
    limit: int | None = None,
    device: str = "auto",
    adapter: Path | str | None = None,
    model_name: str | None = None,
    key: str | None = None,
    concurrency: int = 32,
    **settings: Any,
) -> EvalReport:
    """Evaluate a model on the rows of a JSONL file.

    Args:
        task: The file; see `ingot.evaluation.task`.
        model: A model directory, `ORG/NAME` on the Hugging Face hub, or the URL of an
            OpenAI-compatible server.
        output: Directory of the results; by default one below `$XDG_DATA_HOME/ingot/evals`, named
            after the task, the model and a hash of everything that the samples depend on.
        limit: Evaluate only the first rows.
        device: Where a model directory is computed: "auto", "cpu", "cuda:1", ...
        adapter: PEFT directory of a LoRA adapter of the model directory. A server selects an
            adapter by its name: `model_name`.
        model_name: Name of the model, if a server has several.
        key: API key of the server.
        concurrency: The most requests to a server at one time.
        settings: Fields of `ingot.evaluation.task.TaskSettings`; they replace those of the file.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit: expected at least 1, got {limit}", hint="raise it")
    checked = EvalTask.read(Path(task), settings)
    if checked.settings.extract is not None:
        Extractor(checked.settings.extract).close()  # an invalid one is an error at once
    target = str(model)
    if target.startswith(("http://", "https://")):
        if adapter is not None:
            raise ConfigError(
                "adapter: a server selects an adapter by its name", hint="name it: --model-name"
            )
        found: EvalModel = HttpModel(
            task=checked, url=target, model_name=model_name, key=key, concurrency=concurrency
        )
    else:
        found = _local_model(checked, target, device, adapter)
    evaluation = _Evaluation(checked, found, output, limit)
    with paths.lock(evaluation.directory):
        return evaluation.run()


def _local_model(task: EvalTask, model: str, device: str, adapter: Path | str | None) -> LocalModel:
    from ingot.workflows.local_model import LocalModel  # imports torch

    path = None if adapter is None else Path(adapter)
    return LocalModel(task=task, model=model, device=device, adapter=path)


class _Evaluation:
    def __init__(
        self, task: EvalTask, model: EvalModel, output: Path | str | None, limit: int | None
    ) -> None:
        self.task, self.model = task, model
        self.limit = limit
        self.num_rows = min(limit or task.num_rows, task.num_rows)
        self.description = self._describe()
        self.directory = self._default_directory() if output is None else Path(output)
        self.begin = time.monotonic()

    def run(self) -> EvalReport:
        """Compute the samples that are missing, then the metrics."""
        if not self._exists():
            self._write(self._report((), {}))
        with SampleFile(self.directory / SAMPLES) as file:
            try:
                self._compute(file)
            except BaseException as error:
                with suppress(Exception):
                    self._finish(file)
                if isinstance(error, KeyboardInterrupt):
                    _log.info("interrupted; the same command continues: %s", self.directory)
                raise
            return self._finish(file)

    def _compute(self, file: SampleFile) -> None:
        wanted = self.num_rows * self._samples
        keys = ((row.line, n) for row in self._rows() for n in range(self._samples))
        missing = wanted - sum(key in file for key in keys)
        if not missing:
            return
        with log.progress("loading", wanted) as bar:
            bar.advance(wanted - missing)
            self.model.check(row for row in self._rows() if not self._is_done(file, row))
            bar.describe("evaluating")
            rows = (row for row in self._rows() if not self._is_done(file, row))
            for sample in self._samples_of(file, rows):
                file.append(sample)
                bar.advance()

    def _is_done(self, file: SampleFile, row: Row) -> bool:
        return all((row.line, number) in file for number in range(self._samples))

    def _samples_of(self, file: SampleFile, rows: Iterator[Row]) -> Iterator[Sample]:
        if self.task.kind == "perplexity":
            for row, score in self.model.score_texts(cast(Iterator[PerplexityRow], rows)):
                yield {
                    "line": row.line,
                    "sample": 0,
                    "text": row.text,
                    **msgspec.structs.asdict(score),
                }
        elif self.task.kind == "multiple_choice":
            for row, logprobs in self.model.score_choices(cast(Iterator[ChoiceRow], rows)):
                output = metric.argmax(logprobs)
                yield {
                    "line": row.line,
                    "sample": 0,
                    "prompt": row.prompt,
                    "choices": row.choices,
                    "answer": row.answer,
                    "logprobs": logprobs,
                    "output": output,
                    "score": int(output == row.answer),
                }
        else:
            answers = cast(Iterator[AnswerRow], rows)
            for request, output in self.model.generate(self._requests(file, answers)):
                yield {
                    "line": request.row.line,
                    "sample": request.sample,
                    "prompt": request.row.prompt,
                    "answer": request.row.answers,
                    "output": output.text,
                    "finish_reason": output.finish_reason,
                    "num_tokens": output.num_tokens,
                }

    def _requests(self, file: SampleFile, rows: Iterator[AnswerRow]) -> Iterator[SampleRequest]:
        for row in rows:
            for number in range(self._samples):
                if (row.line, number) not in file:
                    yield SampleRequest(row, number, self.task.settings.seed_of(row.line, number))

    # Results

    def _finish(self, file: SampleFile) -> EvalReport:
        """Score the answers, sort the samples and write the metrics."""
        extract = self.task.settings.extract
        extractor = None if extract is None else Extractor(extract)

        def score(sample: Sample) -> Sample:
            if self.task.kind != "exact_match":
                return sample
            try:
                answer = extractor.find(sample["output"]) if extractor else sample["output"]
            except ConfigError as error:
                place = f"{self.task.path}: line {sample['line']:,}: {error.message}"
                hint = f"{error.hint}. The outputs are kept: only the scores are computed again"
                raise ConfigError(place, hint=hint) from error
            correct = is_correct(answer, sample["answer"])
            return {**sample, "extracted": answer, "score": int(correct)}

        try:
            file.rewrite(score)
        finally:
            if extractor:
                extractor.close()
        report = self._report(self._selected(file), self._metrics(file))
        self._write(report)
        return report

    def _metrics(self, file: SampleFile) -> dict[str, Estimate]:
        samples = self._selected(file)
        if self.task.kind == "perplexity":
            fields = TextScore.__struct_fields__
            scores = [TextScore(*(one[name] for name in fields)) for one in samples]
            return metric.perplexity(scores) if scores else {}
        if self.task.kind == "multiple_choice":
            return metric.multiple_choice(
                (one["logprobs"], one["choices"], one["answer"]) for one in samples
            )
        correct: dict[int, list[float]] = {}
        for one in samples:
            correct.setdefault(one["line"], []).append(one["score"])
        return metric.exact_match(correct, self._samples)

    def _report(self, samples: Iterable[Sample], metrics: dict[str, Estimate]) -> EvalReport:
        count = tokens = truncated = 0
        for one in samples:
            count += 1
            tokens += one.get("num_tokens", 0)
            truncated += one.get("finish_reason") == "length"
        return EvalReport(
            **self.description,
            metrics=metrics,
            num_rows=self.num_rows,
            num_samples=count,
            num_tokens=tokens,
            num_truncated=truncated,
            complete=count == self.num_rows * self._samples,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            seconds=round(time.monotonic() - self.begin, 3),
            directory=str(self.directory),
        )

    def _selected(self, file: SampleFile) -> Iterator[Sample]:
        """Yield the samples of the rows that are evaluated; the file may have more of them."""
        lines = {row.line for row in self._rows()}
        for one in file:
            if one["line"] in lines and one["sample"] < self._samples:
                yield one

    def _rows(self) -> Iterator[Row]:
        return self.task.rows(self.limit)

    @property
    def _samples(self) -> int:
        return self.task.settings.samples if self.task.kind == "exact_match" else 1

    def _write(self, report: EvalReport) -> None:
        fields = {**msgspec.structs.asdict(report)}
        del fields["directory"]
        content = msgspec.json.format(msgspec.json.encode(fields), indent=2)
        paths.write_atomic(self.directory / RESULTS, content + b"\n")

    # Directory

    def _describe(self) -> dict[str, Any]:
        task, versions = self.task, ("ingot", "torch")
        return {
            "task": {
                "file": task.path.name,
                "sha256": task.sha256,
                "kind": task.kind,
                "num_rows": task.num_rows,
            },
            "model": self.model.describe(),
            "settings": msgspec.json.decode(msgspec.json.encode(task.settings)),
            "versions": {name: metadata.version(name) for name in versions},
        }

    def _identity(self, description: dict[str, Any]) -> dict[str, Any]:
        """Return the part of a description that samples depend on."""
        settings, model = description["settings"], description["model"]
        return {
            "task": {**description["task"], "file": None},
            "model": {k: v for k, v in model.items() if k not in ("lineage", "path")},
            "settings": {k: v for k, v in settings.items() if k not in _SCORING_SETTINGS},
            "versions": description["versions"],
        }

    def _default_directory(self) -> Path:
        content = msgspec.json.encode(self._identity(self.description), order="sorted")
        digest = hashlib.sha256(content).hexdigest()[:12]
        name = str(self.description["model"]["name"])
        return paths.evals(paths.sanitize(f"{self.task.path.stem}-{name}") + f"-{digest}")

    def _exists(self) -> bool:
        """Return whether there are results; raise an error if they are of another evaluation."""
        path = self.directory / RESULTS
        if not path.exists():
            if self.directory.exists() and any(self.directory.iterdir()):
                raise DataError(
                    f"{self.directory}: has other files", hint="name a new directory with --output"
                )
            return False
        try:
            stored = msgspec.json.decode(path.read_bytes(), type=EvalReport)
            found = self._identity(msgspec.structs.asdict(stored))
        except (OSError, msgspec.MsgspecError, LookupError) as error:
            raise DataError(
                f"{path}: cannot be read: {error}", hint="delete its directory"
            ) from error
        ours = self._identity(self.description)
        if different := [name for name in ours if ours[name] != found[name]]:
            raise DataError(
                f"{self.directory}: has results of another evaluation: "
                f"{' and '.join(different)} differ",
                hint="name a new directory with --output, or delete that one",
            )
        return True
