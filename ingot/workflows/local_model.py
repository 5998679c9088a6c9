"""A model directory as `ingot.evaluate` uses it: `ingot.LLM` with rows of a task.

Prompts are checked before anything is computed. Rows are then tokenized as the engine gets to them,
so that it always has requests waiting while memory holds few of them.
"""

# pyright: basic
from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

from ingot.core import lineage
from ingot.core.device import detect, resolve
from ingot.core.errors import IngotError
from ingot.evaluation.metric import TextScore
from ingot.evaluation.model import (
    SampleOutput,
    SampleRequest,
    num_scored_bytes,
    row_error,
    split_choice,
    windows,
)
from ingot.evaluation.task import ChoiceRow, EvalTask, PerplexityRow, Prompt, Row
from ingot.interop import directory, hub, peft
from ingot.serving.engine.sampling_params import SamplingParams
from ingot.workflows.llm import LLM, CompletionChunk

_ADAPTER = "adapter"
SCORE = SamplingParams(temperature=0.0, prompt_logprobs=0)

R = TypeVar("R", bound=Row)


@dataclass(kw_only=True)
class LocalModel:
    """A model directory, or a model of the Hugging Face hub; loaded when it has to compute.

    `adapter` is the PEFT directory of a LoRA adapter, or None.
    """

    task: EvalTask
    model: str
    device: str = "auto"
    adapter: Path | None = None

    def __post_init__(self) -> None:
        self._device = resolve(self.device)  # before a model is downloaded
        self._directory = hub.model_path(self.model)
        if self.adapter:
            peft.read_config(self.adapter)  # an error at once if it is not an adapter

    @cached_property
    def llm(self) -> LLM:
        """The model; loaded by the first use."""
        adapters = {_ADAPTER: self.adapter} if self.adapter else {}
        return LLM(self._directory, device=self._device, adapters=adapters)

    def describe(self) -> dict[str, Any]:
        """Return hash, lineage and processor of the model."""
        processor: dict[str, Any] = {"device": self._device.type}
        if self._device.type == "cpu":
            processor |= {"cpu": detect().cpu.name, "isa": detect().cpu.isa[0]}
        elif (index := self._device.index or 0) < len(gpus := detect().gpus):
            processor["gpu"] = gpus[index].name
        described = {
            "name": self._directory.resolve().name,
            "path": str(self._directory),
            "sha256": directory.hash_model(self._directory),
            "lineage": list(lineage.read(self._directory).steps),
            **processor,
        }
        if self.adapter:
            files = [self.adapter / name for name in (peft.CONFIG, peft.WEIGHTS)]
            described["adapter"] = directory.hash_files(files)
        return described

    def _stream(self, prompts: Iterator[Sequence[int]], *args: Any, **options: Any) -> Any:
        return self.llm.stream(prompts, *args, adapter=_ADAPTER if self.adapter else "", **options)

    def check(self, rows: Iterable[Row]) -> None:
        """Raise an error for a row that does not fit in the model's context."""
        for row in rows:
            try:
                self._check(row)
            except IngotError as error:
                if str(self.task.path) in error.message:
                    raise
                raise row_error(self.task, row, error.message, error.hint) from error

    def _check(self, row: Row) -> None:
        if isinstance(row, PerplexityRow):
            self._text_parts(row)
        elif isinstance(row, ChoiceRow):
            self._choice_parts(row)
        else:
            count, llm = len(self._encode(row.prompt)), self.llm
            most = min(self.task.settings.max_tokens, llm.max_seq_len - count)
            if not count or most < 1 or count + most > llm.engine.config.capacity:
                raise self._too_long(row, "prompt", count)

    def _too_long(self, row: Row, name: str, count: int) -> IngotError:
        context = min(self.llm.max_seq_len, self.llm.engine.config.capacity)
        message = f"{name} has {count:,} tokens, and the model's context {context:,}"
        return row_error(self.task, row, message, "shorten it, or remove the line")

    # Log-probabilities

    def score_texts(
        self, rows: Iterator[PerplexityRow]
    ) -> Iterator[tuple[PerplexityRow, TextScore]]:
        """Compute the log-probability of each text; a long one is scored in windows."""
        for row, parts in self._score(rows, self._text_parts):
            logprobs = [one for part in parts for one in part]
            yield row, TextScore(math.fsum(logprobs), len(logprobs), self._num_bytes(row))

    def score_choices(self, rows: Iterator[ChoiceRow]) -> Iterator[tuple[ChoiceRow, list[float]]]:
        """Compute the log-probability of each choice of a row after its prompt."""
        for row, parts in self._score(rows, self._choice_parts):
            yield row, [math.fsum(part) for part in parts]

    def _score(
        self, rows: Iterator[R], split: Callable[[R], list[tuple[Sequence[int], int]]]
    ) -> Iterator[tuple[R, list[list[float]]]]:
        """Yield the log-probabilities of the parts of each row: token ids, and which is the first
        to be scored."""
        parts: dict[int, tuple[_RowScore[R], int, int]] = {}
        numbers = itertools.count()

        def sequences() -> Iterator[Sequence[int]]:
            for row in rows:
                sequences = split(row)
                score = _RowScore(row, [[] for _ in sequences], len(sequences))
                for part, (ids, first) in enumerate(sequences):
                    parts[next(numbers)] = score, part, first
                    yield ids

        for chunk in self._stream(sequences(), SCORE, max_tokens=1, ignore_eos=True):
            score, part, first = parts[chunk.index]
            score.logprobs[part] += [one.logprob for one in chunk.prompt_logprobs or ()]
            if chunk.finish_reason is not None:
                del parts[chunk.index]
                del score.logprobs[part][: first - 1]  # the first token of the sequence has none
                score.num_missing -= 1
                if not score.num_missing:
                    yield score.row, score.logprobs

    def _text_parts(self, row: PerplexityRow) -> list[tuple[Sequence[int], int]]:
        ids = self.llm.tokenizer.encode(row.text)
        if len(ids) < 2 or not self._num_bytes(row):
            message = f"at least 2 tokens have to be scored, got {len(ids)}"
            raise row_error(self.task, row, message, "give a longer text, or remove the line")
        return [
            (ids[start:stop], first - start) for start, stop, first in windows(len(ids), self._size)
        ]

    def _num_bytes(self, row: PerplexityRow) -> int:
        tokenizer = self.llm.tokenizer
        first = tokenizer.encode(row.text)[:1]
        return num_scored_bytes(row.text, tokenizer.decode(first, skip_special_tokens=False))

    def _choice_parts(self, row: ChoiceRow) -> list[tuple[Sequence[int], int]]:
        parts: list[tuple[Sequence[int], int]] = []
        for choice in row.choices:
            ids, first = encode_choice(
                self.llm, row.prompt, self.task.settings.target_delimiter, choice
            )
            if len(ids) > self._size:
                raise self._too_long(row, "prompt with choice", len(ids))
            if not 1 <= first < len(ids):
                message = f"choice {choice!r:.80} has no tokens of its own"
                raise row_error(self.task, row, message, "change the choice, or the delimiter")
            parts.append((ids, first))
        return parts

    @property
    def _size(self) -> int:
        """The most tokens of a sequence that is scored: the engine samples one more."""
        return min(self.llm.max_seq_len, self.llm.engine.config.capacity) - 1

    # Answers

    def generate(
        self, requests: Iterator[SampleRequest]
    ) -> Iterator[tuple[SampleRequest, SampleOutput]]:
        """Generate answers."""
        settings = self.task.settings
        running: dict[int, tuple[SampleRequest, list[CompletionChunk]]] = {}
        numbered, others = itertools.tee(requests)

        def prompts() -> Iterator[Sequence[int]]:
            for number, request in enumerate(numbered):
                running[number] = request, []
                yield self._encode(request.row.prompt)

        params = (
            SamplingParams(
                temperature=settings.temperature, top_p=settings.top_p, seed=request.seed
            )
            for request in others
        )
        for chunk in self._stream(
            prompts(), params, max_tokens=settings.max_tokens, stop=settings.stop
        ):
            request, chunks = running[chunk.index]
            chunks.append(chunk)
            if chunk.finish_reason is not None:
                del running[chunk.index]
                text = "".join([one.text for one in chunks])
                count = sum([len(one.token_ids) for one in chunks])
                yield request, SampleOutput(text, chunk.finish_reason, count)

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.llm.tokenizer.encode(prompt)
        return self.llm.apply_chat_template(prompt)


@dataclass
class _RowScore(Generic[R]):
    row: R
    logprobs: list[list[float]]
    num_missing: int


def encode_choice(llm: LLM, prompt: Prompt, delimiter: str, choice: str) -> tuple[list[int], int]:
    """Return the token ids of a prompt with a choice, and the number of those of the prompt."""
    tokenizer = llm.tokenizer
    if not isinstance(prompt, str):
        context = llm.apply_chat_template(prompt)
        return context + tokenizer.encode(choice, add_special_tokens=False), len(context)
    context, continuation = split_choice(prompt, delimiter, choice)
    return tokenizer.encode(context + continuation), len(tokenizer.encode(context))
