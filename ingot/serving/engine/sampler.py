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

import numpy as np
import torch
from torch import Tensor

from ingot import ops
from ingot.nn import Decoder
from ingot.serving.engine.grammar import Matcher
from ingot.serving.engine.output import Logprob
from ingot.serving.engine.request import Request

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
        self.counts: tuple[np.ndarray, np.ndarray] | None = None
        self.special = bool(self.penalized or options.bias or matcher)

    def counted(self, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
        """Which tokens are in the prompt, and how often each was generated: (V), (V)."""
        if self.counts is None:
            prompt_V = np.zeros(vocabulary, np.bool_)
            prompt_V[list(self.prompt)] = True
            self.counts = prompt_V, np.zeros(vocabulary, np.int32)
        return self.counts

    def take(self, tokens: Sequence[int]) -> None:
        """These were drawn, and count."""
        if self.counts is not None:
            for token in tokens:
                self.counts[1][token] += 1
        if self.matcher is not None:
            self.matcher.take(tokens)


class Sampler:
    """Draws for a decoder.

    >>> from ingot.nn import preset
    >>> sampler = Sampler(Decoder.from_config(preset("tiny"), seed=0))
    >>> one = Sampled(Request(id=1, prompt=(5,), max_tokens=1))
    >>> with torch.inference_mode():
    ...     tokens, logprobs = sampler.draw(torch.zeros(2, 64), [one, one], [1, 2])
    >>> len(tokens), logprobs
    (2, {})
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder, self.vocabulary = decoder, decoder.config.vocab_size
        self._device = decoder.device
        self._batch = _Batch([], self.vocabulary, self._device)

    def draw(
        self,
        hidden_RD: Tensor,
        of: list[Sampled],
        positions: Sequence[int],
        drafts: Sequence[tuple[int, ...]] | None = None,
    ) -> tuple[list[int], dict[int, Logprob]]:
        """A token for each row, and by row its log-probability where it is asked for.

        A row is of some request, for some position, with some drafts right before it.
        """
        batch = self._batch
        if of != batch.of:
            batch = self._batch = _Batch(of, self.vocabulary, self._device)
        batch.place(positions)
        logits_RV = self.decoder.logits(hidden_RD)
        if not (batch.special or batch.told):
            return ops.sample(logits_RV, *batch.options).tolist(), {}
        drawn_R = ops.sample(logits_RV, *batch.options)
        processed: dict[int, Tensor] = {}
        if batch.special:
            some_S = torch.tensor(batch.special)
            before = [drafts[row] if drafts else () for row in batch.special]
            logits_SV = self._processed(
                logits_RV[some_S].float(), [of[row] for row in batch.special], before
            )
            drawn_R[some_S] = ops.sample(logits_SV, *(option[some_S] for option in batch.options))
            processed = dict(zip(batch.special, logits_SV, strict=True))
        tokens = drawn_R.tolist()
        return tokens, self._told(batch, tokens, hidden_RD, logits_RV, processed)

    def _processed(
        self, logits_SV: Tensor, of: list[Sampled], drafts: list[tuple[int, ...]]
    ) -> Tensor:
        """The logits after penalties, bias and grammar."""
        penalized = [row for row, one in enumerate(of) if one.penalized]
        if penalized:
            some = torch.tensor(penalized)
            logits_SV[some] = self._penalized(
                logits_SV[some], [of[row] for row in penalized], [drafts[row] for row in penalized]
            )
        here_SV = logits_SV.cpu()
        for logits_V, one in zip(here_SV.numpy(), of, strict=True):
            np.add.at(logits_V, *one.biases)
            if one.matcher is not None:
                logits_V[~one.matcher.mask()] = -np.inf
        return here_SV.to(self._device)

    def _penalized(
        self, logits_SV: Tensor, of: list[Sampled], drafts: list[tuple[int, ...]]
    ) -> Tensor:
        counted = [one.counted(self.vocabulary) for one in of]
        counts_SV = np.stack([counts_V for _, counts_V in counted])
        for counts_V, before in zip(counts_SV, drafts, strict=True):
            for token in before:
                counts_V[token] += 1
        options = [one.options for one in of]
        arguments = (
            torch.from_numpy(np.stack([prompt_V for prompt_V, _ in counted])),
            torch.from_numpy(counts_SV),
            torch.tensor([o.repetition_penalty for o in options]),
            torch.tensor([o.presence_penalty for o in options]),
            torch.tensor([o.frequency_penalty for o in options]),
        )
        return ops.apply_penalties(
            logits_SV, *(argument.to(self._device) for argument in arguments)
        )

    # What is told

    def _told(
        self,
        batch: _Batch,
        tokens: list[int],
        hidden_RD: Tensor,
        logits_RV: Tensor,
        processed: dict[int, Tensor],
    ) -> dict[int, Logprob]:
        found: dict[int, Logprob] = {}
        for (top, of_drawn), rows in batch.told.items():
            wanted, some = [tokens[row] for row in rows], torch.tensor(rows)
            if of_drawn:
                logits = torch.stack([processed.get(row, logits_RV[row]).float() for row in rows])
                options = [option[some] for option in batch.options[:4]]
                scored = _drawn(ops.sampling_logprobs(logits, *options), wanted, top)
            else:
                scored = self._scored(hidden_RD[some], logits_RV[some], wanted, top)
            found |= zip(rows, scored, strict=True)
        return found

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
        wanted_RK = torch.tensor(tokens, device=self._device)[:, None]
        if logits_RV is not None and top:
            wanted_RK = torch.cat([wanted_RK, logits_RV.topk(top).indices], dim=1)
        each = wanted_RK.shape[1]
        hidden = hidden_RD.repeat_interleave(each, 0) if each > 1 else hidden_RD
        logprobs_RK = self.decoder.logprobs(hidden, wanted_RK.flatten()).view(-1, each)
        return _logprobs(wanted_RK, logprobs_RK)


class _Batch:
    """What does not change while the rows are of the same requests."""

    def __init__(self, of: list[Sampled], vocabulary: int, device: torch.device) -> None:
        self.of = of
        options = [one.options for one in of]
        positions = np.zeros(len(of), np.int64)
        self._positions, self._host = positions.data, torch.from_numpy(positions)
        columns = (
            torch.tensor([o.temperature for o in options], dtype=torch.float32),
            torch.tensor([min(o.top_k or vocabulary, vocabulary) for o in options]),
            torch.tensor([o.top_p for o in options], dtype=torch.float32),
            torch.tensor([o.min_p for o in options], dtype=torch.float32),
            torch.tensor([o.seed for o in options]),
            self._host,
        )
        self.options = tuple(column.to(device) for column in columns)
        self.special = [row for row, one in enumerate(of) if one.special]
        # By how many likeliest tokens and of which kind. Each number by itself: which tokens are
        # among the likeliest may depend on it where some are equal.
        self.told: dict[tuple[int, bool], list[int]] = {}
        for row, o in enumerate(options):
            if o.logprobs is not None:
                self.told.setdefault((o.logprobs, o.processed), []).append(row)

    def place(self, positions: Sequence[int]) -> None:
        """The positions to draw for, a row each."""
        for row, position in enumerate(positions):
            self._positions[row] = position
        if self.options[-1] is not self._host:
            self.options[-1].copy_(self._host)


def _drawn(logprobs_RV: Tensor, tokens: Sequence[int], top: int) -> list[Logprob]:
    """The log-probabilities of tokens in the distributions they were drawn from."""
    wanted_RK = torch.tensor(tokens, device=logprobs_RV.device)[:, None]
    wanted_RK = torch.cat([wanted_RK, logprobs_RV.topk(top).indices], dim=1)
    return _logprobs(wanted_RK, logprobs_RV.gather(1, wanted_RK))


def _logprobs(wanted_RK: Tensor, logprobs_RK: Tensor) -> list[Logprob]:
    """The first of each row is the token, the others are the likeliest."""
    found: list[Logprob] = []
    for tokens, logprobs in zip(wanted_RK.tolist(), logprobs_RK.tolist(), strict=True):
        pairs = zip(tokens[1:], logprobs[1:], strict=True)
        top = sorted((p for p in pairs if p[1] > -math.inf), key=lambda pair: -pair[1])
        found.append(Logprob(tokens[0], logprobs[0], tuple(top)))
    return found
