"""Sampler: from hidden states to tokens, for all requests of a step, each with its own parameters.

    logits ─> penalties ─> bias ─> grammar ─> temperature, top-k, top-p, min-p ─> token
       └─> log-probabilities of the model       └─> those of the distribution sampled from

Most requests have neither penalties nor bias nor a grammar; their logits go straight to
`ops.sample`. The rows of the others are processed in float32 and sampled separately, so that no
request's token depends on the rest of the batch.

Reported log-probabilities are `Decoder.logprobs`: bitwise equal to those of a packed forward pass.

Legend: R rows (one for each sampled token), V vocabulary, D channels, K most likely tokens.
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
from ingot.serving.engine.grammar import GrammarMatcher
from ingot.serving.engine.output import Logprob
from ingot.serving.engine.request import Request
from ingot.serving.engine.sampling_params import SamplingParams

CHUNK = 64  # rows whose logits are ranked at one time


class SamplingState:
    """Sampling parameters of a request, and the state they need."""

    __slots__ = (
        "biases",
        "counts",
        "matcher",
        "needs_logit_processing",
        "params",
        "penalized",
        "prompt",
    )

    def __init__(self, request: Request, matcher: GrammarMatcher | None = None) -> None:
        params = self.params = request.sampling_params
        self.matcher = matcher
        self.biases = (
            np.array([token for token, _ in params.logit_bias], np.int64),
            np.array([value for _, value in params.logit_bias], np.float32),
        )
        self.penalized = bool(
            params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
        )
        self.prompt = request.prompt if self.penalized else ()
        self.counts: tuple[np.ndarray, np.ndarray] | None = None
        self.needs_logit_processing = bool(self.penalized or params.logit_bias or matcher)

    def count_work(self, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
        """Return which tokens are in the prompt, and how often each was generated: (V), (V)."""
        if self.counts is None:
            prompt_V = np.zeros(vocabulary, np.bool_)
            prompt_V[list(self.prompt)] = True
            self.counts = prompt_V, np.zeros(vocabulary, np.int32)
        return self.counts

    def append(self, tokens: Sequence[int]) -> None:
        """Record sampled tokens."""
        if self.counts is not None:
            for token in tokens:
                self.counts[1][token] += 1
        if self.matcher is not None:
            self.matcher.accept(tokens)


class Sampler:
    """Samples tokens for a decoder.

    >>> from ingot.nn import preset
    >>> sampler = Sampler(Decoder.from_config(preset("tiny"), seed=0))
    >>> one = SamplingState(Request(id=1, prompt=(5,), max_tokens=1))
    >>> with torch.inference_mode():
    ...     tokens, logprobs = sampler.sample(torch.zeros(2, 64), [one, one], [1, 2])
    >>> len(tokens), logprobs
    (2, {})
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder, self.vocabulary = decoder, decoder.config.vocab_size
        self._device = decoder.device
        self._batch = _Batch([], self.vocabulary, self._device)

    def sample(
        self,
        hidden_RD: Tensor,
        states: list[SamplingState],
        positions: Sequence[int],
        drafts: Sequence[tuple[int, ...]] | None = None,
    ) -> tuple[list[int], dict[int, Logprob]]:
        """Return a token for each row, and log-probabilities by row where requested.

        A row belongs to a request, at a position, after some of its draft tokens.
        """
        batch = self._batch
        if states != batch.states:
            batch = self._batch = _Batch(states, self.vocabulary, self._device)
        batch.set_positions(positions)
        logits_RV = self.decoder.logits(hidden_RD)
        if not (batch.needs_logit_processing or batch.logprob_rows):
            return ops.sample(logits_RV, *batch.params).tolist(), {}
        sampled_R = ops.sample(logits_RV, *batch.params)
        processed: dict[int, Tensor] = {}
        if batch.needs_logit_processing:
            some_S = torch.tensor(batch.needs_logit_processing)
            before = [drafts[row] if drafts else () for row in batch.needs_logit_processing]
            logits_SV = self._processed(
                logits_RV[some_S].float(),
                [states[row] for row in batch.needs_logit_processing],
                before,
            )
            sampled_R[some_S] = ops.sample(logits_SV, *(option[some_S] for option in batch.params))
            processed = dict(zip(batch.needs_logit_processing, logits_SV, strict=True))
        tokens = sampled_R.tolist()
        return tokens, self._collect_logprobs(batch, tokens, hidden_RD, logits_RV, processed)

    def _processed(
        self, logits_SV: Tensor, states: list[SamplingState], drafts: list[tuple[int, ...]]
    ) -> Tensor:
        """Apply penalties, bias and grammar to the logits."""
        penalized = [row for row, one in enumerate(states) if one.penalized]
        if penalized:
            some = torch.tensor(penalized)
            logits_SV[some] = self._penalized(
                logits_SV[some],
                [states[row] for row in penalized],
                [drafts[row] for row in penalized],
            )
        here_SV = logits_SV.cpu()
        for logits_V, one in zip(here_SV.numpy(), states, strict=True):
            np.add.at(logits_V, *one.biases)
            if one.matcher is not None:
                logits_V[~one.matcher.mask()] = -np.inf
        return here_SV.to(self._device)

    def _penalized(
        self, logits_SV: Tensor, states: list[SamplingState], drafts: list[tuple[int, ...]]
    ) -> Tensor:
        counted = [one.count_work(self.vocabulary) for one in states]
        counts_SV = np.stack([counts_V for _, counts_V in counted])
        for counts_V, before in zip(counts_SV, drafts, strict=True):
            for token in before:
                counts_V[token] += 1
        params = [one.params for one in states]
        arguments = (
            torch.from_numpy(np.stack([prompt_V for prompt_V, _ in counted])),
            torch.from_numpy(counts_SV),
            torch.tensor([o.repetition_penalty for o in params]),
            torch.tensor([o.presence_penalty for o in params]),
            torch.tensor([o.frequency_penalty for o in params]),
        )
        return ops.apply_penalties(
            logits_SV, *(argument.to(self._device) for argument in arguments)
        )

    # Log-probabilities

    def _collect_logprobs(
        self,
        batch: _Batch,
        tokens: list[int],
        hidden_RD: Tensor,
        logits_RV: Tensor,
        processed: dict[int, Tensor],
    ) -> dict[int, Logprob]:
        found: dict[int, Logprob] = {}
        for (top, mode), rows in batch.logprob_rows.items():
            wanted, some = [tokens[row] for row in rows], torch.tensor(rows)
            if mode == "processed":
                logits = torch.stack([processed.get(row, logits_RV[row]).float() for row in rows])
                params = [option[some] for option in batch.params[:4]]
                scored = _processed_logprobs(ops.sampling_logprobs(logits, *params), wanted, top)
            else:
                scored = self._scored(hidden_RD[some], logits_RV[some], wanted, top)
            found |= zip(rows, scored, strict=True)
        return found

    def score(self, hidden_RD: Tensor, tokens: Sequence[int], top: int) -> list[Logprob]:
        """Return raw log-probabilities of the tokens, and of the `top` most likely ones."""
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
    """Tensors that stay the same while the rows belong to the same requests."""

    def __init__(self, states: list[SamplingState], vocabulary: int, device: torch.device) -> None:
        self.states = states
        params = [one.params for one in states]
        positions = np.zeros(len(states), np.int64)
        self._positions, self._host = positions.data, torch.from_numpy(positions)
        self.params = (*sampling_tensors(params, vocabulary, device), self._host.to(device))
        self.needs_logit_processing = [
            row for row, one in enumerate(states) if one.needs_logit_processing
        ]
        # By how many likeliest tokens and of which kind. Each number by itself: which tokens are
        # among the likeliest may depend on it where some are equal.
        self.logprob_rows: dict[tuple[int, str], list[int]] = {}
        for row, o in enumerate(params):
            if o.logprobs is not None:
                self.logprob_rows.setdefault((o.logprobs, o.logprobs_mode), []).append(row)

    def set_positions(self, positions: Sequence[int]) -> None:
        """Set the position of each row."""
        for row, position in enumerate(positions):
            self._positions[row] = position
        if self.params[-1] is not self._host:
            self.params[-1].copy_(self._host)


def sampling_tensors(
    params: Sequence[SamplingParams], vocab_size: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Temperature, top_k, top_p, min_p and seed as `ops.sample` takes them, (R) each."""
    columns = (
        torch.tensor([p.temperature for p in params], dtype=torch.float32),
        torch.tensor([min(p.top_k or vocab_size, vocab_size) for p in params]),
        torch.tensor([p.top_p for p in params], dtype=torch.float32),
        torch.tensor([p.min_p for p in params], dtype=torch.float32),
        torch.tensor([p.seed for p in params]),
    )
    t, k, p, m, s = (column.to(device) for column in columns)
    return t, k, p, m, s


def _processed_logprobs(logprobs_RV: Tensor, tokens: Sequence[int], top: int) -> list[Logprob]:
    """Return log-probabilities of tokens in the distributions they were sampled from."""
    wanted_RK = torch.tensor(tokens, device=logprobs_RV.device)[:, None]
    wanted_RK = torch.cat([wanted_RK, logprobs_RV.topk(top).indices], dim=1)
    return _logprobs(wanted_RK, logprobs_RV.gather(1, wanted_RK))


def _logprobs(wanted_RK: Tensor, logprobs_RK: Tensor) -> list[Logprob]:
    """Build `Logprob`s; the first of each row is the token, the others are the most likely."""
    found: list[Logprob] = []
    for tokens, logprobs in zip(wanted_RK.tolist(), logprobs_RK.tolist(), strict=True):
        pairs = zip(tokens[1:], logprobs[1:], strict=True)
        top = sorted((p for p in pairs if p[1] > -math.inf), key=lambda pair: -pair[1])
        found.append(Logprob(tokens[0], logprobs[0], tuple(top)))
    return found
