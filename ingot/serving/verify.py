"""Proof that serving computes what training computes: bit for bit, however it is scheduled.

    certificate = verify(decoder, schedules=1000)
    certificate.bits_equal

Some texts are written by plain packed forwards alone: no engine, no cache, all tokens every time.
Their tokens and log-probabilities are what is to be expected. Then an engine serves them under one
random schedule after another, and every token and every bit of every log-probability has to be the
same again. A schedule draws

    which texts, when they come, and who leaves early     the size of blocks, and how many there are
    how many run together, how many tokens a step has     so few that some are preempted
    whether prompts are scored, whether they share        1 or 2 threads
    who guesses: nobody, lookup, a draft model, or one who knows the text and errs at times
"""

# pyright: basic
from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ingot import ops
from ingot.core.errors import ConfigError, IngotError
from ingot.nn import BatchLayout, Decoder, Sampling
from ingot.serving.engine.engine import Engine
from ingot.serving.engine.output import Output
from ingot.serving.engine.request import Options, Reason, Request
from ingot.serving.engine.runner import Runner
from ingot.serving.engine.scheduler import Limits
from ingot.serving.engine.speculate import Draft, Lookup, Proposer, Text

MAX_SCHEDULES = 10**6
SIZES = (1, 3, 8, 16, 32, 48, 128)
LENGTHS = (1, 2, 3, 15, 16, 31, 64, 65, 100, 126, 127, 128, 129, 150)
THREADS = (1, 2)
TEXTS = 16
WRITTEN = 12  # tokens behind each prompt


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """What was compared, and how many schedules gave other bits."""

    schedules: int
    mismatches: int
    logprobs: int
    """How many log-probabilities were compared."""
    steps: int
    preemptions: int
    cached_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    threads: tuple[int, ...]
    dtype: str
    seed: int
    difference: str | None = None
    """The first one."""

    @property
    def bits_equal(self) -> bool:
        """Not one bit was another."""
        return not self.mismatches


@dataclass(frozen=True, kw_only=True)
class Expected:
    """A text, and the log-probability of each of its tokens but the first."""

    prompt: tuple[int, ...]
    sampling: Sampling
    tokens: tuple[int, ...]
    """Behind the prompt."""
    logprobs: tuple[float, ...]


def verify(
    decoder: Decoder,
    *,
    schedules: int = 1000,
    seed: int = 0,
    progress: Callable[[], object] = lambda: None,
) -> Certificate:
    """Serve under so many schedules what was expected; `progress` hears of each.

    >>> from ingot.nn import preset
    >>> verify(Decoder.from_config(preset("tiny"), seed=0), schedules=2).bits_equal
    True
    """
    if not 1 <= schedules <= MAX_SCHEDULES:
        hint = f"give a number from 1 to {MAX_SCHEDULES:,}"
        raise ConfigError(f"{schedules} schedules", hint=hint)
    numbers = random.Random(seed)
    texts = expect(decoder, prompts(decoder, numbers), seed)
    machinery = _Machinery(decoder)
    counts: Counter[str] = Counter()
    difference, threads = None, torch.get_num_threads()
    try:
        for number in range(schedules):
            torch.set_num_threads(THREADS[number % len(THREADS)])
            found = _Schedule(machinery, texts, numbers).run(counts)
            counts["mismatches"] += found is not None
            difference = difference or found
            progress()
    finally:
        torch.set_num_threads(threads)
    return Certificate(
        schedules=schedules,
        threads=THREADS,
        dtype=str(decoder.dtype).removeprefix("torch."),
        seed=seed,
        difference=difference,
        **{name: counts[name] for name in _COUNTED},
    )


_COUNTED = (
    "mismatches",
    "logprobs",
    "steps",
    "preemptions",
    "cached_tokens",
    "drafted_tokens",
    "accepted_tokens",
)


# What is expected


def prompts(decoder: Decoder, numbers: random.Random) -> list[tuple[int, ...]]:
    """Prompts of many lengths, most of which begin like others."""
    config = decoder.config
    longest = config.max_seq_len - WRITTEN
    if longest < 1:
        raise IngotError(
            f"the model's context is {config.max_seq_len} tokens",
            hint=f"verify needs more than {WRITTEN}",
        )

    def draw(count: int) -> list[int]:
        return [numbers.randrange(config.vocab_size) for _ in range(count)]

    books = [draw(max(LENGTHS)) for _ in range(3)]
    books.append(draw(5) * max(LENGTHS))  # one that repeats itself, for lookup
    found: list[tuple[int, ...]] = []
    for index in range(TEXTS):
        length = min(numbers.choice(LENGTHS), longest)
        own = numbers.choice((0, 1, length // 2))
        found.append(tuple((books[index % 4][: length - own] + draw(own))[:length]))
    return found


@torch.inference_mode()
def expect(decoder: Decoder, prompts: Sequence[tuple[int, ...]], seed: int) -> list[Expected]:
    """What packed forwards write behind the prompts, and how likely it is."""
    vocabulary, device = decoder.config.vocab_size, decoder.device
    samplings = [
        Sampling(temperature=(0.0, 0.7, 1.0)[i % 3], top_p=(1.0, 0.9)[i % 2], seed=seed + i)
        for i in range(len(prompts))
    ]
    rows = [sampling.arguments(vocabulary) for sampling in samplings]
    t, k, p, m, s = (torch.cat(column).to(device) for column in zip(*rows, strict=True))
    texts = [list(prompt) for prompt in prompts]
    for _ in range(WRITTEN):
        counts_B = torch.tensor([len(text) for text in texts], device=device)
        last_BD = _packed(decoder, texts)[counts_B.cumsum(0) - 1]
        drawn = ops.sample(decoder.logits(last_BD), t, k, p, m, s, counts_B).tolist()
        for text, token in zip(texts, drawn, strict=True):
            text.append(token)
    return [
        Expected(
            prompt=prompt,
            sampling=sampling,
            tokens=tuple(text[len(prompt) :]),
            logprobs=tuple(
                decoder.logprobs(hidden_TD[:-1], torch.tensor(text[1:], device=device)).tolist()
            ),
        )
        for prompt, sampling, text, hidden_TD in zip(
            prompts,
            samplings,
            texts,
            _packed(decoder, texts).split([len(text) for text in texts]),
            strict=True,
        )
    ]


def _packed(decoder: Decoder, texts: Sequence[Sequence[int]]) -> Tensor:
    """The states of all tokens of all texts: what training runs."""
    device = decoder.device
    layout = BatchLayout.packed([len(text) for text in texts], device)
    tokens_T = torch.tensor([token for text in texts for token in text], device=device)
    return decoder(tokens_T, layout)


def early(decoder: Decoder) -> Decoder:
    """A draft model of a decoder's own first layers: a quarter of them, and no new weights."""
    config = decoder.config
    count = max(1, config.layers // 4)
    layers = config.sliding_window_layers
    small = Decoder.on_meta(
        dataclasses.replace(
            config, layers=count, sliding_window_layers=None if layers is None else layers[:count]
        ),
        decoder.dtype,
    )
    small.tok_embed, small.pos_embed = decoder.tok_embed, decoder.pos_embed
    small.norm = decoder.norm
    small.blocks, small.lm_head = decoder.blocks[:count], decoder.lm_head
    return small


# What is served


class _Oracle:
    """Knows the texts, and errs at times."""

    def __init__(self, texts: Sequence[Expected], numbers: random.Random) -> None:
        self._texts = {text.prompt: text for text in texts}
        self._numbers = numbers

    def propose(self, texts: Sequence[Text], most: int) -> list[tuple[int, ...]]:
        drafts: list[tuple[int, ...]] = []
        for text in texts:
            whole = self._texts[text.request.prompt]
            at = len(text.tokens) - len(whole.prompt)
            right = whole.tokens[at : at + min(most, 5)]
            drafts.append(tuple([0 if self._numbers.random() < 0.2 else t for t in right]))
        return drafts

    def forget(self, id: int) -> None:
        pass


class _Machinery:
    """The model, its draft, and for each size of blocks what runs them: kept from schedule to
    schedule, with all that those before have left in the blocks and in the recordings."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder, self.draft = decoder, early(decoder)
        self._runners: dict[tuple[Decoder, int], Runner] = {}

    def engine(self, limits: Limits, proposer: Proposer | None) -> Engine:
        engine = Engine(self.decoder, limits=limits, proposer=proposer)
        engine.runner = self._runner(self.decoder, limits)
        return engine

    def proposer(self, limits: Limits) -> Draft:
        draft = Draft(self.draft, dataclasses.replace(limits, budget=_TOKENS), most=3)
        draft.runner = self._runner(self.draft, limits)
        return draft

    def _runner(self, decoder: Decoder, limits: Limits) -> Runner:
        size = limits.block_size
        if (decoder, size) not in self._runners:
            most = Limits(
                blocks=_blocks(max(LENGTHS) + WRITTEN, size, 8) + 2,
                block_size=size,
                budget=_TOKENS,
                max_running=_RUNNING,
            )
            self._runners[decoder, size] = Runner(decoder, most)
        return self._runners[decoder, size]


_RUNNING, _TOKENS = 6, 256  # the most of a step


def _blocks(tokens: int, size: int, times: int) -> int:
    return -(-tokens // size) * times


class _Schedule:
    """One random way to serve some of the texts."""

    def __init__(
        self, machinery: _Machinery, texts: Sequence[Expected], numbers: random.Random
    ) -> None:
        self.numbers = numbers
        some = numbers.sample(texts, 4)  # few, so that they come again and are found in the cache
        self.chosen = [numbers.choice(some) for _ in range(numbers.randint(1, 8))]
        running, size = numbers.randint(1, _RUNNING), numbers.choice(SIZES)
        longest = max(len(text.prompt) + WRITTEN for text in self.chosen)
        self.limits = Limits(
            # Often hardly more than the longest needs, so that others are preempted for it.
            blocks=_blocks(longest, size, numbers.choice((1, 1, 2, 8))) + numbers.randint(0, 2),
            block_size=size,
            budget=running + numbers.choice((1, 7, 40, 40, 200, 200)),
            max_running=running,
        )
        proposers: tuple[Callable[[], Proposer | None], ...] = (
            lambda: None,
            lambda: Lookup(size=numbers.randint(1, 3)),
            lambda: machinery.proposer(self.limits),
            lambda: _Oracle(texts, numbers),
        )
        self.engine = machinery.engine(self.limits, numbers.choice(proposers)())
        self.got: dict[int, tuple[list[int], list[float], list[float]]] = {}
        self.ends: dict[int, Reason] = {}

    def run(self, counts: Counter[str]) -> str | None:
        """Serve them; what was not as expected, if anything was."""
        numbers, engine = self.numbers, self.engine
        coming = list(enumerate(self.chosen))
        while coming or engine.busy:
            while coming and (not engine.busy or numbers.random() < 0.3):
                self._ask(*coming.pop(0))
            for output in engine.step():
                self._hear(output)
            if numbers.random() < 0.005:
                engine.end(numbers.randrange(len(self.chosen)), Reason.CANCELLED)
        stats = engine.stats()
        for name in ("steps", "preemptions", "cached_tokens", "drafted_tokens", "accepted_tokens"):
            counts[name] += getattr(stats, name)
        if stats.blocks_used:
            return f"{stats.blocks_used} blocks were not given back: {self.limits}"
        found = [self._compare(id, text, counts) for id, text in enumerate(self.chosen)]
        return next((difference for difference in found if difference), None)

    def _ask(self, id: int, text: Expected) -> None:
        sampling = text.sampling
        options = Options(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=sampling.seed,
            logprobs=0,
            prompt_logprobs=0 if self.numbers.random() < 0.3 else None,
        )
        self.got[id] = [], [], []
        request = Request(
            id=id,
            prompt=text.prompt,
            max_tokens=WRITTEN,
            priority=self.numbers.choice((0, 0, -1, 1)),
            options=options,
        )
        self.engine.add(request)

    def _hear(self, output: Output) -> None:
        tokens, logprobs, of_prompt = self.got[output.id]
        tokens += output.tokens
        logprobs += [one.logprob for one in output.logprobs or ()]
        of_prompt += [one.logprob for one in output.prompt_logprobs or ()]
        if output.end is not None:
            self.ends[output.id] = output.end

    def _compare(self, id: int, text: Expected, counts: Counter[str]) -> str | None:
        tokens, logprobs, of_prompt = self.got[id]
        end = self.ends[id]
        complete = end is Reason.LENGTH and len(tokens) == WRITTEN
        first = len(text.prompt) - 1
        counts["logprobs"] += len(logprobs) + len(of_prompt)
        if not (complete or end is Reason.CANCELLED):
            what = f"ended by {end.value} after {len(tokens)} tokens"
        elif tokens != list(text.tokens[: len(tokens)]):
            what = f"{tokens} instead of {text.tokens}"
        elif len(logprobs) != len(tokens) or not (
            _same_bits(logprobs, text.logprobs[first:]) and _same_bits(of_prompt, text.logprobs)
        ):
            what = f"log-probabilities {of_prompt + logprobs}, expected {text.logprobs}"
        else:
            return None
        return f"a prompt of {first + 1} tokens: {what}; {self.limits}"


def _same_bits(some: Sequence[float], all: Sequence[float]) -> bool:
    """The first ones are the same.

    >>> _same_bits([0.5], [0.5, 1.0]), _same_bits([0.0], [-0.0])
    (True, False)
    """
    a, b = np.array(some, np.float32), np.array(all[: len(some)], np.float32)
    return a.tobytes() == b.tobytes()
