"""How near the engine comes to its limit, and what its shortcuts save.

    decode    a step of 1, 8 and 32 requests, in turns with reading as many bytes of memory as it
              has to: the weights, the keys and the values. The bandwidth of a machine with
              neighbours moves by half within a minute, so only turns as short as these compare.
    lookup    one request goes on copying a text, with and without `propose.Lookup`
    prefix    requests whose prompts begin alike, nine tokens of ten, one after the other: with the
              blocks of those before, and with a tenant each, who shares nothing

Shortcuts take turns with doing without, and both have to write the same, token for token.
"""

# pyright: basic
from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from statistics import mean, median

from ingot.bench.peaks import reader
from ingot.core.errors import IngotError
from ingot.interop.model import Model
from ingot.nn.decoder import Decoder
from ingot.nn.layout import KVSpec
from ingot.serving.engine.engine import Engine
from ingot.serving.engine.request import Options, Request
from ingot.serving.engine.speculate import Lookup

# Words that a model has no reason to write but for the copy.
TEXT = (
    "The harbour clock at Vessel Quay ran eleven minutes slow, and nobody would mend it. Sailors "
    "set their watches by the bakery instead, whose oven door opened at five, at nine and at noon. "
    "On Thursdays the baker slept late; on Thursdays, therefore, no ship ever left in time. "
)
PREFIX, PROMPT, SHARING = 288, 320, 16
BATCHES, STEPS, SHORT = (1, 8, 32), 100, 16
_MOST_READ = 2**30


@dataclass(frozen=True, kw_only=True)
class Decode:
    """A step that gives each of a batch one token: medians, and the median of the ratios."""

    batch: int
    step: float
    """Seconds."""
    reading: float
    """Seconds that reading the same bytes takes."""
    share_of_limit: float
    tokens_per_s: float


@dataclass(frozen=True, kw_only=True)
class Gain:
    """Seconds with a shortcut and without: medians of the rounds, as is their ratio."""

    name: str
    what: str
    without: float
    with_it: float
    ratio: float
    same: bool
    """Both wrote the same tokens in every round."""


def decode(
    model: Model, steps: int = STEPS, advance: Callable[[int], object] = lambda _: None
) -> list[Decode]:
    """Each batch for so many steps, after prompts of 16 tokens; `advance` hears of each step."""
    return [_decode(model.decoder, batch, steps, advance) for batch in BATCHES]


def _decode(decoder: Decoder, batch: int, steps: int, advance: Callable[[int], object]) -> Decode:
    engine, vocabulary = Engine(decoder), decoder.config.vocab_size
    for number in range(batch):
        prompt = tuple((7 * at + number) % vocabulary for at in range(SHORT))
        options = Options(temperature=0.0)
        engine.add(Request(id=number, prompt=prompt, max_tokens=steps + 3, options=options))
    spec = KVSpec.of(decoder)
    kept = spec.bytes_per_token if spec else 0
    wanted = _weights(decoder) + batch * (SHORT + steps // 2) * kept
    for _ in range(2):  # prompts; first touches, recordings
        engine.step()
    pairs = []
    with reader(min(wanted, _MOST_READ)) as (read, size):
        for _ in range(steps):
            pairs.append((_seconds(engine.step), _seconds(read) * wanted / size))
            advance(1)
    step = median(a for a, _ in pairs)
    return Decode(
        batch=batch,
        step=step,
        reading=median(b for _, b in pairs),
        share_of_limit=median(b / a for a, b in pairs),
        tokens_per_s=batch / step,
    )


def _weights(decoder: Decoder) -> int:
    """Bytes that a token needs read: of embeddings that are not also the head, a row or nothing."""
    read = dict.fromkeys(decoder.parameters())
    if decoder.lm_head is not None:
        del read[decoder.tok_embed.weight]
    return sum(parameter.nbytes for parameter in read)


def _seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def shortcuts(
    model: Model, rounds: int = 5, advance: Callable[[int], object] = lambda _: None
) -> list[Gain]:
    """Both shortcuts, each way once a round; `advance` hears of each round."""
    if not 1 <= rounds <= 1000:
        raise IngotError(f"{rounds} rounds", hint="give a number from 1 to 1000")
    return [_lookup(model, rounds, advance), _prefix(model, rounds, advance)]


def _lookup(model: Model, rounds: int, advance: Callable[[int], object]) -> Gain:
    ids = model.tokenizer.encode(TEXT)
    prompt = tuple(ids * 3 + ids[: len(ids) // 4])
    request = Request(id=0, prompt=prompt, max_tokens=len(ids), options=Options(temperature=0.0))
    plain = Engine(model.decoder)
    guessing = Engine(model.decoder, proposer=Lookup())

    def run(engine: Engine) -> tuple[float, list[int]]:
        """Seconds of all but the first token, whose prompt both compute alike."""
        engine.add(request)
        tokens: list[int] = []
        begin = time.perf_counter()
        while engine.busy:
            for output in engine.step():
                if output.tokens and not tokens:
                    begin = time.perf_counter()
                tokens += output.tokens
        return time.perf_counter() - begin, tokens

    what = (
        f"{request.max_tokens} tokens of a text that the prompt holds three times, batch 1: seconds"
    )
    return _gain("lookup", what, lambda: run(plain), lambda: run(guessing), rounds, advance)


def _prefix(model: Model, rounds: int, advance: Callable[[int], object]) -> Gain:
    engine, vocabulary = Engine(model.decoder), model.decoder.config.vocab_size
    turns = {True: count(1), False: count(1)}

    def run(alone: bool) -> tuple[float, list[int]]:
        """The mean time to a first token. A round has a prefix of its own, which nobody has yet."""
        turn = next(turns[alone])
        prefix = [(7 * at + turn) % vocabulary for at in range(PREFIX)]
        times: list[float] = []
        tokens: list[int] = []
        for own in range(SHARING):
            rest = [(11 * at + own + 1) % vocabulary for at in range(PROMPT - PREFIX)]
            salt = bytes([own + 1]) if alone else b""
            options = Options(temperature=0.0)
            begin = time.perf_counter()
            engine.add(
                Request(id=own, prompt=(*prefix, *rest), max_tokens=1, salt=salt, options=options)
            )
            while engine.busy:
                for output in engine.step():
                    tokens += output.tokens
            times.append(time.perf_counter() - begin)
        return mean(times), tokens

    what = f"{SHARING} prompts of {PROMPT} tokens, {PREFIX} of them shared: mean seconds to a token"
    return _gain("prefix", what, lambda: run(True), lambda: run(False), rounds, advance)


def _gain(
    name: str,
    what: str,
    without: Callable[[], tuple[float, list[int]]],
    with_it: Callable[[], tuple[float, list[int]]],
    rounds: int,
    advance: Callable[[int], object],
) -> Gain:
    for once in (without, with_it):  # first touches, recordings
        once()
    pairs = []
    for _ in range(rounds):
        pairs.append((without(), with_it()))
        advance(1)
    return Gain(
        name=name,
        what=what,
        without=median(a[0] for a, _ in pairs),
        with_it=median(b[0] for _, b in pairs),
        ratio=median(a[0] / b[0] for a, b in pairs),
        same=all(a[1] == b[1] for a, b in pairs),
    )
