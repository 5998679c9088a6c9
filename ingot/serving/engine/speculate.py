"""Guesses at the tokens that come next: a step that reads all weights may as well try some.

A proposer gives drafts: tokens that may follow. They are computed in the next step like any others,
and where a draft is what is drawn anyway, the step has brought a token more. What is drawn depends
on seed and position alone, so the text is the same at any temperature, whoever guesses.

    Lookup    what followed when the last few tokens stood there before: quoting, editing, code
    Draft     what a smaller model of the same vocabulary would draw
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
import torch

from ingot.core.errors import ConfigError
from ingot.nn import Decoder
from ingot.serving.engine.request import Options, Request
from ingot.serving.engine.runner import Runner
from ingot.serving.engine.sampler import Sampled, Sampler
from ingot.serving.engine.scheduler import Limits, Work


class Text(Protocol):
    """A request and its tokens so far."""

    request: Request
    tokens: list[int]


class Proposer(Protocol):
    """Guesses at the tokens that come next."""

    def propose(self, texts: Sequence[Text], most: int) -> list[tuple[int, ...]]:
        """For each text up to `most` tokens that may follow; none is fine."""
        ...

    def forget(self, id: int) -> None:
        """A request has ended."""
        ...


class Lookup:
    """What followed when the last `size` tokens stood there before, in the text itself.

    >>> from types import SimpleNamespace
    >>> text = SimpleNamespace(request=Request(id=1, prompt=(1,), max_tokens=9), tokens=[])
    >>> text.tokens = [1, 2, 3, 4, 5, 6, 1, 2, 3]
    >>> Lookup(size=3).propose([text], most=4)
    [(4, 5, 6, 1)]
    """

    def __init__(self, *, size: int = 3, most: int = 15) -> None:
        for name, value in (("size", size), ("most", most)):
            if not 1 <= value <= 64:
                raise ConfigError(f"{name} is {value}", hint="give a number from 1 to 64")
        self.size, self.most = size, most
        self._seen: dict[int, dict[tuple[int, ...], int]] = {}

    def propose(self, texts: Sequence[Text], most: int) -> list[tuple[int, ...]]:
        """For each text what followed the last time."""
        most = min(most, self.most)
        return [self._follow(text.request.id, text.tokens, most) for text in texts]

    def forget(self, id: int) -> None:
        """A request has ended."""
        self._seen.pop(id, None)

    def _follow(self, id: int, tokens: list[int], most: int) -> tuple[int, ...]:
        seen, size = self._seen.setdefault(id, {}), self.size
        # `seen` has an entry for each place up to where it was last: those since are new.
        for end in range(max(size, seen.get((), size)), len(tokens)):
            seen[tuple(tokens[end - size : end])] = end
        seen[()] = len(tokens)
        found = seen.get(tuple(tokens[-size:]))
        if found is None:
            return ()
        draft = tokens[found : found + most]
        while len(draft) < most:  # it repeats itself
            draft += draft[: most - len(draft)]
        return tuple(draft)


class _Known:
    """What the small model has of a text."""

    __slots__ = ("guessed", "sampled", "sure", "table")

    def __init__(self, request: Request) -> None:
        options = request.options
        plain = Options(
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            seed=options.seed,
        )
        self.sampled = Sampled(msgspec.structs.replace(request, options=plain))
        self.sure = 0  # the tokens of the text whose keys and values it has
        self.guessed: list[int] = []  # and behind them those of its own drafts
        self.table: tuple[int, ...] = ()


class Draft:
    """What a smaller model would draw, with the same seed at the same position.

    >>> from ingot.nn import preset
    >>> small = Draft(Decoder.from_config(preset("tiny"), seed=0), Limits(blocks=8), most=2)
    >>> small.propose([], most=2)
    []
    """

    def __init__(self, decoder: Decoder, limits: Limits, *, most: int = 4) -> None:
        if not 1 <= most <= 64:
            raise ConfigError(f"most is {most}", hint="give a number from 1 to 64")
        self.decoder, self.limits, self.most = decoder, limits, most
        self.runner, self.sampler = Runner(decoder, limits), Sampler(decoder)
        self._free = list(range(limits.blocks))
        self._known: dict[int, _Known] = {}

    @torch.inference_mode()
    def propose(self, texts: Sequence[Text], most: int) -> list[tuple[int, ...]]:
        """For each text that it has read, so many tokens; a long one is read in several calls."""
        most = min(most, self.most)
        drafts: dict[int, tuple[int, ...]] = {}
        work = self._reading(texts, most)
        while work:
            drawn = self._draw(work)
            for id, (_, token) in drawn.items():
                drafts[id] = (*drafts.get(id, ()), token)
            if len(next(iter(drafts.values()), ())) == most:
                break
            work = [self._go_on(id, position, token) for id, (position, token) in drawn.items()]
        return [drafts.get(text.request.id, ()) for text in texts]

    def forget(self, id: int) -> None:
        """A request has ended."""
        known = self._known.pop(id, None)
        if known is not None:
            self._free += known.table

    def _reading(self, texts: Sequence[Text], most: int) -> list[Work]:
        """What is new in each text, as far as the budget goes."""
        work: list[Work] = []
        left = self.limits.budget
        for text in texts[: self.limits.max_running]:
            item = self._read(text, most, left) if left else None
            if item is not None:
                work.append(item)
                left -= len(item.tokens)
        return work

    def _read(self, text: Text, most: int, left: int) -> Work | None:
        """What is new in a text; None where there is no room for it."""
        id, tokens = text.request.id, text.tokens
        known = self._known.get(id)
        if known is None:
            known = self._known[id] = _Known(text.request)
        count = -(-(len(tokens) + most) // self.limits.block_size) - len(known.table)
        if count > len(self._free) or len(tokens) + most > self.decoder.config.max_seq_len:
            return None
        if count > 0:
            known.table += tuple(self._free[-count:])
            del self._free[-count:]
        start = known.sure
        for token in known.guessed:  # the last token is read in any case, to draw the next
            if start == len(tokens) - 1 or token != tokens[start]:
                break
            start += 1
        new = tuple(tokens[start : start + left])
        known.sure, known.guessed = start + len(new), []
        return Work(id, start, new, known.table, known.sure == len(tokens))

    def _draw(self, work: list[Work]) -> dict[int, tuple[int, int]]:
        """One forward: by request the position and the token that may come next."""
        hidden_TD = self.runner.run(work)
        last = torch.tensor([len(item.tokens) for item in work]).cumsum(0) - 1
        ready = [index for index, item in enumerate(work) if item.samples]
        if not ready:
            return {}
        items = [work[index] for index in ready]
        of = [self._known[item.id].sampled for item in items]
        positions = [item.start + len(item.tokens) for item in items]
        drawn, _ = self.sampler.draw(hidden_TD[last[ready]], of, positions)
        ids = [item.id for item in items]
        return dict(zip(ids, zip(positions, drawn, strict=True), strict=True))

    def _go_on(self, id: int, position: int, token: int) -> Work:
        known = self._known[id]
        known.guessed.append(token)
        return Work(id, position, (token,), known.table, True)
