"""What an evaluation asks of a model: the interface of `ingot.LLM` and of a server alike.

Each method takes an iterator that it reads as it gets to its items, so that a task of any length
takes little memory, and yields results in the order in which they are complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import msgspec

from ingot.core.errors import DataError
from ingot.evaluation.metric import TextScore
from ingot.evaluation.task import AnswerRow, ChoiceRow, EvalTask, PerplexityRow, Row


class SampleRequest(msgspec.Struct, frozen=True):
    """One answer to generate: a row, the number of the sample and its seed."""

    row: AnswerRow
    sample: int
    seed: int


class SampleOutput(msgspec.Struct, frozen=True):
    """A generated answer."""

    text: str
    finish_reason: str
    num_tokens: int


class EvalModel(Protocol):
    """A model that can be evaluated."""

    def describe(self) -> dict[str, Any]:
        """Return what identifies the model: samples of different models are never mixed."""
        ...

    def check(self, rows: Iterable[Row]) -> None:
        """Raise an error for a row that the model cannot process, if that can be known."""
        ...

    def score_texts(
        self, rows: Iterator[PerplexityRow]
    ) -> Iterator[tuple[PerplexityRow, TextScore]]:
        """Compute the log-probability of each text."""
        ...

    def score_choices(self, rows: Iterator[ChoiceRow]) -> Iterator[tuple[ChoiceRow, list[float]]]:
        """Compute the log-probability of each choice of a row after its prompt."""
        ...

    def generate(
        self, requests: Iterator[SampleRequest]
    ) -> Iterator[tuple[SampleRequest, SampleOutput]]:
        """Generate answers."""
        ...


def split_choice(prompt: str, delimiter: str, choice: str) -> tuple[str, str]:
    """Return context and continuation, with the delimiter unless they have whitespace there.

    Whitespace at the end of the prompt is scored with the choice, as in lm-eval: tokens contain the
    space before a word.

    >>> split_choice("2 + 2 = ", " ", "4"), split_choice("The sky is", " ", "blue")
    (('2 + 2 =', ' 4'), ('The sky is', ' blue'))
    """
    context = prompt.rstrip()
    spaced = context != prompt or choice[:1].isspace()
    return context, prompt[len(context) :] + ("" if spaced else delimiter) + choice


def num_scored_bytes(text: str, first_token: str) -> int:
    """Return the bytes of a text after its first token, which is not scored. All bytes are scored
    if the first token is not part of the text: a BOS token.

    >>> num_scored_bytes("Hello world", "Hello"), num_scored_bytes("Hello", "<s>")
    (6, 5)
    """
    skipped = first_token if text.startswith(first_token) else ""
    return len(text.encode("utf-8", "replace")) - len(skipped.encode("utf-8", "replace"))


def windows(length: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Split a sequence into windows of at most `size` tokens; yield start, stop and the first token
    that the window scores. Each token but the first is scored once, after at least one other; the
    last window has as many tokens before as fit. These are the windows of lm-eval.

    >>> list(windows(4, 8)), list(windows(10, 4))
    ([(0, 4, 1)], [(0, 4, 1), (3, 7, 4), (6, 10, 7)])
    >>> list(windows(9, 4))[-1]
    (5, 9, 7)
    """
    stop, first = min(length, size), 1
    yield 0, stop, first
    while stop < length:
        first, stop = stop, min(length, stop + size - 1)
        yield stop - size, stop, first


def row_error(task: EvalTask, row: Row, message: str, hint: str) -> DataError:
    """Return an error that names the row by its file and line."""
    return DataError(f"{task.path}: line {row.line:,}: {message}", hint=hint)
