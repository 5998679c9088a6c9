"""Engine of models that keep no state: each request is computed once, in a batch with others.

`PoolingEngine` computes embeddings, `InferenceEngine` named tensors. What they have in common is
here; the interface is that of `Engine`. The rest of its batch does not change the result of a
request.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, NoReturn, Protocol, TypeVar

from ingot.core import log
from ingot.core.errors import IngotError
from ingot.serving.engine.adapters import LoadedAdapter
from ingot.serving.engine.output import EngineStats, Output
from ingot.serving.engine.request import FinishReason

_LOG = log.logger(__name__)


class _Request(Protocol):
    @property
    def id(self) -> int: ...

    @property
    def deadline(self) -> float | None: ...


R = TypeVar("R", bound=_Request)


class StatelessEngine(ABC, Generic[R]):
    """Requests that wait, and counters."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: dict[int, R] = {}
        self._outputs: list[Output] = []  # returned by the next step
        self._steps = self._failed_steps = self._prompt_tokens = 0

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to do, now or later."""
        return bool(self._waiting or self._outputs)

    def seconds_to_step(self) -> float:
        """Return how long the next step should wait for more requests."""
        return 0.0

    def add_request(self, request: R) -> None:
        """Queue a request; raise an error if it can never be served."""
        if request.id in self._waiting:
            hint = "use an id that no unfinished request has"
            raise IngotError(f"duplicate request id {request.id}", hint=hint)
        self._check(request)
        self._waiting[request.id] = request

    def abort(self, id: int, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """Finish a request early; an unknown id is ignored."""
        if self._waiting.pop(id, None) is not None:
            self._outputs.append(Output(id, finish_reason=reason))

    def step(self) -> list[Output]:
        """Compute one batch; return the outputs of the requests that finished."""
        for request in list(self._waiting.values()):
            if request.deadline is not None and request.deadline <= self._clock():
                self.abort(request.id, FinishReason.DEADLINE)
        outputs, self._outputs = self._outputs, []
        batch = [self._waiting.pop(id) for id in self._next_batch()]
        if not batch:
            return outputs
        self._steps += 1
        try:
            return outputs + self._compute(batch)
        except Exception as error:  # out of memory is a RuntimeError in torch
            self._failed_steps += 1
            _LOG.exception("step %d failed, and with it %d requests", self._steps, len(batch))
            message, reason = f"{type(error).__name__}: {error}"[:1000], FinishReason.FAILED
            return outputs + [Output(r.id, finish_reason=reason, error=message) for r in batch]

    def stats(self) -> EngineStats:
        """Return the current state and the counters since the start."""
        return EngineStats(
            num_running=0,
            num_waiting=len(self._waiting),
            num_used_blocks=0,
            num_blocks=0,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=0,
            generated_tokens=0,
            preemptions=0,
            draft_tokens=0,
            accepted_tokens=0,
            failed_steps=self._failed_steps,
        )

    @property
    def loaded_adapters(self) -> list[LoadedAdapter]:
        """None: these models are served without LoRA adapters."""
        return []

    def load_adapter(self, name: str, source: str, *, replace: bool = False) -> NoReturn:
        """Raise an error: these models are served without LoRA adapters."""
        reject_adapters()

    def unload_adapter(self, name: str) -> NoReturn:
        """Raise an error: these models are served without LoRA adapters."""
        reject_adapters()

    @abstractmethod
    def _check(self, request: R) -> None:
        """Raise an error if the request can never be served."""

    @abstractmethod
    def _next_batch(self) -> list[int]:
        """Return the requests that the next step computes."""

    @abstractmethod
    def _compute(self, batch: list[R]) -> list[Output]:
        """Return the outputs of a batch."""


def reject_adapters() -> NoReturn:
    """Raise the error of a LoRA adapter for a model that takes none."""
    raise IngotError(
        "only models that generate text are served with LoRA adapters",
        hint="merge the adapter: ingot merge",
    )
