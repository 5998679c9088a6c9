"""From states to tokens: all requests of a step at once, each with options of its own.

    logits ─> penalties ─> bias ─> grammar ─> temperature, top-k, top-p, min-p ─> token
       └─> log-probabilities of the model       └─> those of the distribution drawn from

Most requests have neither penalties nor bias nor a grammar; their logits go straight to
`ops.sample`. The others' rows are taken out, processed in float32 and drawn by themselves, so that
nobody's draw depends on who else is there.

Reported log-probabilities are `Decoder.logprobs`: the bits that a packed forward gives.

Legend: R rows (one for each token to be drawn), V vocabulary, D channels, K likeliest tokens.
"""

# pyright: basic
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ingot import ops
from ingot.nn import Decoder
from ingot.serve.grammar import Matcher
from ingot.serve.output import Logprob
from ingot.serve.request import Request

CHUNK = 64  # rows whose logits are ranked at one time


class Sampled:
    """A request as the sampler knows it: its options, and what they have to remember."""

    __slots__ = ("biases", "counts", "matcher", "options", "penalized", "prompt", "special")

    def __init__(self, request: Request, matcher: Matcher | None = None) -> None:
        options = self.options = request.options
        self.matcher = matcher
        self.biases = (
            np.array([token for token, _ in options.bias], np.int64),
            np.array([value for _, value in options.bias], np.float32),
        )
        self.penalized = bool(
            options.presence_penalty or options.frequency_penalty or options.repetition_penalty != 1
        )
        self.prompt = request.prompt if self.penalized else ()
        self.counts: tuple[Tensor, Tensor] | None = None
        self.special = bool(self.penalized or options.bias or matcher)

    def counted(self, vocabulary: int) -> tuple[Tensor, Tensor]:
        """Which tokens are in the prompt, and how often each was generated: (V), (V)."""
        if self.counts is None:
            prompt_V = torch.zeros(vocabulary, dtype=torch.bool)
            prompt_V[torch.tensor(self.prompt)] = True
            self.counts = prompt_V, torch.zeros(vocabulary, dtype=torch.int32)
        return self.counts

    def take(self, tokens: Sequence[int]) -> None:
        """These were drawn, and count."""
        if self.counts is not None:
            for token in tokens:
                self.counts[1][token] += 1
        if self.matcher is not None:
            self.matcher.take(tokens)


class Row(NamedTuple):
    """A token to be drawn: of whom, its position, and the drafts right before it."""

    of: Sampled
    position: int
    drafts: tuple[int, ...] = ()


class Sampler:
    """Draws for a decoder.

    >>> from ingot.nn import preset
    >>> sampler = Sampler(Decoder.new(preset("tiny"), seed=0))
    >>> one = Sampled(Request(id=1, prompt=(5,), max_tokens=1))
    >>> tokens, logprobs = sampler.draw(torch.zeros(2, 64), [Row(one, 1), Row(one, 2)])
    >>> len(tokens), logprobs
    (2, [None, None])
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder, self.vocabulary = decoder, decoder.config.vocab_size
        self._of: list[Sampled] = []
        self._options: tuple[Tensor, ...] = ()

    @torch.inference_mode()
    def draw(
        self, hidden_RD: Tensor, rows: Sequence[Row]
    ) -> tuple[list[int], list[Logprob | None]]:
        """A token for each row, and its log-probability where it is asked for."""
        logits_RV = self.decoder.logits(hidden_RD)
        options = self._stacked([row.of for row in rows])
        options = *options, torch.tensor([row.position for row in rows])
        special = [index for index, row in enumerate(rows) if row.of.special]
        if len(special) < len(rows):
            drawn_R = ops.sample(logits_RV, *options)
        else:
            drawn_R = torch.zeros_like(options[-1])
        processed: dict[int, Tensor] = {}
        if special:
            some_S = torch.tensor(special)
            logits_SV = self._processed(logits_RV[some_S].float(), [rows[i] for i in special])
            drawn_R[some_S] = ops.sample(logits_SV, *(option[some_S] for option in options))
            processed = dict(zip(special, logits_SV, strict=True))
        tokens = drawn_R.tolist()
        found: list[Logprob | None] = [None] * len(rows)
        for kind, told in _groups(rows).items():
            wanted = [tokens[i] for i in told]
            some = torch.tensor(told)
            if kind[1]:
                logits = [processed.get(i, logits_RV[i]).float() for i in told]
                of_drawn = ops.truncate(torch.stack(logits), *(o[some] for o in options[:4]))
                scored = _drawn(of_drawn, wanted, kind[0])
            else:
                scored = self._scored(hidden_RD[some], logits_RV[some], wanted, kind[0])
            for index, logprob in zip(told, scored, strict=True):
                found[index] = logprob
        return tokens, found

    def _stacked(self, of: list[Sampled]) -> tuple[Tensor, ...]:
        """Temperature, top_k, top_p, min_p and seed of each row, often the same as before."""
        if of != self._of:
            options = [one.options for one in of]
            most = self.vocabulary
            self._options = (
                torch.tensor([o.temperature for o in options]),
                torch.tensor([min(o.top_k or most, most) for o in options]),
                torch.tensor([o.top_p for o in options]),
                torch.tensor([o.min_p for o in options]),
                torch.tensor([o.seed for o in options]),
            )
            self._of = of
        return self._options

    def _processed(self, logits_SV: Tensor, rows: list[Row]) -> Tensor:
        """The logits after penalties, bias and grammar."""
        penalized = [index for index, row in enumerate(rows) if row.of.penalized]
        if penalized:
            some = torch.tensor(penalized)
            logits_SV[some] = self._penalized(logits_SV[some], [rows[i] for i in penalized])
        for logits_V, row in zip(logits_SV.numpy(), rows, strict=True):
            np.add.at(logits_V, *row.of.biases)
            if row.of.matcher is not None:
                logits_V[~row.of.matcher.mask()] = -np.inf
        return logits_SV

    def _penalized(self, logits_SV: Tensor, rows: list[Row]) -> Tensor:
        counted = [row.of.counted(self.vocabulary) for row in rows]
        counts_SV = torch.stack([counts_V for _, counts_V in counted])
        for counts_V, row in zip(counts_SV, rows, strict=True):
            for token in row.drafts:
                counts_V[token] += 1
        options = [row.of.options for row in rows]
        return ops.penalize(
            logits_SV,
            torch.stack([prompt_V for prompt_V, _ in counted]),
            counts_SV,
            torch.tensor([o.repetition_penalty for o in options]),
            torch.tensor([o.presence_penalty for o in options]),
            torch.tensor([o.frequency_penalty for o in options]),
        )

    # What is told

    @torch.inference_mode()
    def score(self, hidden_RD: Tensor, tokens: Sequence[int], top: int) -> list[Logprob]:
        """The model's own log-probabilities of these tokens, and of so many likeliest ones."""
        found: list[Logprob] = []
        for at in range(0, len(tokens), CHUNK):
            hidden = hidden_RD[at : at + CHUNK]
            logits = self.decoder.logits(hidden) if top else None
            found += self._scored(hidden, logits, tokens[at : at + CHUNK], top)
        return found

    def _scored(
        self, hidden_RD: Tensor, logits_RV: Tensor | None, tokens: Sequence[int], top: int
    ) -> list[Logprob]:
        wanted_RK = torch.tensor(tokens)[:, None]
        if logits_RV is not None and top:
            wanted_RK = torch.cat([wanted_RK, logits_RV.topk(top).indices], dim=1)
        each = wanted_RK.shape[1]
        hidden = hidden_RD.repeat_interleave(each, 0) if each > 1 else hidden_RD
        logprobs_RK = self.decoder.logprobs(hidden, wanted_RK.flatten()).view(-1, each)
        return _logprobs(wanted_RK, logprobs_RK)


def _groups(rows: Sequence[Row]) -> dict[tuple[int, bool], list[int]]:
    """The rows that want log-probabilities, by how many likeliest ones and of which kind.

    Each number by itself: which tokens are among the likeliest may depend on it where some are
    equal.
    """
    groups: dict[tuple[int, bool], list[int]] = {}
    for index, row in enumerate(rows):
        options = row.of.options
        if options.logprobs is not None:
            groups.setdefault((options.logprobs, options.processed), []).append(index)
    return groups


def _drawn(logprobs_RV: Tensor, tokens: Sequence[int], top: int) -> list[Logprob]:
    """The log-probabilities of tokens in the distributions they were drawn from."""
    wanted_RK = torch.cat([torch.tensor(tokens)[:, None], logprobs_RV.topk(top).indices], dim=1)
    return _logprobs(wanted_RK, logprobs_RV.gather(1, wanted_RK))


def _logprobs(wanted_RK: Tensor, logprobs_RK: Tensor) -> list[Logprob]:
    """The first of each row is the token, the others are the likeliest."""
    found: list[Logprob] = []
    for tokens, logprobs in zip(wanted_RK.tolist(), logprobs_RK.tolist(), strict=True):
        pairs = zip(tokens[1:], logprobs[1:], strict=True)
        top = sorted((p for p in pairs if p[1] > -math.inf), key=lambda pair: -pair[1])
        found.append(Logprob(tokens[0], logprobs[0], tuple(top)))
    return found
