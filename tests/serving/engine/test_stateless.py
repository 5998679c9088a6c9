"""What the engines of models without state have in common: deadlines, failures, adapters."""

from __future__ import annotations

import pytest

from ingot.core.errors import IngotError
from ingot.serving.engine.output import Output
from ingot.serving.engine.request import FinishReason, Request
from ingot.serving.engine.stateless import StatelessEngine


class Lengths(StatelessEngine[Request]):
    """Computes two requests at a time; a prompt that begins with 13 fails."""

    def _check(self, request: Request) -> None:
        if len(request.prompt) > 3:
            raise IngotError("too long", hint="shorten it")

    def _next_batch(self) -> list[int]:
        return list(self._waiting)[:2]

    def _compute(self, batch: list[Request]) -> list[Output]:
        if any(request.prompt[0] == 13 for request in batch):
            raise MemoryError("no memory, for a test")
        return [Output(r.id, r.prompt, finish_reason=FinishReason.STOP) for r in batch]


def request(id: int, *prompt: int, deadline: float | None = None) -> Request:
    return Request(id=id, prompt=prompt or (1,), max_tokens=1, deadline=deadline)


def test_deadlines_aborts_and_batches() -> None:
    now = 0.0
    engine = Lengths(clock=lambda: now)
    for id in range(1, 6):
        engine.add_request(request(id, deadline=2.0 if id == 2 else None))
    engine.abort(3)
    engine.abort(77)
    assert engine.stats().num_waiting == 4
    now = 2.0
    first, second = engine.step(), engine.step()
    assert [(one.id, one.finish_reason) for one in first] == [
        (3, FinishReason.CANCELLED),
        (2, FinishReason.DEADLINE),
        (1, FinishReason.STOP),
        (4, FinishReason.STOP),
    ]
    assert [one.id for one in second] == [5]
    assert not engine.has_unfinished_requests
    assert engine.step() == []
    assert engine.stats().steps == 2


def test_a_failed_step_fails_its_requests_only() -> None:
    engine = Lengths()
    for id, prompt in ((1, 13), (2, 1), (3, 1)):
        engine.add_request(request(id, prompt))
    failed = engine.step()
    assert [(one.id, one.finish_reason) for one in failed] == [
        (1, FinishReason.FAILED),
        (2, FinishReason.FAILED),
    ]
    assert "no memory" in (failed[0].error or "")
    assert [one.finish_reason for one in engine.step()] == [FinishReason.STOP]
    assert engine.stats().failed_steps == 1


def test_impossible_requests_and_adapters_are_rejected() -> None:
    engine = Lengths()
    engine.add_request(request(1))
    with pytest.raises(IngotError, match="duplicate"):
        engine.add_request(request(1))
    with pytest.raises(IngotError, match="too long"):
        engine.add_request(request(2, 1, 2, 3, 4))
    for change in (
        lambda: engine.load_adapter("pirate", "directory"),
        lambda: engine.unload_adapter("pirate"),
    ):
        with pytest.raises(IngotError, match="LoRA"):
            change()
    assert engine.loaded_adapters == []
    assert [one.id for one in engine.step()] == [1]
