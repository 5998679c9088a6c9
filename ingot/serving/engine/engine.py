"""The engine: requests in, and with every step of the model what it did for each of them.

    engine = Engine(decoder)
    engine.add(Request(id=1, prompt=(5, 6, 7), max_tokens=16))
    while engine.busy:
        for output in engine.step():
            ...

A step plans (`scheduler`), computes (`runner`), draws (`sampler`) and tells. What a request gets
depends on its own tokens and options alone: not on who else is there, what is cached, who was
preempted, or whether somebody guessed right (`propose`).

A step that breaks, for want of memory for one, ends the requests that were in it; the others and
the engine go on. Ends are told with the last token, a step before the scheduler hears of them.
"""

# pyright: basic
from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from ingot.core import device, log
from ingot.core.errors import IngotError
from ingot.interop.tokenizer import Tokenizer
from ingot.nn import Decoder
from ingot.serving.engine.grammar import Grammars, Matcher
from ingot.serving.engine.output import Logprob, Output, Stats
from ingot.serving.engine.request import End, Reason, Request
from ingot.serving.engine.runner import Runner
from ingot.serving.engine.sampler import Sampled, Sampler
from ingot.serving.engine.scheduler import Event, Limits, Plan, Retire, Scheduler, Work
from ingot.serving.engine.speculate import Proposer

WIDEST = 32  # tokens of a step to which drafts are added: beyond, they cost what they save
_MEMORY = 4 << 30
_PATIENCE = 0.01  # seconds to wait for a grammar where there is nothing else to do
_LOG = log.logger(__name__)


def fit(decoder: Decoder, memory: int | None = None, limits: Limits | None = None) -> Limits:
    """The limits with as many blocks as fit into so many bytes.

    By default 4 GiB, a quarter of the machine's memory if that is less; and never more than all
    running requests can use together.

    >>> from ingot.nn import preset
    >>> fit(Decoder.from_config(preset("tiny"), seed=0), memory=1 << 20).blocks
    64
    """
    limits = limits or Limits(blocks=1)
    if memory is None:
        memory = min(_MEMORY, device.detect().memory // 4)
    size = limits.block_size * decoder.kv_spec.bytes_per_token
    most = limits.max_running * -(-decoder.config.max_seq_len // limits.block_size)
    if memory < size:
        raise IngotError(
            f"{memory:,} bytes for keys and values, where {limits.block_size} tokens take {size:,}",
            hint="give more memory: thousands of tokens are usual",
        )
    return replace(limits, blocks=min(most, memory // size))


class _Sequence:
    """A request that has not ended, as the engine knows it."""

    __slots__ = ("request", "sampled", "scored", "started", "tokens")

    def __init__(self, request: Request, sampled: Sampled) -> None:
        self.request, self.sampled = request, sampled
        self.tokens = list(request.prompt)
        self.started = False
        self.scored = 0  # tokens of the prompt behind which log-probabilities were told


class Engine:
    """A decoder that serves.

    >>> from ingot.nn import preset
    >>> engine = Engine(Decoder.from_config(preset("tiny"), seed=0), limits=Limits(blocks=8))
    >>> engine.add(Request(id=1, prompt=(5, 6, 7), max_tokens=2))
    >>> [len(output.tokens) for output in engine.step()]
    [1]
    >>> [output.end for output in engine.step()]
    [<Reason.LENGTH: 'length'>]
    >>> engine.busy, engine.stats().blocks_used
    (False, 0)
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        limits: Limits | None = None,
        tokenizer: Tokenizer | None = None,
        proposer: Proposer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = fit(decoder) if limits is None else limits
        self.decoder, self.proposer = decoder, proposer
        self.scheduler = Scheduler(self.limits)
        self.runner, self.sampler = Runner(decoder, self.limits), Sampler(decoder)
        self._grammars = Grammars(tokenizer, decoder.config.vocab_size) if tokenizer else None
        self._compiling: dict[int, tuple[Request, Future[Matcher]]] = {}
        self._outputs: list[Output] = []  # to be told with the next step's
        self._clock = clock
        self._sequences: dict[int, _Sequence] = {}
        self._events: list[Event] = []
        self._told: set[int] = set()  # whose ends the scheduler has still to repeat
        self._counts = dict.fromkeys(_COUNTED, 0)

    # What is asked

    @property
    def busy(self) -> bool:
        """There is something to do: call `step`."""
        return bool(self._sequences or self._compiling or self._outputs)

    def add(self, request: Request) -> None:
        """Take a request; an error if it can never be served."""
        request = self._checked(request)
        grammar = request.options.grammar
        if grammar is None:
            self._accept(request)
            return
        if self._grammars is None:
            what = "has a grammar, and the engine has no tokenizer"
            raise _refused(request, what, "give it one: Engine(..., tokenizer=...)")
        if len(self._compiling) >= self.limits.max_waiting:
            self._outputs.append(Output(request.id, end=Reason.REFUSED))
            return
        self._compiling[request.id] = request, self._grammars.compile(grammar)

    def end(self, id: int, reason: Reason) -> None:
        """End a request: its client has left, or a stop string was met. Unknown ones are fine."""
        if id in self._sequences:
            self._events.append(End(id, reason))
        elif self._compiling.pop(id, None):
            self._outputs.append(Output(id, end=reason))

    def _accept(self, request: Request, matcher: Matcher | None = None) -> None:
        self._sequences[request.id] = _Sequence(request, Sampled(request, matcher))
        self._events.append(request)

    def _compiled(self) -> None:
        """Take those whose grammars are compiled, and refuse those whose are none."""
        if not self._sequences:
            wait([future for _, future in self._compiling.values()], _PATIENCE, FIRST_COMPLETED)
        for id, (request, future) in list(self._compiling.items()):
            if not future.done():
                continue
            del self._compiling[id]
            error = future.exception()
            if error is None:
                self._accept(request, future.result())
            else:
                self._outputs.append(Output(id, end=Reason.REFUSED, error=str(error)))

    def _checked(self, request: Request) -> Request:
        """The request, cut to the model's context; nothing of it is cached if it is scored."""
        config, options, count = self.decoder.config, request.options, len(request.prompt)
        if request.id in self._sequences or request.id in self._compiling:
            raise _refused(request, "has the number of another", "give each its own")
        if count >= config.max_seq_len:
            what = f"has {count} tokens in its prompt, the model's context is {config.max_seq_len}"
            raise _refused(request, what, "give a shorter prompt")
        named = max([*request.prompt, *options.ends, *(token for token, _ in options.bias)])
        if named >= config.vocab_size:
            what = f"has token {named}, which is not in the vocabulary of {config.vocab_size}"
            raise _refused(request, what, "encode the text with the tokenizer of this model")
        room = min(config.max_seq_len - count, request.max_tokens)
        if count + room > self.limits.capacity:
            what = f"needs memory for {count + room} tokens, there is {self.limits.capacity}"
            raise _refused(request, what, "ask for less, or give the engine more memory")
        salt = request.salt
        if options.prompt_logprobs is not None:
            salt += secrets.token_bytes(16)
        return msgspec.structs.replace(request, max_tokens=room, salt=salt)

    # What is done

    def step(self) -> list[Output]:
        """Compute one step of the model and tell what came of it; nothing if there is none."""
        if self._compiling:
            self._compiled()
        outputs, self._outputs = self._outputs, []
        now, events = self._clock(), self._events
        self._events = []
        plan = self.scheduler.step(now, events)
        outputs += self._ended(plan)
        cached = self._started(plan)
        if plan.work:
            self._counts["steps"] += 1
            try:
                results = self._compute(plan.work)
            except Exception as error:  # out of memory is a RuntimeError in torch
                _LOG.exception("step %d failed, and with it %d requests", plan.step, len(plan.work))
                outputs += self._failed(plan, error)
            else:
                outputs += self._advanced(plan, results, cached)
        if not self._sequences and self._events:
            self._told.clear()
            events, self._events = self._events, []
            self.scheduler.step(now, events)
        return outputs

    def stats(self) -> Stats:
        """How it is, and what it has done."""
        scheduler, blocks = self.scheduler, self.limits.blocks
        return Stats(
            running=scheduler.running,
            waiting=scheduler.waiting + len(self._compiling),
            blocks_used=blocks - scheduler.pool.free,
            blocks=blocks,
            **self._counts,
        )

    def _ended(self, plan: Plan) -> list[Output]:
        """Those that the scheduler ended: by a deadline, refused, as it was told."""
        outputs: list[Output] = []
        for end in plan.ends:
            if end.id in self._told:
                self._told.discard(end.id)
            else:
                self._forget(end.id)
                outputs.append(Output(end.id, end=end.reason))
        return outputs

    def _started(self, plan: Plan) -> dict[int, int]:
        """Of those that start for the first time, the tokens found in the cache."""
        self._counts["preemptions"] += len(plan.preempted)
        cached: dict[int, int] = {}
        for start in plan.starts:
            sequence = self._sequences[start.id]
            if not sequence.started:
                sequence.started = True
                cached[start.id] = start.cached
                self._counts["prompt_tokens"] += len(sequence.request.prompt)
                self._counts["cached_tokens"] += start.cached
        return cached

    def _compute(self, work: Sequence[Work]) -> list[_Result]:
        """One forward, and what is drawn behind it."""
        if not torch.is_inference_mode_enabled():
            with torch.inference_mode():
                return self._compute(work)
        hidden_TD = self.runner.run(work)
        sequences = self._sequences
        if sum([len(item.tokens) for item in work]) == sum([item.samples for item in work]):
            of = [sequences[item.id].sampled for item in work]
            tokens, logprobs = self.sampler.draw(hidden_TD, of, [item.start + 1 for item in work])
        else:
            tokens, logprobs = self._draw_some(work, hidden_TD)
        return self._results(work, hidden_TD, tokens, logprobs)

    def _draw_some(
        self, work: Sequence[Work], hidden_TD: Tensor
    ) -> tuple[list[int], dict[int, Logprob]]:
        """Draw behind the last token that is sure of each request, and behind its drafts."""
        of: list[Sampled] = []
        positions: list[int] = []
        before: list[tuple[int, ...]] = []
        index: list[int] = []
        at = 0
        for item in work:
            sure = len(item.tokens) - item.drafts
            if item.samples:
                drafts = item.tokens[sure:]
                of += [self._sequences[item.id].sampled] * (item.drafts + 1)
                positions += range(item.start + sure, item.start + len(item.tokens) + 1)
                before += [drafts[:ahead] for ahead in range(item.drafts + 1)]
                index += range(at + sure - 1, at + len(item.tokens))
            at += len(item.tokens)
        if not index:
            return [], {}
        return self.sampler.draw(hidden_TD[torch.tensor(index)], of, positions, before)

    def _results(
        self,
        work: Sequence[Work],
        hidden_TD: Tensor,
        tokens: list[int],
        logprobs: dict[int, Logprob],
    ) -> list[_Result]:
        """What each request has of it."""
        results: list[_Result] = []
        row = at = 0
        for item in work:
            options = self._sequences[item.id].request.options
            new: tuple[int, ...] = ()
            told = scores = None
            if item.samples:
                new = (tokens[row],)
                if item.drafts:
                    new = _right(item, tokens[row : row + item.drafts + 1], options.ends)
                if options.logprobs is not None:
                    told = tuple([logprobs[row + ahead] for ahead in range(len(new))])
                row += item.drafts + 1
            if options.prompt_logprobs is not None:
                scores = self._scores(item, hidden_TD[at : at + len(item.tokens)])
            at += len(item.tokens)
            results.append(_Result(new, told, scores))
        return results

    def _scores(self, item: Work, hidden_TD: Tensor) -> tuple[Logprob, ...] | None:
        """The log-probabilities of the prompt's tokens behind those that were computed."""
        sequence = self._sequences[item.id]
        prompt, top = sequence.request.prompt, sequence.request.options.prompt_logprobs
        begin = max(item.start, sequence.scored)  # before it was preempted, some were told
        targets = prompt[begin + 1 : item.start + len(item.tokens) + 1]
        if not targets:
            return None
        sequence.scored = begin + len(targets)
        hidden = hidden_TD[begin - item.start :][: len(targets)]
        return tuple(self.sampler.score(hidden, targets, top or 0))

    def _failed(self, plan: Plan, error: Exception) -> list[Output]:
        self._counts["failed_steps"] += 1
        ids = [item.id for item in plan.work]
        outputs = [self._over(Output(id, end=Reason.FAILED, error=str(error))) for id in ids]
        self._events.append(Retire(plan.step, None))
        return outputs

    def _advanced(self, plan: Plan, results: list[_Result], cached: dict[int, int]) -> list[Output]:
        """Tell each request what came of it, and the scheduler that the step is over."""
        outputs: list[Output] = []
        for item, result in zip(plan.work, results, strict=True):
            id, new = item.id, result.tokens
            sequence = self._sequences[id]
            if new:
                sequence.tokens += new
                sequence.sampled.take(new)
            elif id not in cached and result.prompt_logprobs is None:
                continue
            end, error = self._end_of(sequence)
            output = Output(id, *result, cached.pop(id, None), end, error)
            outputs.append(output if end is None else self._over(output))
        tokens = tuple([result.tokens for result in results])
        self._count(plan.work, tokens)
        drafts = self._drafts(plan.work) if self.proposer else ()
        self._events.append(Retire(plan.step, tokens, drafts))
        return outputs

    def _count(self, work: Sequence[Work], tokens: Sequence[tuple[int, ...]]) -> None:
        counts, new = self._counts, sum(map(len, tokens))
        counts["generated_tokens"] += new
        if self.proposer:
            counts["drafted_tokens"] += sum([item.drafts for item in work])
            counts["accepted_tokens"] += new - sum([item.samples for item in work])

    def _end_of(self, sequence: _Sequence) -> tuple[Reason | None, str | None]:
        matcher, request = sequence.sampled.matcher, sequence.request
        generated = len(sequence.tokens) > len(request.prompt)
        if generated and sequence.tokens[-1] in request.options.ends:
            return Reason.STOP, None
        if matcher is not None and (matcher.error or matcher.done):
            # Nobody can keep such a grammar: that is for its author to mend.
            return (Reason.REFUSED if matcher.error else Reason.STOP), matcher.error
        return (Reason.LENGTH if len(sequence.tokens) == request.total else None), None

    def _over(self, output: Output) -> Output:
        """Its end is told now; the scheduler hears of it before the step retires."""
        assert output.end
        if output.end is not Reason.LENGTH:  # which it knows by itself
            self._events.append(End(output.id, output.end))
        self._told.add(output.id)
        self._forget(output.id)
        return output

    def _forget(self, id: int) -> None:
        del self._sequences[id]
        if self.proposer:
            self.proposer.forget(id)

    def _drafts(self, work: Sequence[Work]) -> tuple[tuple[int, ...], ...]:
        """For each work what may come next, where steps are small enough to try."""
        assert self.proposer
        asked = {
            item.id: sequence
            for item in work
            if item.samples
            and (sequence := self._sequences.get(item.id))
            and sequence.sampled.matcher is None
        }
        most = WIDEST // len(asked) - 1 if asked else 0
        if most < 1:
            return ()
        try:
            found = self.proposer.propose(list(asked.values()), most)
        except Exception:  # a guess is not worth a request
            _LOG.exception("no drafts")
            return ()
        drafts = dict(zip(asked, found, strict=True))
        return tuple([drafts.get(item.id, ()) for item in work])


class _Result(NamedTuple):
    """What a step brought a request."""

    tokens: tuple[int, ...]
    logprobs: tuple[Logprob, ...] | None
    prompt_logprobs: tuple[Logprob, ...] | None


_COUNTED = (
    "steps",
    "prompt_tokens",
    "cached_tokens",
    "generated_tokens",
    "preemptions",
    "drafted_tokens",
    "accepted_tokens",
    "failed_steps",
)


def _right(item: Work, drawn: list[int], ends: tuple[int, ...]) -> tuple[int, ...]:
    """The tokens that count: while drafts are what was drawn, to one that ends.

    >>> work = Work(1, 4, (5, 6, 7, 8), (0,), True, drafts=3)
    >>> _right(work, [6, 7, 9, 1], ()), _right(work, [6, 7, 9, 1], (6,))
    ((6, 7, 9), (6,))
    """
    drafts = item.tokens[len(item.tokens) - item.drafts :]
    count = 0
    while count < len(drafts) and drawn[count] == drafts[count] and drawn[count] not in ends:
        count += 1
    return tuple(drawn[: count + 1])


def _refused(request: Request, what: str, hint: str) -> IngotError:
    return IngotError(f"request {request.id} {what}", hint=hint)
