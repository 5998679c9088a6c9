"""Evaluation tasks: JSONL files whose rows have fields that say what is measured.

    {"text": "..."}                                           perplexity
    {"prompt": "...", "answer": "Paris"}                      exact match, or pass@k
    {"prompt": "...", "choices": ["Rome", "Paris"], "answer": 1}   multiple choice

All rows of a file are of one kind. `prompt` is a text to continue or a list of chat messages;
`answer` is a text or a list of accepted ones. Other fields are ignored. The first line may be
`{"settings": {...}}` instead, with fields of `TaskSettings`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from ingot.core.errors import ConfigError, DataError, IngotError, UnknownName

MAX_LINE = 1 << 26  # bytes
MAX_ROWS = 10_000_000
MAX_SAMPLES = 1024
MAX_CHOICES = 128
MAX_ANSWERS = 1024
MAX_MESSAGES = 4096
MAX_TOKENS = 1 << 20
MAX_STOP_STRINGS = 16
MAX_CHARS = 256  # of a stop string or delimiter
MAX_PATTERN = 4096  # characters of a regular expression
_BOM = b"\xef\xbb\xbf"
_KINDS_HINT = (
    'give "text" for perplexity, "prompt" and "answer" for exact match, or "prompt", "choices" and '
    'an index "answer" for multiple choice'
)

Kind: TypeAlias = Literal["perplexity", "exact_match", "multiple_choice"]
Prompt: TypeAlias = str | tuple[dict[str, Any], ...]
"""A text to continue, or the messages of a chat."""


class TaskSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the answers of a task are generated and compared.

    >>> TaskSettings(samples=8)
    Traceback (most recent call last):
    ...
    ingot.core.errors.ConfigError: samples: 8 samples at temperature 0 would all be equal
      hint: set a temperature, for example 0.8
    """

    samples: int = 1
    """Answers that are sampled for each row; from 2 on, pass@k is reported."""
    temperature: float = 0.0
    """0 selects the most likely token (greedy decoding)."""
    top_p: float = 1.0
    """Sample from the most likely tokens whose cumulative probability reaches this."""
    seed: int = 0
    """Each sample of each row has its own seed, which is a function of this one."""
    max_tokens: int = 256
    """The most tokens of an answer."""
    stop: tuple[str, ...] = ()
    """Strings that end an answer; they are not part of it."""
    extract: str | None = None
    """Regular expression (Python's) of the answer in the output: its first group, or all of it, at
    the first match. Without a match, the output is wrong."""
    chat: bool = False
    """Send a text prompt as the message of a user, through the model's chat template."""
    target_delimiter: str = " "
    """Text between a prompt and each of its choices, unless there is whitespace."""

    def __post_init__(self) -> None:
        _check_range("samples", self.samples, 1, MAX_SAMPLES)
        _check_range("temperature", self.temperature, 0, 100)
        _check_range("top_p", self.top_p, 0, 1)
        _check_range("seed", self.seed, -(2**63), 2**63 - 1)
        _check_range("max_tokens", self.max_tokens, 1, MAX_TOKENS)
        _check_range("number of stop strings", len(self.stop), 0, MAX_STOP_STRINGS)
        for text in self.stop:
            _check_range("characters of a stop string", len(text), 1, MAX_CHARS)
        _check_range("characters of target_delimiter", len(self.target_delimiter), 0, MAX_CHARS)
        if self.extract is not None:
            _check_range("characters of extract", len(self.extract), 1, MAX_PATTERN)
        if self.samples > 1 and not self.temperature:
            raise ConfigError(
                f"samples: {self.samples} samples at temperature 0 would all be equal",
                hint="set a temperature, for example 0.8",
            )

    def seed_of(self, line: int, sample: int) -> int:
        """Return the seed of a sample, below 2**31: some servers take no larger ones.

        >>> TaskSettings().seed_of(1, 0) == TaskSettings().seed_of(1, 1)
        False
        """
        content = f"{self.seed} {line} {sample}".encode()
        return int.from_bytes(hashlib.sha256(content).digest()[:4]) >> 1


class PerplexityRow(msgspec.Struct, frozen=True):
    """A text whose perplexity is measured."""

    line: int
    text: str


class AnswerRow(msgspec.Struct, frozen=True):
    """A prompt, and the answers that count as correct."""

    line: int
    prompt: Prompt
    answers: tuple[str, ...]


class ChoiceRow(msgspec.Struct, frozen=True):
    """A prompt, its choices, and the index of the correct one."""

    line: int
    prompt: Prompt
    choices: tuple[str, ...]
    answer: int


Row: TypeAlias = PerplexityRow | AnswerRow | ChoiceRow
_KINDS: dict[type, Kind] = {
    PerplexityRow: "perplexity",
    AnswerRow: "exact_match",
    ChoiceRow: "multiple_choice",
}


@dataclass(frozen=True, kw_only=True)
class EvalTask:
    """A task file that was checked: each of its rows is valid."""

    path: Path
    sha256: str
    kind: Kind
    num_rows: int
    settings: TaskSettings

    @classmethod
    def read(cls, path: Path, settings: Mapping[str, Any] | None = None) -> EvalTask:
        """Read and check a whole file; `settings` replace those of its first line."""
        if not path.is_file():
            raise DataError(f"{path}: no such file", hint="name a .jsonl file")
        digest = hashlib.sha256()
        with _os_errors_as_data_errors(path):
            merged = _merge_settings(path, next(_lines(path), None), settings or {})
            kind, count = None, 0
            for row in _rows(path, _lines(path, digest), merged):
                found = _KINDS[type(row)]
                if kind not in (None, found):
                    raise _error(
                        path,
                        row.line,
                        f"expected a row of the same kind as before ({kind}), got {found}",
                        "put rows of different kinds into different files",
                    )
                kind, count = found, count + 1
        if kind is None:
            raise DataError(f"{path}: has no rows", hint=_KINDS_HINT)
        return cls(path=path, sha256=digest.hexdigest(), kind=kind, num_rows=count, settings=merged)

    def rows(self, limit: int | None = None) -> Iterator[Row]:
        """Yield the rows, or the first `limit` of them, in constant memory."""
        with _os_errors_as_data_errors(self.path):
            yield from islice(_rows(self.path, _lines(self.path), self.settings), limit)


class _RawRow(msgspec.Struct):
    text: str | None = None
    prompt: str | list[dict[str, Any]] | None = None
    choices: list[str] | None = None
    answer: str | int | list[str | int] | None = None
    settings: dict[str, Any] | None = None


_decode_row = msgspec.json.Decoder(_RawRow).decode


def _rows(path: Path, lines: Iterator[tuple[int, bytes]], settings: TaskSettings) -> Iterator[Row]:
    for count, (line, content) in enumerate(lines):
        raw = _decode(path, line, content)
        if raw.settings is not None and count == 0:
            continue
        if count >= MAX_ROWS:
            raise _error(path, line, f"expected at most {MAX_ROWS:,} rows", "split the file")
        yield _build_row(path, line, content, raw, settings)


def _build_row(path: Path, line: int, content: bytes, raw: _RawRow, settings: TaskSettings) -> Row:
    if raw.prompt is not None and raw.answer is not None:
        prompt = _build_prompt(path, line, raw.prompt, settings)
        if raw.choices is None:
            return AnswerRow(line, prompt, _build_answers(path, line, raw.answer))
        return _build_choices(path, line, prompt, raw.choices, raw.answer)
    if raw.text is not None and raw.prompt is None:
        if not raw.text:
            raise _error(path, line, "text must not be empty", "remove the line")
        return PerplexityRow(line, raw.text)
    found = ", ".join(map(repr, list(msgspec.json.decode(content))[:8])) or "none"
    hint = _KINDS_HINT
    if "messages" in msgspec.json.decode(content):
        hint = 'rename "messages" to "prompt", and give the expected text as "answer"'
    raise _error(path, line, f"the fields describe no task: {found}", hint)


def _build_prompt(
    path: Path, line: int, prompt: str | list[dict[str, Any]], settings: TaskSettings
) -> Prompt:
    if not prompt:
        raise _error(path, line, "prompt must not be empty", "give a text or messages")
    if isinstance(prompt, str):
        return ({"role": "user", "content": prompt},) if settings.chat else prompt
    if len(prompt) > MAX_MESSAGES:
        message = f"prompt: expected at most {MAX_MESSAGES:,} messages, got {len(prompt):,}"
        raise _error(path, line, message, "shorten it")
    if not all(isinstance(message.get("role"), str) for message in prompt):
        hint = 'write messages as {"role": "user", "content": "..."}'
        raise _error(path, line, "prompt: each message must have a role", hint)
    return tuple(prompt)


def _build_answers(path: Path, line: int, answer: str | int | list[str | int]) -> tuple[str, ...]:
    answers = answer if isinstance(answer, list) else [answer]
    if not 1 <= len(answers) <= MAX_ANSWERS:
        message = f"answer: expected 1 to {MAX_ANSWERS:,} accepted answers, got {len(answers):,}"
        raise _error(path, line, message, "give a text or a list of texts")
    return tuple(str(one) for one in answers)


def _build_choices(
    path: Path, line: int, prompt: Prompt, choices: list[str], answer: Any
) -> ChoiceRow:
    if not 2 <= len(choices) <= MAX_CHOICES or not all(choices):
        message = f"choices: expected 2 to {MAX_CHOICES} texts that are not empty"
        raise _error(path, line, message, "correct the line")
    if type(answer) is not int or not 0 <= answer < len(choices):
        message = f"answer: expected an index from 0 to {len(choices) - 1}, got {answer!r:.80}"
        raise _error(path, line, message, "give the index of the correct choice")
    if isinstance(prompt, str) and not prompt.strip():
        hint = "give a text before the choices"
        raise _error(path, line, "prompt must not be blank", hint)
    return ChoiceRow(line, prompt, tuple(choices), answer)


def _merge_settings(
    path: Path, first: tuple[int, bytes] | None, given: Mapping[str, Any]
) -> TaskSettings:
    valid = TaskSettings.__struct_fields__
    if unknown := [name for name in given if name not in valid]:
        raise UnknownName("setting of a task", unknown[0], valid)
    line, header = 1, dict[str, Any]()
    if first is not None:
        line, header = first[0], _decode(path, *first).settings or {}
    if unknown := [name for name in header if name not in valid]:
        error = UnknownName("setting of a task", unknown[0], valid)
        raise _error(path, line, error.message, error.hint)
    try:
        return msgspec.convert({**header, **given}, TaskSettings)
    except msgspec.ValidationError as error:
        message, hint = f"settings: {error}", "see `ingot eval --help` for the settings"
    except IngotError as error:
        message, hint = error.message, error.hint
    if header:
        raise _error(path, line, message, hint)
    raise ConfigError(message, hint=hint)


def _lines(path: Path, digest: Any = None) -> Iterator[tuple[int, bytes]]:
    """Yield number and content of the lines that are not blank; update `digest` with all."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE + 1):
            number += 1
            if len(line) > MAX_LINE:
                message = f"expected at most {MAX_LINE:,} bytes"
                raise _error(path, number, message, "write one JSON object per line")
            if digest is not None:
                digest.update(line)
            if number == 1:
                line = line.removeprefix(_BOM)
            if line := line.strip():
                yield number, line


def _decode(path: Path, line: int, content: bytes) -> _RawRow:
    try:
        return _decode_row(content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        reason = str(error)
    hint = _KINDS_HINT if "$" in reason or "object" in reason else "correct the line"
    raise _error(path, line, reason, hint)


def _error(path: Path, line: int, message: str, hint: str) -> DataError:
    return DataError(f"{path}: line {line:,}: {message}", hint=hint)


@contextmanager
def _os_errors_as_data_errors(path: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read: {error.strerror or error}", hint="make it readable"
        ) from error


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # false for NaN, too
        raise ConfigError(
            f"{name}: expected {low} to {high}, got {value}", hint=f"give {low} to {high}"
        )
