"""Sampler: from hidden states to tokens, for all requests of a step, each with its own parameters.

    logits ─> penalties ─> bias ─> grammar ─> temperature, top-k, top-p, min-p ─> token
       └─> log-probabilities of the model       └─> those of the distribution sampled from

Logits are in float32 and, on the CPU, computed once: tokens are sampled from the distribution whose
log-probabilities are reported. These are bitwise equal to `Decoder.logprobs` of a packed forward
pass; on the CPU, `processed` ones are too at temperature 1 without truncation.

Most requests have neither penalties nor bias nor a grammar; their logits go straight to
`ops.sample`. The rows of the others are processed and sampled separately, so that no request's
token depends on the rest of the batch.

Everything is computed on the decoder's device. Parameters are copied there when the rows change,
counts and grammar masks in every step; tokens and log-probabilities come back in one copy.

Legend: R rows (one for each sampled token), S rows whose logits are processed, P of them with
penalties, M with a grammar, G rows of a group, V vocabulary, D channels, K most likely tokens.
"""

# pyright: basic
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from ingot import ops
from ingot.nn import Decoder
from ingot.serving.engine.grammar import GrammarMatcher
from ingot.serving.engine.output import Logprob
from ingot.serving.engine.request import Request
from ingot.serving.engine.sampling_params import SamplingParams
from ingot.serving.engine.staging import copy_to_device, copy_to_host

CHUNK = 64  # rows whose logits are in memory at one time
UNCHANGED = SamplingParams(temperature=1.0)  # samples from the model's own distribution


class SamplingState:
    """Sampling parameters of a request, and the state they need."""

    __slots__ = (
        "biases",
        "counts",
        "generated",
        "id",
        "matcher",
        "needs_logit_processing",
        "params",
        "penalized",
        "prompt",
    )

    def __init__(self, request: Request, matcher: GrammarMatcher | None = None) -> None:
        self.id = request.id
        params = self.params = request.sampling_params
        self.matcher = matcher
        self.biases = _split_biases(params.logit_bias)
        self.penalized = bool(
            params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
        )
        self.prompt = request.prompt if self.penalized else ()
        self.generated = request.generated if self.penalized else ()
        self.counts: tuple[np.ndarray, np.ndarray] | None = None
        self.needs_logit_processing = bool(self.penalized or params.logit_bias or matcher)

    def count_work(self, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
        """Return which tokens are in the prompt, and how often each was generated: (V), (V)."""
        if self.counts is None:
            prompt_V = np.zeros(vocabulary, np.bool_)
            prompt_V[list(self.prompt)] = True
            counts_V = np.bincount(np.array(self.generated, np.int64), minlength=vocabulary)
            self.counts = prompt_V, counts_V.astype(np.int32)
        return self.counts

    def append(self, tokens: Sequence[int]) -> None:
        """Record sampled tokens."""
        if self.counts is not None:
            for token in tokens:
                self.counts[1][token] += 1
        if self.matcher is not None:
            self.matcher.accept(tokens)


OnLogits: TypeAlias = Callable[
    [Sequence[SamplingState], Sequence[tuple[int, ...]] | None, Tensor], object
]
"""Takes the states, the draft tokens before each row, and the logits (R, V)."""


class Sampler:
    """Samples tokens for a decoder. `on_logits` is called in every step, before sampling.

    >>> from ingot.nn import preset
    >>> sampler = Sampler(Decoder.from_config(preset("tiny"), seed=0))
    >>> one = SamplingState(Request(id=1, prompt=(5,), max_tokens=1))
    >>> positions = torch.tensor([1, 2])
    >>> with torch.inference_mode():
    ...     tokens, logprobs = sampler.sample(torch.zeros(2, 64), [one, one], positions)
    >>> len(tokens), logprobs
    (2, {})
    """

    def __init__(self, decoder: Decoder, on_logits: OnLogits | None = None) -> None:
        self.decoder, self.vocabulary = decoder, decoder.config.vocab_size
        self._on_logits = on_logits
        self._device = decoder.device
        self._batch = _Batch([], self.vocabulary, self._device)

    def sample(
        self,
        hidden_RD: Tensor,
        states: list[SamplingState],
        positions_R: Tensor,
        drafts: Sequence[tuple[int, ...]] | None = None,
    ) -> tuple[list[int], dict[int, Logprob]]:
        """Return a token for each row, and log-probabilities by row where requested.

        A row belongs to a request, at a position, after some of its draft tokens.
        """
        batch = self._batch
        if states != batch.states:
            batch = self._batch = _Batch(states, self.vocabulary, self._device)
        logits_RV = self.decoder.logits(hidden_RD)
        if self._on_logits is not None:
            self._on_logits(states, drafts, logits_RV)
        sampled_R = ops.sample(logits_RV, *batch.params, positions_R)
        processing, logits_SV = batch.processing, None
        if processing is not None:
            logits_SV = processing.apply(logits_RV, drafts)
            positions_S = positions_R.index_select(0, processing.rows_S)
            sampled_S = ops.sample(logits_SV, *processing.params, positions_S)
            sampled_R.index_copy_(0, processing.rows_S, sampled_S)
        if not batch.logprob_groups:
            return sampled_R.tolist(), {}
        scored: list[Tensor] = []
        for group in batch.logprob_groups:
            scored += self._score_group(group, sampled_R, hidden_RD, logits_RV, logits_SV)
        tokens, *lists = copy_to_host(sampled_R, *scored)
        found: dict[int, Logprob] = {}
        for index, group in enumerate(batch.logprob_groups):
            found |= zip(group.rows, _logprobs(*lists[2 * index : 2 * index + 2]), strict=True)
        return tokens, found

    # Log-probabilities

    def _score_group(
        self,
        group: _LogprobGroup,
        sampled_R: Tensor,
        hidden_RD: Tensor,
        logits_RV: Tensor,
        logits_SV: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the sampled and the most likely tokens of a group, and their log-probabilities."""
        tokens_G, on_cpu = group.select(sampled_R), self._device.type == "cpu"
        if not group.top and on_cpu and group.unchanged:
            logprobs_G = ops.token_logprobs(group.select(logits_RV), tokens_G)
            return tokens_G[:, None], logprobs_G[:, None]
        if not group.top and group.mode == "raw":
            # The Triton kernels of both forms differ in float32's last bits; this is training's.
            logprobs_G = self.decoder.logprobs(group.select(hidden_RD), tokens_G)
            return tokens_G[:, None], logprobs_G[:, None]
        logits_GV = group.select(logits_RV)
        if len(group.processed_to):
            assert logits_SV is not None
            processed = logits_SV.index_select(0, group.processed_from)
            logits_GV = logits_GV.index_copy(0, group.processed_to, processed)
        return _rank(ops.sampling_logprobs(logits_GV, *group.params), tokens_G, group.top)

    def score(self, hidden_RD: Tensor, tokens: Sequence[int], top: int) -> list[Logprob]:
        """Return raw log-probabilities of the tokens, and of the `top` most likely ones."""
        (tokens_R,) = copy_to_device([np.array(tokens, np.int64)], self._device)
        scored: list[Tensor] = []
        for at in range(0, len(tokens), CHUNK):
            some_RD, some_R = hidden_RD[at : at + CHUNK], tokens_R[at : at + CHUNK]
            if top:
                unchanged = sampling_tensors(
                    [UNCHANGED] * len(some_R), self.vocabulary, self._device
                )
                logprobs_RV = ops.sampling_logprobs(self.decoder.logits(some_RD), *unchanged[:4])
                scored += _rank(logprobs_RV, some_R, top)
            else:  # without storing the logits
                scored += some_R[:, None], self.decoder.logprobs(some_RD, some_R)[:, None]
        lists = copy_to_host(*scored)
        chunks = zip(lists[::2], lists[1::2], strict=True)
        return [logprob for chunk in chunks for logprob in _logprobs(*chunk)]


def _rank(logprobs_RV: Tensor, tokens_R: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Return tokens and the most likely ones, (R, K), and their log-probabilities."""
    tokens_RK = torch.cat([tokens_R[:, None], logprobs_RV.topk(top).indices], dim=1)
    return tokens_RK, logprobs_RV.gather(1, tokens_RK)


class _Batch:
    """Tensors that stay the same while the rows belong to the same requests."""

    def __init__(self, states: list[SamplingState], vocabulary: int, device: torch.device) -> None:
        self.states = states
        params = [one.params for one in states]
        arrays = _sampling_arrays(params, vocabulary)
        t, k, p, m, s = copy_to_device(arrays, device)
        self.params = t, k, p, m, s
        # Rows with penalties come first and those with a grammar are adjacent, so that both are
        # slices of the processed logits.
        rows = [row for row, one in enumerate(states) if one.needs_logit_processing]
        rows.sort(key=lambda row: _processing_order(states[row]))
        self.processing = _Processing(rows, states, arrays, vocabulary, device) if rows else None
        # The number of most likely tokens is part of the key: where logits are equal, it may
        # change which of them are among the most likely.
        groups: dict[tuple[int, str], list[int]] = {}
        for row, one in enumerate(params):
            if one.logprobs is not None:
                groups.setdefault((one.logprobs, one.logprobs_mode), []).append(row)
        self.logprob_groups = [
            _LogprobGroup(*key, members, rows, arrays, vocabulary, device)
            for key, members in groups.items()
        ]


class _LogprobGroup:
    """Rows whose requests ask for the same log-probabilities."""

    def __init__(
        self,
        top: int,
        mode: str,
        rows: list[int],
        processed_rows: list[int],
        arrays: list[np.ndarray],
        vocabulary: int,
        device: torch.device,
    ) -> None:
        self.top, self.mode, self.rows = top, mode, rows
        params = unchanged = _sampling_arrays([UNCHANGED] * len(rows), vocabulary)[:4]
        both: list[tuple[int, int]] = []
        if mode == "processed":
            params = [array[rows] for array in arrays[:4]]
            both = [(processed_rows.index(r), i) for i, r in enumerate(rows) if r in processed_rows]
        self.unchanged = not both and all(map(np.array_equal, params, unchanged))
        """The model's own distribution is reported."""
        # Copying the logits of 32 requests and 49,152 tokens takes as long as their log-sums.
        self._is_whole_batch = len(rows) == len(arrays[0])
        self._rows_G, self.processed_from, self.processed_to, t, k, p, m = copy_to_device(
            [
                np.array(rows, np.int64),
                np.array([source for source, _ in both], np.int64),
                np.array([target for _, target in both], np.int64),
                *params,
            ],
            device,
        )
        self.params = t, k, p, m

    def select(self, x_R: Tensor) -> Tensor:
        """Return the rows of the group."""
        return x_R if self._is_whole_batch else x_R.index_select(0, self._rows_G)


class _Processing:
    """Penalties, biases and grammars of the rows that have any."""

    def __init__(
        self,
        rows: list[int],
        states: list[SamplingState],
        arrays: list[np.ndarray],
        vocabulary: int,
        device: torch.device,
    ) -> None:
        self._rows, self._vocabulary, self._device = rows, vocabulary, device
        chosen = [states[row] for row in rows]
        self._penalized = [one for one in chosen if one.penalized]
        self._matchers = [one.matcher for one in chosen if one.matcher is not None]
        self._first_matcher = next((i for i, one in enumerate(chosen) if one.matcher), 0)
        params = [one.params for one in self._penalized]
        prompts = [one.count_work(vocabulary)[0] for one in self._penalized]
        self.rows_S, t, k, p, m, s, self._prompt_PV, rep, pres, freq, *biases = copy_to_device(
            [
                np.array(rows, np.int64),
                *(array[rows] for array in arrays),
                np.stack(prompts) if prompts else np.zeros((0, vocabulary), np.bool_),
                np.array([one.repetition_penalty for one in params], np.float32),
                np.array([one.presence_penalty for one in params], np.float32),
                np.array([one.frequency_penalty for one in params], np.float32),
                *_flat_biases(chosen, vocabulary),
            ],
            device,
        )
        self.params = t, k, p, m, s
        self._penalties = rep, pres, freq
        self._biases = list(zip(biases[::2], biases[1::2], strict=True))

    def apply(self, logits_RV: Tensor, drafts: Sequence[tuple[int, ...]] | None) -> Tensor:
        """Return the logits of the rows after penalties, biases and grammars, (S, V), float32."""
        logits_SV = logits_RV.index_select(0, self.rows_S)
        count, first = len(self._penalized), self._first_matcher
        counts_PV, forbidden_MV = self._copy_counts_and_masks(drafts)
        if counts_PV is not None:
            logits_PV = ops.apply_penalties(
                logits_SV[:count], self._prompt_PV, counts_PV, *self._penalties
            )
            logits_SV[:count].copy_(logits_PV)
        for index, values in self._biases:
            logits_SV.view(-1).index_add_(0, index, values)
        if forbidden_MV is not None:
            logits_SV[first : first + len(forbidden_MV)].masked_fill_(forbidden_MV, -math.inf)
        return logits_SV

    def _copy_counts_and_masks(
        self, drafts: Sequence[tuple[int, ...]] | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Build what changes with every step, and copy it to the device."""
        arrays: list[np.ndarray] = []
        if self._penalized:
            counts_PV = np.stack([one.count_work(self._vocabulary)[1] for one in self._penalized])
            for counts_V, row in zip(counts_PV, self._rows, strict=False):
                for token in drafts[row] if drafts else ():
                    counts_V[token] += 1
            arrays.append(counts_PV)
        if self._matchers:
            arrays.append(~np.stack([matcher.mask() for matcher in self._matchers]))
        tensors = copy_to_device(arrays, self._device) if arrays else []
        return tensors[0] if self._penalized else None, tensors[-1] if self._matchers else None


def _processing_order(state: SamplingState) -> int:
    """Return the place of a row among those whose logits are processed."""
    if state.penalized:
        return 0 if state.matcher is None else 1
    return 3 if state.matcher is None else 2


def _flat_biases(states: list[SamplingState], vocabulary: int) -> list[np.ndarray]:
    """Return indices into the logits of all states, and what to add; several of both if a request
    has more than one bias for a token, so that no index occurs twice in an array."""
    arrays: list[np.ndarray] = []
    for layer in range(max(len(one.biases) for one in states)):
        some = [
            (row, one.biases[layer]) for row, one in enumerate(states) if layer < len(one.biases)
        ]
        arrays.append(np.concatenate([row * vocabulary + tokens for row, (tokens, _) in some]))
        arrays.append(np.concatenate([values for _, (_, values) in some]))
    return arrays


def _split_biases(logit_bias: Sequence[tuple[int, float]]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return tokens and biases, in several arrays if a token has several: each with its first bias,
    its second bias, ...

    >>> [tokens.tolist() for tokens, _ in _split_biases([(7, 1.0), (8, 1.0), (7, 0.5)])]
    [[7, 8], [7]]
    """
    layers: list[dict[int, float]] = []
    for token, value in logit_bias:
        layer = next((one for one in layers if token not in one), None)
        if layer is None:
            layers.append(layer := {})
        layer[token] = value
    return [
        (np.array(list(one), np.int64), np.array(list(one.values()), np.float32)) for one in layers
    ]


def sampling_tensors(
    params: Sequence[SamplingParams], vocab_size: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Temperature, top_k, top_p, min_p and seed as `ops.sample` takes them, (R) each."""
    t, k, p, m, s = copy_to_device(_sampling_arrays(params, vocab_size), device)
    return t, k, p, m, s


def _sampling_arrays(params: Sequence[SamplingParams], vocab_size: int) -> list[np.ndarray]:
    return [
        np.array([p.temperature for p in params], np.float32),
        np.array([min(p.top_k or vocab_size, vocab_size) for p in params], np.int64),
        np.array([p.top_p for p in params], np.float32),
        np.array([p.min_p for p in params], np.float32),
        np.array([p.seed for p in params], np.int64),
    ]


def _logprobs(wanted: list[list[int]], scores: list[list[float]]) -> list[Logprob]:
    """Build `Logprob`s; the first of each row is the token, the others are the most likely."""
    found: list[Logprob] = []
    for tokens, logprobs in zip(wanted, scores, strict=True):
        pairs = zip(tokens[1:], logprobs[1:], strict=True)
        top = sorted((p for p in pairs if p[1] > -math.inf), key=lambda pair: -pair[1])
        found.append(Logprob(tokens[0], logprobs[0], tuple(top)))
    return found
