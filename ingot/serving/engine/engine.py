"""Engine: continuous batching over one decoder; requests in, outputs after every step.

    engine = Engine(decoder)
    engine.add_request(Request(id=1, prompt=(5, 6, 7), max_tokens=16))
    while engine.has_unfinished_requests:
        for output in engine.step():
            ...

A step schedules (`scheduler`), runs the model (`runner`), samples (`sampler`) and reports. The
output of a request depends on its own tokens and parameters alone: not on the rest of the batch,
cache hits, preemption or speculative decoding (`speculate`).

Requests may name a LoRA adapter (`adapters`); those of several adapters and of the base model are
computed in one batch.

If a step raises, for instance for want of memory, its requests fail; the other requests and the
engine continue. A request that finishes is reported with its last token, one step before the
scheduler processes it.
"""

# pyright: basic
from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from ingot.core import device, log
from ingot.core.errors import IngotError
from ingot.interop.peft import Adapter
from ingot.interop.tokenizer import Tokenizer
from ingot.nn import Decoder
from ingot.serving.engine.adapters import BASE_SLOT, AdapterPool, LoadedAdapter
from ingot.serving.engine.grammar import GrammarCompiler, GrammarMatcher
from ingot.serving.engine.output import EngineStats, Logprob, Output
from ingot.serving.engine.request import Abort, FinishReason, Request
from ingot.serving.engine.runner import Runner
from ingot.serving.engine.sampler import OnLogits, Sampler, SamplingState
from ingot.serving.engine.scheduler import (
    Event,
    ScheduledSeq,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    StepDone,
)
from ingot.serving.engine.speculate import Proposer

MAX_SPECULATIVE_STEP_TOKENS = 32  # in larger steps, drafts cost as much as they save
DEFAULT_KV_CACHE_BYTES = 4 << 30
_GRAMMAR_POLL_S = 0.01  # how long an idle step waits for a grammar to compile
_LOG = log.logger(__name__)


def default_kv_cache_bytes(num_engines: int = 1) -> int:
    """Return 4 GiB, or a quarter of the machine's memory, divided among its engines, if that is
    less.

    >>> default_kv_cache_bytes() <= 4 << 30
    True
    """
    return min(DEFAULT_KV_CACHE_BYTES, device.detect().memory // 4 // num_engines)


def config_for_memory(
    decoder: Decoder, kv_cache_bytes: int | None = None, config: SchedulerConfig | None = None
) -> SchedulerConfig:
    """Return the config with as many blocks as fit in `kv_cache_bytes`.

    The default is `default_kv_cache_bytes`. There are never more blocks than all running requests
    can use together.

    >>> from ingot.nn import preset
    >>> decoder = Decoder.from_config(preset("tiny"), seed=0)
    >>> config_for_memory(decoder, kv_cache_bytes=1 << 20).num_blocks
    64
    """
    config = config or SchedulerConfig(num_blocks=1)
    if kv_cache_bytes is None:
        kv_cache_bytes = default_kv_cache_bytes()
    block_bytes = config.block_size * decoder.kv_spec.bytes_per_token
    max_blocks = config.max_num_seqs * -(-decoder.config.max_seq_len // config.block_size)
    if kv_cache_bytes < block_bytes:
        raise IngotError(
            f"KV cache: a block of {config.block_size} tokens takes {block_bytes:,} bytes, got "
            f"{kv_cache_bytes:,}",
            hint="give more memory: room for thousands of tokens is usual",
        )
    return replace(config, num_blocks=min(max_blocks, kv_cache_bytes // block_bytes))


class _Sequence:
    """A request that has not finished, as the engine sees it."""

    __slots__ = ("admitted", "block_table", "num_scored", "request", "sampling_state", "tokens")

    def __init__(self, request: Request, sampling_state: SamplingState) -> None:
        self.request, self.sampling_state = request, sampling_state
        self.tokens = list(request.tokens)
        self.block_table: tuple[int, ...] = ()  # of the last step, for proposers
        self.admitted = False
        # Prompt log-probabilities reported so far, or not asked for.
        self.num_scored = max(request.sampling_params.prompt_logprobs_start - 1, 0)


class Engine:
    """Generates tokens for many requests at once.

    `on_step(scheduler_output, seconds)` is called after each step that computed something,
    `on_logits` in each step that samples, before it does.

    >>> from ingot.nn import preset
    >>> decoder = Decoder.from_config(preset("tiny"), seed=0)
    >>> engine = Engine(decoder, scheduler_config=SchedulerConfig(num_blocks=8))
    >>> engine.add_request(Request(id=1, prompt=(5, 6, 7), max_tokens=2))
    >>> [len(output.tokens) for output in engine.step()]
    [1]
    >>> [output.finish_reason for output in engine.step()]
    [<FinishReason.LENGTH: 'length'>]
    >>> engine.has_unfinished_requests, engine.stats().num_used_blocks
    (False, 0)
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        scheduler_config: SchedulerConfig | None = None,
        tokenizer: Tokenizer | None = None,
        proposer: Proposer | None = None,
        adapters: AdapterPool | None = None,
        runner: Runner | None = None,
        on_step: Callable[[SchedulerOutput, float], object] | None = None,
        on_logits: OnLogits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = scheduler_config or config_for_memory(decoder)
        self.decoder, self.proposer, self.on_step = decoder, proposer, on_step
        self.scheduler = Scheduler(self.config)
        self.adapters = adapters or AdapterPool(decoder, max_loras=0)
        self.runner = runner or Runner(decoder, self.config)
        self.sampler = Sampler(decoder, on_logits)
        vocab_size = decoder.config.vocab_size
        self._grammars = GrammarCompiler(tokenizer, vocab_size) if tokenizer else None
        self._compiling: dict[int, tuple[Request, Future[GrammarMatcher]]] = {}
        self._outputs: list[Output] = []  # returned by the next step
        self._clock = clock
        self._sequences: dict[int, _Sequence] = {}
        self._adapter_slots: dict[int, int] = {}  # of unfinished requests that have an adapter
        self._events: list[Event] = []
        self._reported_finished: set[int] = set()  # which the scheduler will report again
        self._counts = dict.fromkeys(_COUNTERS, 0)

    # Requests

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._sequences or self._compiling or self._outputs)

    def add_request(self, request: Request) -> None:
        """Queue a request; raise an error if it can never be served."""
        request = self._check(request)
        grammar = request.sampling_params.grammar
        if grammar is not None and self._grammars is None:
            message = "grammars need a tokenizer, and the engine has none"
            raise _error(request, message, "give it one: Engine(..., tokenizer=...)")
        if grammar is not None and len(self._compiling) >= self.config.max_queue:
            self._outputs.append(Output(request.id, finish_reason=FinishReason.REJECTED))
            return
        if request.adapter:
            adapter = self.adapters.find(request.adapter)
            self._adapter_slots[request.id] = adapter.slot
            # Blocks are those of its content: another adapter may get this name.
            request = msgspec.structs.replace(request, adapter=adapter.digest)
        if grammar is None:
            self._add_sequence(request)
        else:
            assert self._grammars is not None
            self._compiling[request.id] = (
                request,
                self._grammars.compile(grammar, request.generated),
            )

    def abort(self, id: int, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """Finish a request early: its client left, or a stop string was found. An unknown id is
        ignored."""
        if id in self._sequences:
            self._events.append(Abort(id, reason))
        elif self._compiling.pop(id, None):
            self._adapter_slots.pop(id, None)
            self._outputs.append(Output(id, finish_reason=reason))

    def load_adapter(
        self, name: str, source: Adapter | Path | str, *, replace: bool = False
    ) -> LoadedAdapter:
        """Make an adapter available to requests by a name: see `AdapterPool.load`."""
        busy = set(self._adapter_slots.values())
        return self.adapters.load(name, source, replace=replace, busy=busy)

    @property
    def loaded_adapters(self) -> list[LoadedAdapter]:
        """The adapters that requests can name."""
        return self.adapters.loaded

    def unload_adapter(self, name: str) -> None:
        """Remove the name of an adapter; requests that use it finish."""
        self.adapters.unload(name)

    def _add_sequence(self, request: Request, matcher: GrammarMatcher | None = None) -> None:
        self._sequences[request.id] = _Sequence(request, SamplingState(request, matcher))
        self._events.append(request)

    def _add_compiled(self) -> None:
        """Queue the requests whose grammars are compiled; reject those with invalid grammars."""
        if not self._sequences:
            futures = [future for _, future in self._compiling.values()]
            wait(futures, _GRAMMAR_POLL_S, FIRST_COMPLETED)
        for id, (request, future) in list(self._compiling.items()):
            if not future.done():
                continue
            del self._compiling[id]
            error = future.exception()
            if error is None:
                self._add_sequence(request, future.result())
            else:
                self._adapter_slots.pop(id, None)
                reason = FinishReason.REJECTED
                text = error.message if isinstance(error, IngotError) else str(error)
                self._outputs.append(Output(id, finish_reason=reason, error=text))

    def _check(self, request: Request) -> Request:
        """Return the request with `max_tokens` reduced to the model's context. Requests for prompt
        log-probabilities get a random salt: cached tokens have none."""
        model, params, count = self.decoder.config, request.sampling_params, len(request.prompt)
        if request.id in self._sequences or request.id in self._compiling:
            message = f"duplicate request id {request.id}"
            raise IngotError(message, hint="use an id that no unfinished request has")
        if count >= model.max_seq_len:
            message = (
                f"prompt must be shorter than the model's context ({model.max_seq_len} tokens)"
            )
            raise _error(request, f"{message}, got {count} tokens", "shorten the prompt")
        biased = [token for token, _ in params.logit_bias]
        highest = max([*request.tokens, *params.stop_token_ids, *biased])
        if highest >= model.vocab_size:
            message = f"token ids must be below the vocabulary size {model.vocab_size}"
            hint = "encode the text with the tokenizer of this model"
            raise _error(request, f"{message}, got {highest}", hint)
        max_tokens = min(model.max_seq_len - count, request.max_tokens)
        if count + max_tokens > self.config.capacity:
            message = f"prompt and max_tokens must fit in the KV cache ({self.config.capacity} "
            hint = "lower max_tokens, or give the engine more memory"
            raise _error(request, f"{message}tokens), got {count + max_tokens}", hint)
        max_cached = request.max_cached_tokens
        if params.prompt_logprobs is not None:  # the token before the first one is computed
            max_cached = max(params.prompt_logprobs_start - 1, 0)
        # Raises if the tokens that were generated before leave no room for another one.
        return msgspec.structs.replace(request, max_tokens=max_tokens, max_cached_tokens=max_cached)

    # Steps

    def step(self) -> list[Output]:
        """Run one step of the model; return what changed for each request."""
        begin = time.perf_counter()
        if self._compiling:
            self._add_compiled()
        outputs, self._outputs = self._outputs, []
        now, events = self._clock(), self._events
        self._events = []
        plan = self.scheduler.step(now, events)
        outputs += self._report_finished(plan)
        num_cached = self._report_admitted(plan)
        if plan.scheduled:
            self._counts["steps"] += 1
            try:
                results = self._compute(plan.scheduled)
            except Exception as error:  # out of memory is a RuntimeError in torch
                count = len(plan.scheduled)
                _LOG.exception("step %d failed, and with it %d requests", plan.step, count)
                outputs += self._fail(plan, error)
            else:
                outputs += self._advance(plan, results, num_cached)
        if not self._sequences and self._events:
            self._reported_finished.clear()
            events, self._events = self._events, []
            self.scheduler.step(now, events)
        if self.on_step is not None and plan.scheduled:
            self.on_step(plan, time.perf_counter() - begin)
        return outputs

    def stats(self) -> EngineStats:
        """Return the current state and the counters since the start."""
        scheduler, num_blocks = self.scheduler, self.config.num_blocks
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting + len(self._compiling),
            num_used_blocks=num_blocks - scheduler.pool.num_free,
            num_blocks=num_blocks,
            **self._counts,
        )

    def _report_finished(self, plan: SchedulerOutput) -> list[Output]:
        """Return outputs for requests that the scheduler finished: deadline, rejected, aborted."""
        outputs: list[Output] = []
        for finished in plan.finished:
            if finished.id in self._reported_finished:
                self._reported_finished.discard(finished.id)
            else:
                self._remove(finished.id)
                outputs.append(Output(finished.id, finish_reason=finished.reason))
        return outputs

    def _report_admitted(self, plan: SchedulerOutput) -> dict[int, int]:
        """Return the number of cached tokens of requests that are admitted for the first time."""
        self._counts["preemptions"] += len(plan.preempted)
        num_cached: dict[int, int] = {}
        for admitted in plan.admitted:
            sequence = self._sequences[admitted.id]
            if not sequence.admitted:
                sequence.admitted = True
                num_cached[admitted.id] = admitted.num_cached_tokens
                self._counts["prompt_tokens"] += len(sequence.tokens)
                self._counts["cached_tokens"] += admitted.num_cached_tokens
        return num_cached

    def _compute(self, scheduled: Sequence[ScheduledSeq]) -> list[_Result]:
        """Run one forward pass and sample."""
        if not torch.is_inference_mode_enabled():
            with torch.inference_mode():
                return self._compute(scheduled)
        slots = None
        if self._adapter_slots:
            slots = [self._adapter_slots.get(seq.id, BASE_SLOT) for seq in scheduled]
        hidden_TD = self.runner.run(scheduled, slots)
        sequences = self._sequences
        drafts: list[tuple[int, ...]] | None = None
        if sum([len(s.tokens) for s in scheduled]) == sum([s.needs_sampling for s in scheduled]):
            states = [sequences[s.id].sampling_state for s in scheduled]
        else:
            states, drafts = self._sampling_states(scheduled)
        tokens, logprobs = [], {}
        if states:
            hidden_RD, positions_R = self.runner.select_sampled(hidden_TD)
            tokens, logprobs = self.sampler.sample(hidden_RD, states, positions_R, drafts)
        return self._results(scheduled, hidden_TD, tokens, logprobs)

    def _sampling_states(
        self, scheduled: Sequence[ScheduledSeq]
    ) -> tuple[list[SamplingState], list[tuple[int, ...]]]:
        """Return the state of each token to sample, and the draft tokens before it: one after the
        last known token of each request, and one after each of its drafts."""
        states: list[SamplingState] = []
        before: list[tuple[int, ...]] = []
        for seq in scheduled:
            if seq.needs_sampling:
                count = seq.num_draft_tokens
                drafts = seq.tokens[len(seq.tokens) - count :]
                states += [self._sequences[seq.id].sampling_state] * (count + 1)
                before += [drafts[:ahead] for ahead in range(count + 1)]
        return states, before

    def _results(
        self,
        scheduled: Sequence[ScheduledSeq],
        hidden_TD: Tensor,
        tokens: list[int],
        logprobs: dict[int, Logprob],
    ) -> list[_Result]:
        """Split the sampled tokens and log-probabilities by request."""
        results: list[_Result] = []
        row = at = 0
        for seq in scheduled:
            params = self._sequences[seq.id].request.sampling_params
            new: tuple[int, ...] = ()
            new_logprobs = prompt_logprobs = None
            if seq.needs_sampling:
                new = (tokens[row],)
                if seq.num_draft_tokens:
                    sampled = tokens[row : row + seq.num_draft_tokens + 1]
                    new = _accept_drafts(seq, sampled, params.stop_token_ids)
                if params.logprobs is not None:
                    new_logprobs = tuple([logprobs[row + ahead] for ahead in range(len(new))])
                row += seq.num_draft_tokens + 1
            if params.prompt_logprobs is not None:
                prompt_logprobs = self._score_prompt(seq, hidden_TD[at : at + len(seq.tokens)])
            at += len(seq.tokens)
            results.append(_Result(new, new_logprobs, prompt_logprobs))
        return results

    def _score_prompt(self, seq: ScheduledSeq, hidden_TD: Tensor) -> tuple[Logprob, ...] | None:
        """Return log-probabilities of the prompt tokens that follow those computed."""
        sequence = self._sequences[seq.id]
        prompt, top = sequence.request.prompt, sequence.request.sampling_params.prompt_logprobs
        begin = max(seq.start, sequence.num_scored)  # some were reported before a preemption
        targets = prompt[begin + 1 : seq.start + len(seq.tokens) + 1]
        if not targets:
            return None
        sequence.num_scored = begin + len(targets)
        hidden = hidden_TD[begin - seq.start :][: len(targets)]
        return tuple(self.sampler.score(hidden, targets, top or 0))

    def _fail(self, plan: SchedulerOutput, error: Exception) -> list[Output]:
        self._counts["failed_steps"] += 1
        outputs = [
            self._finish(Output(seq.id, finish_reason=FinishReason.FAILED, error=str(error)))
            for seq in plan.scheduled
        ]
        self._events.append(StepDone(plan.step, None))
        return outputs

    def _advance(
        self, plan: SchedulerOutput, results: list[_Result], num_cached: dict[int, int]
    ) -> list[Output]:
        """Append the new tokens; return the outputs and queue `StepDone` for the scheduler."""
        outputs: list[Output] = []
        for seq, result in zip(plan.scheduled, results, strict=True):
            id, new = seq.id, result.tokens
            sequence = self._sequences[id]
            if new:
                sequence.tokens += new
                sequence.sampling_state.append(new)
            elif id not in num_cached and result.prompt_logprobs is None:
                continue
            reason, error = self._finish_reason(sequence)
            output = Output(id, *result, num_cached.pop(id, None), reason, error)
            outputs.append(output if reason is None else self._finish(output))
        tokens = tuple([result.tokens for result in results])
        self._count(plan.scheduled, tokens)
        drafts = self._propose(plan.scheduled) if self.proposer else ()
        self._events.append(StepDone(plan.step, tokens, drafts))
        return outputs

    def _count(self, scheduled: Sequence[ScheduledSeq], tokens: Sequence[tuple[int, ...]]) -> None:
        counts, new = self._counts, sum(map(len, tokens))
        counts["generated_tokens"] += new
        if self.proposer:
            counts["draft_tokens"] += sum([seq.num_draft_tokens for seq in scheduled])
            counts["accepted_tokens"] += new - sum([seq.needs_sampling for seq in scheduled])

    def _finish_reason(self, sequence: _Sequence) -> tuple[FinishReason | None, str | None]:
        matcher, request = sequence.sampling_state.matcher, sequence.request
        generated = len(sequence.tokens) > len(request.prompt)
        if generated and sequence.tokens[-1] in request.sampling_params.stop_token_ids:
            return FinishReason.STOP, None
        if matcher is not None and (matcher.error or matcher.done):
            # No output can match such a grammar: its author has to change it.
            return (FinishReason.REJECTED if matcher.error else FinishReason.STOP), matcher.error
        return (FinishReason.LENGTH if len(sequence.tokens) == request.max_len else None), None

    def _finish(self, output: Output) -> Output:
        """Report the end of a request now; the scheduler processes it before the next step."""
        assert output.finish_reason
        if output.finish_reason is not FinishReason.LENGTH:  # which the scheduler detects itself
            self._events.append(Abort(output.id, output.finish_reason))
        self._reported_finished.add(output.id)
        self._remove(output.id)
        return output

    def _remove(self, id: int) -> None:
        del self._sequences[id]
        self._adapter_slots.pop(id, None)
        if self.proposer:
            self.proposer.forget(id)

    def _propose(self, scheduled: Sequence[ScheduledSeq]) -> tuple[tuple[int, ...], ...]:
        """Return draft tokens for each request, if steps are small enough to profit."""
        assert self.proposer
        eligible = {
            seq.id: sequence
            for seq in scheduled
            if seq.needs_sampling
            and (sequence := self._sequences.get(seq.id))
            and sequence.sampling_state.matcher is None
        }
        max_tokens = MAX_SPECULATIVE_STEP_TOKENS // len(eligible) - 1 if eligible else 0
        if max_tokens < 1:
            return ()
        for seq in scheduled:
            if seq.id in eligible:
                eligible[seq.id].block_table = seq.block_table
        try:
            proposed = self.proposer.propose(list(eligible.values()), max_tokens)
        except Exception:  # drafts are optional: no request fails for them
            _LOG.exception("speculative proposer failed; continuing without drafts")
            return ()
        drafts = dict(zip(eligible, proposed, strict=True))
        return tuple([drafts.get(seq.id, ()) for seq in scheduled])


class _Result(NamedTuple):
    """New tokens and log-probabilities of one request."""

    tokens: tuple[int, ...]
    logprobs: tuple[Logprob, ...] | None
    prompt_logprobs: tuple[Logprob, ...] | None


_COUNTERS = (
    "steps",
    "prompt_tokens",
    "cached_tokens",
    "generated_tokens",
    "preemptions",
    "draft_tokens",
    "accepted_tokens",
    "failed_steps",
)


def _accept_drafts(
    seq: ScheduledSeq, sampled: list[int], stop_token_ids: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the accepted tokens: drafts up to the first that differs from the sampled token or
    stops the request, and the sampled token there.

    >>> seq = ScheduledSeq(1, 4, (5, 6, 7, 8), (0,), True, num_draft_tokens=3)
    >>> _accept_drafts(seq, [6, 7, 9, 1], ()), _accept_drafts(seq, [6, 7, 9, 1], (6,))
    ((6, 7, 9), (6,))
    """
    drafts = seq.tokens[len(seq.tokens) - seq.num_draft_tokens :]
    count = 0
    for draft, token in zip(drafts, sampled, strict=False):
        if draft != token or token in stop_token_ids:
            break
        count += 1
    return tuple(sampled[: count + 1])


def _error(request: Request, message: str, hint: str) -> IngotError:
    return IngotError(f"request {request.id}: {message}", hint=hint)
