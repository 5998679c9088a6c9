"""`ingot eval`: evaluate a model on a task."""

from __future__ import annotations

import json as json_format
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import tyro

from ingot.cli import escape_markup
from ingot.core.log import stdout

if TYPE_CHECKING:
    from ingot.workflows.evaluate import EvalReport


def _default(value: str) -> object:
    return tyro.conf.arg(help_behavior_hint=f"(default: the task's, or {value})")


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """Options of the command line that replace settings of the task; None keeps those."""

    samples: Annotated[int | None, _default("1")] = None
    """Answers to sample for each row; from 2 on, pass@k is reported."""
    temperature: Annotated[float | None, _default("0")] = None
    """0 selects the most likely token (greedy decoding)."""
    top_p: Annotated[float | None, _default("1")] = None
    """Sample from the most likely tokens whose cumulative probability reaches this."""
    seed: Annotated[int | None, _default("0")] = None
    """Seed of the samples."""
    max_tokens: Annotated[int | None, _default("256")] = None
    """The most tokens of an answer."""
    stop: Annotated[tuple[str, ...] | None, _default("none")] = None
    """Strings that end an answer."""
    extract: Annotated[str | None, _default("none")] = None
    """Regular expression of the answer in the output: its first group, or all of it."""
    chat: tyro.conf.FlagCreatePairsOff[bool] = False
    """Send text prompts as messages of a user, through the chat template."""
    target_delimiter: Annotated[str | None, _default("a space")] = None
    """Text between a prompt and each of its choices."""

    def settings(self) -> dict[str, Any]:
        """Return the settings that were given."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return {n: value for n, value in given.items() if value is not None and value is not False}


def eval(
    task: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="TASK")],
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")],
    answer: Annotated[EvalOptions, tyro.conf.OmitArgPrefixes] = EvalOptions(),  # noqa: B008
    limit: int | None = None,
    output: Path | None = None,
    device: str = "auto",
    adapter: Path | None = None,
    model_name: str | None = None,
    key: str | None = None,
    concurrency: int = 32,
    json: tyro.conf.FlagCreatePairsOff[bool] = False,
) -> None:
    """Evaluate a model on a JSONL file: perplexity of rows with `text`, exact match or pass@k of
    rows with `prompt` and `answer`, accuracy of rows with `prompt`, `choices` and the index
    `answer`.

    The results are kept, with every output and its score. Ctrl-C keeps what was computed, and the
    same command continues.

    Examples: `ingot eval texts.jsonl smollm2`,
    `ingot eval questions.jsonl smollm2 --chat --extract "answer is (\\w+)"`,
    `ingot eval questions.jsonl smollm2 --chat --samples 16 --temperature 0.8`,
    `ingot eval questions.jsonl http://127.0.0.1:8000 --limit 100`.

    Args:
        task: A JSONL file.
        model: A model directory, ORG/NAME on the Hugging Face hub, or the URL of a server with
            OpenAI's API.
        answer: How answers are generated and compared.
        limit: Evaluate only the first rows.
        output: Directory of the results; default: one below $XDG_DATA_HOME/ingot/evals.
        device: Where to compute: auto, cpu, cuda, cuda:1.
        adapter: PEFT directory of a LoRA adapter of the model directory.
        model_name: Name of the model, if the server has several.
        key: API key of the server.
        concurrency: The most requests to the server at one time.
        json: Print JSON instead of text.
    """
    from ingot.workflows.evaluate import evaluate

    report = evaluate(
        task,
        model,
        output=output,
        limit=limit,
        device=device,
        adapter=adapter,
        model_name=model_name,
        key=key,
        concurrency=concurrency,
        **answer.settings(),
    )
    if json:
        print(json_format.dumps(msgspec.to_builtins(report), indent=2))  # noqa: T201
    else:
        _print_summary(report)


def _print_summary(report: EvalReport) -> None:
    from ingot.cli.tables import new_table

    table = new_table(["metric"], ["value", "standard error"])
    for name, estimate in report.metrics.items():
        stderr = "-" if estimate.stderr is None else f"{estimate.stderr:.4f}"
        table.add_row(name, f"{estimate.value:.4f}", stderr)
    rows = "1 row" if report.num_rows == 1 else f"{report.num_rows:,} rows"
    adapter = " with an adapter" if "adapter" in report.model else ""
    title = f"{report.task['file']} on {report.model['name']}{adapter}: {rows}"
    console = stdout()
    console.print(escape_markup(title), table, highlight=False)
    if report.num_truncated:
        console.print(
            f"{report.num_truncated:,} of {report.num_samples:,} answers ended at --max-tokens",
            highlight=False,
        )
    console.print(f"results: {escape_markup(report.directory)}", highlight=False, soft_wrap=True)
