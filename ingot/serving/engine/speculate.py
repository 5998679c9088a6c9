"""Speculative decoding: proposers of draft tokens, which the next step verifies.

A decode step reads all weights for a handful of tokens; verifying a few more costs little. Drafts
are computed in the next step like any other tokens, and accepted while they equal the sampled ones.
A sampled token depends on seed and position alone, so the output is the same at any temperature,
with any proposer.

    NgramProposer         tokens that followed the last n-gram earlier in the sequence (prompt
                          lookup): quotes, edits, code
    DraftModelProposer    tokens that a smaller model of the same vocabulary would sample
    QuantizedProposer     tokens that a 4-bit copy of the model would sample, on its KV cache
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec
import torch

from ingot.core.errors import ConfigError
from ingot.nn import Decoder
from ingot.nn.formats import Int4, Int8, WeightFormat
from ingot.nn.quantized import is_quantized, quantized_copy
from ingot.serving.engine.request import Request
from ingot.serving.engine.runner import Runner
from ingot.serving.engine.sampler import Sampler, SamplingState
from ingot.serving.engine.sampling_params import SamplingParams
from ingot.serving.engine.scheduler import ScheduledSeq, SchedulerConfig

SpeculateKind = Literal["ngram", "int4"]
"""Proposers that need nothing but the model."""
NUM_SCRATCH_BLOCKS = 16  # of a QuantizedProposer: one for each request of its largest step
_GROUP = 32  # channels that share a scale in the 4-bit copy


class TokenSequence(Protocol):
    """A request and its tokens so far."""

    request: Request
    tokens: list[int]
    block_table: tuple[int, ...]
    """Blocks of the KV cache with all tokens but the last."""


class Proposer(Protocol):
    """Proposes draft tokens."""

    def propose(self, sequences: Sequence[TokenSequence], max_tokens: int) -> list[tuple[int, ...]]:
        """Return up to `max_tokens` draft tokens for each sequence."""
        ...

    def forget(self, id: int) -> None:
        """Drop the state of a request that finished."""
        ...


def create_proposer(
    kind: SpeculateKind | None,
    decoder: Decoder,
    config: SchedulerConfig,
    *,
    draft_model: Decoder | None = None,
) -> tuple[Runner, Proposer | None]:
    """Return the runner and the proposer of an engine; without a kind, None is the proposer.

    `draft_model` is the 4-bit copy, if it exists already.
    """
    if kind == "int4":
        runner = Runner(decoder, config, num_scratch_blocks=NUM_SCRATCH_BLOCKS)
        return runner, QuantizedProposer(runner, draft_model=draft_model)
    return Runner(decoder, config), NgramProposer() if kind == "ngram" else None


class NgramProposer:
    """Proposes the tokens that followed the last `n` tokens earlier in the same sequence.

    >>> from types import SimpleNamespace
    >>> sequence = SimpleNamespace(request=Request(id=1, prompt=(1,), max_tokens=9))
    >>> sequence.tokens = [1, 2, 3, 4, 5, 6, 1, 2, 3]
    >>> NgramProposer(n=3).propose([sequence], max_tokens=4)
    [(4, 5, 6, 1)]
    """

    def __init__(self, *, n: int = 3, num_speculative_tokens: int = 15) -> None:
        _check_count("n", n)
        _check_count("num_speculative_tokens", num_speculative_tokens)
        self.n, self.num_speculative_tokens = n, num_speculative_tokens
        self._ngrams: dict[int, dict[tuple[int, ...], int]] = {}

    def propose(self, sequences: Sequence[TokenSequence], max_tokens: int) -> list[tuple[int, ...]]:
        """Return the tokens after the latest occurrence of each sequence's last n-gram."""
        count = min(max_tokens, self.num_speculative_tokens)
        return [self._propose_one(seq.request.id, seq.tokens, count) for seq in sequences]

    def forget(self, id: int) -> None:
        """Drop the n-grams of a request that finished."""
        self._ngrams.pop(id, None)

    def _propose_one(self, id: int, tokens: list[int], count: int) -> tuple[int, ...]:
        ngrams, n = self._ngrams.setdefault(id, {}), self.n
        # The empty key holds the number of tokens indexed so far.
        for end in range(max(n, ngrams.get((), n)), len(tokens)):
            ngrams[tuple(tokens[end - n : end])] = end
        ngrams[()] = len(tokens)
        end = ngrams.get(tuple(tokens[-n:]))
        if end is None:
            return ()
        draft = tokens[end : end + count]
        while len(draft) < count:  # the sequence repeats itself
            draft += draft[: count - len(draft)]
        return tuple(draft)


class QuantizedProposer:
    """Proposes what a 4-bit copy of the model samples, with the same seeds and positions.

    The copy reads the keys and values of the model itself, so it needs no KV cache and computes
    nothing twice. It writes those of its drafts after them, where the model overwrites them, and
    into the runner's scratch blocks beyond the last block of the request. `draft_model` is a copy
    that exists already.

    >>> from ingot.nn import preset
    >>> decoder = Decoder.from_config(preset("tiny"), seed=0)
    >>> runner = Runner(decoder, SchedulerConfig(num_blocks=8))
    >>> QuantizedProposer(runner).propose([], max_tokens=2)
    []
    """

    def __init__(
        self,
        runner: Runner,
        *,
        draft_model: Decoder | None = None,
        num_speculative_tokens: int = 3,
    ) -> None:
        _check_count("num_speculative_tokens", num_speculative_tokens)
        self.num_speculative_tokens = num_speculative_tokens
        decoder = draft_model or int4_copy(runner.decoder)
        self.runner = Runner(decoder, runner.config, kv_cache=runner.kv_cache)
        self._scratch_blocks = runner.scratch_blocks
        self.sampler = Sampler(decoder)
        self._states: dict[int, SamplingState] = {}

    @torch.inference_mode()
    def propose(self, sequences: Sequence[TokenSequence], max_tokens: int) -> list[tuple[int, ...]]:
        """Return drafts for each sequence, of equal length."""
        states = [self._state(sequence.request) for sequence in sequences]
        tables = self._add_scratch_blocks(sequences)
        starts = [len(sequence.tokens) - 1 for sequence in sequences]
        tokens = [sequence.tokens[-1] for sequence in sequences]
        drafts: list[tuple[int, ...]] = [()] * len(sequences)
        for step in range(self._num_drafts(starts, tables, max_tokens)):
            positions = [start + step for start in starts]
            items = zip(sequences, positions, tokens, tables, strict=True)
            scheduled = [
                ScheduledSeq(sequence.request.id, position, (token,), table, True)
                for sequence, position, token, table in items
            ]
            hidden_RD, positions_R = self.runner.select_sampled(self.runner.run(scheduled))
            tokens, _ = self.sampler.sample(hidden_RD, states, positions_R)
            drafts = [(*draft, token) for draft, token in zip(drafts, tokens, strict=True)]
        return drafts

    def forget(self, id: int) -> None:
        """Drop the sampling state of a request that finished."""
        self._states.pop(id, None)

    def _state(self, request: Request) -> SamplingState:
        if request.id not in self._states:
            self._states[request.id] = _draft_sampling_state(request)
        return self._states[request.id]

    def _add_scratch_blocks(self, sequences: Sequence[TokenSequence]) -> list[tuple[int, ...]]:
        """Return the block tables, each continued by its share of the scratch blocks."""
        blocks = self._scratch_blocks
        share = len(blocks) // max(len(sequences), 1)
        return [
            (*sequence.block_table, *blocks[index * share : (index + 1) * share])
            for index, sequence in enumerate(sequences)
        ]

    def _num_drafts(self, starts: list[int], tables: list[tuple[int, ...]], max_tokens: int) -> int:
        """Return how many tokens fit into the blocks and the context of every sequence."""
        size, context = self.runner.config.block_size, self.runner.decoder.config.max_seq_len
        rooms = (
            min(len(table) * size, context) - start
            for start, table in zip(starts, tables, strict=True)
        )
        return min(max_tokens, self.num_speculative_tokens, *rooms) if starts else 0


def int4_copy(decoder: Decoder) -> Decoder:
    """Return a copy with linear layers in 4 bits and the LM head in 8; the rest is shared.

    >>> from ingot.nn import preset
    >>> int4_copy(Decoder.from_config(preset("tiny"), seed=0)).has_quantized_head
    True
    """
    if is_quantized(decoder):
        raise ConfigError(
            "a quantized model has no faster 4-bit copy", hint="use speculate='ngram', or none"
        )
    head = "tok_embed" if decoder.config.tie_embeddings else "lm_head"

    def choose(name: str) -> WeightFormat | None:
        if name.startswith("blocks."):
            return Int4(group=_GROUP)
        return Int8(group=_GROUP) if name == head else None

    return quantized_copy(decoder, choose)


def _draft_sampling_state(request: Request) -> SamplingState:
    """Return a state that samples as the request does, without penalties and grammars."""
    params = request.sampling_params
    plain = SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.seed,
    )
    return SamplingState(msgspec.structs.replace(request, sampling_params=plain))


def _check_count(name: str, value: int) -> None:
    if not 1 <= value <= 64:
        raise ConfigError(f"{name}: expected 1 to 64, got {value}", hint="give a number in range")


class _DraftState:
    """KV-cache state of the draft model for one request."""

    __slots__ = ("block_table", "draft_tokens", "num_computed", "sampling_state")

    def __init__(self, request: Request) -> None:
        self.sampling_state = _draft_sampling_state(request)
        self.num_computed = 0  # tokens of the sequence in the KV cache
        self.draft_tokens: list[int] = []  # drafts in the KV cache after them
        self.block_table: tuple[int, ...] = ()


class DraftModelProposer:
    """Proposes the tokens that a smaller model samples, with the same seeds and positions.

    >>> from ingot.nn import preset
    >>> small = Decoder.from_config(preset("tiny"), seed=0)
    >>> config = SchedulerConfig(num_blocks=8)
    >>> proposer = DraftModelProposer(small, config, num_speculative_tokens=2)
    >>> proposer.propose([], max_tokens=2)
    []
    """

    def __init__(
        self,
        decoder: Decoder,
        config: SchedulerConfig,
        *,
        num_speculative_tokens: int = 4,
        runner: Runner | None = None,
    ) -> None:
        _check_count("num_speculative_tokens", num_speculative_tokens)
        self.decoder, self.config = decoder, config
        self.num_speculative_tokens = num_speculative_tokens
        self.runner, self.sampler = runner or Runner(decoder, config), Sampler(decoder)
        self._free = list(range(config.num_blocks))
        self._states: dict[int, _DraftState] = {}

    @torch.inference_mode()
    def propose(self, sequences: Sequence[TokenSequence], max_tokens: int) -> list[tuple[int, ...]]:
        """Return drafts for each sequence whose tokens are all computed; a long one is prefilled
        over several calls."""
        count = min(max_tokens, self.num_speculative_tokens)
        drafts: dict[int, tuple[int, ...]] = {}
        scheduled = self._schedule(sequences, count)
        while scheduled:
            sampled = self._sample(scheduled)
            for id, (_, token) in sampled.items():
                drafts[id] = (*drafts.get(id, ()), token)
            if len(next(iter(drafts.values()), ())) == count:
                break
            scheduled = [self._extend(id, at, token) for id, (at, token) in sampled.items()]
        return [drafts.get(sequence.request.id, ()) for sequence in sequences]

    def forget(self, id: int) -> None:
        """Release the blocks of a request that finished."""
        state = self._states.pop(id, None)
        if state is not None:
            self._free += state.block_table

    def _schedule(self, sequences: Sequence[TokenSequence], count: int) -> list[ScheduledSeq]:
        """Schedule the new tokens of each sequence, within the token budget."""
        scheduled: list[ScheduledSeq] = []
        left = self.config.max_num_batched_tokens
        for sequence in sequences[: self.config.max_num_seqs]:
            seq = self._schedule_one(sequence, count, left) if left else None
            if seq is not None:
                scheduled.append(seq)
                left -= len(seq.tokens)
        return scheduled

    def _schedule_one(self, sequence: TokenSequence, count: int, left: int) -> ScheduledSeq | None:
        """Schedule the new tokens of one sequence; None if there are not enough blocks."""
        id, tokens = sequence.request.id, sequence.tokens
        state = self._states.get(id)
        if state is None:
            state = self._states[id] = _DraftState(sequence.request)
        num_blocks = -(-(len(tokens) + count) // self.config.block_size) - len(state.block_table)
        if num_blocks > len(self._free) or len(tokens) + count > self.decoder.config.max_seq_len:
            return None
        if num_blocks > 0:
            state.block_table += tuple(self._free[-num_blocks:])
            del self._free[-num_blocks:]
        start = state.num_computed
        for token in state.draft_tokens:  # the last token is always computed, to sample the next
            if start == len(tokens) - 1 or token != tokens[start]:
                break
            start += 1
        new = tuple(tokens[start : start + left])
        state.num_computed, state.draft_tokens = start + len(new), []
        return ScheduledSeq(id, start, new, state.block_table, state.num_computed == len(tokens))

    def _sample(self, scheduled: list[ScheduledSeq]) -> dict[int, tuple[int, int]]:
        """Run one forward pass; return position and next token by request."""
        hidden_TD = self.runner.run(scheduled)
        seqs = [seq for seq in scheduled if seq.needs_sampling]
        if not seqs:
            return {}
        states = [self._states[seq.id].sampling_state for seq in seqs]
        positions = [seq.start + len(seq.tokens) for seq in seqs]
        hidden_RD, positions_R = self.runner.select_sampled(hidden_TD)
        sampled, _ = self.sampler.sample(hidden_RD, states, positions_R)
        ids = [seq.id for seq in seqs]
        return dict(zip(ids, zip(positions, sampled, strict=True), strict=True))

    def _extend(self, id: int, position: int, token: int) -> ScheduledSeq:
        state = self._states[id]
        state.draft_tokens.append(token)
        return ScheduledSeq(id, position, (token,), state.block_table, True)
