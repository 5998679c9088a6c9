"""Shadow traffic, with fake engines."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ingot.core.errors import IngotError
from ingot.serving.engine.output import Logprob, Output
from ingot.serving.engine.request import FinishReason, Request
from ingot.serving.fleet.shadow import CACHE_SALT, MAX_TEXT, measure_drift, score


class ScoringEngine:
    """Gives each token a log-probability of `value`, in two parts; or fails."""

    def __init__(self, value: float, fails: bool = False) -> None:
        self.value, self.fails = value, fails
        self.requests: list[Request] = []

    def new_id(self) -> int:
        return len(self.requests)

    def add_request(self, request: Request, handler: Any) -> None:
        self.requests.append(request)
        if self.fails:
            handler.on_error(503, "the engine is not available", "wait")
            return
        start = request.sampling_params.prompt_logprobs_start
        scores = tuple([Logprob(token, self.value) for token in request.prompt[start:]])
        handler.on_output(Output(0, prompt_logprobs=scores[:2]), 0.0)
        end = FinishReason.LENGTH
        handler.on_output(Output(0, (5,), prompt_logprobs=scores[2:], finish_reason=end), 0.0)

    def abort(self, id: int, reason: FinishReason) -> None:
        pass


def run(*engines: ScoringEngine, tokens: int = 9) -> float | None:
    stable, canary = engines
    return asyncio.run(measure_drift(stable, canary, range(tokens)))  # pyright: ignore


def test_the_drift_is_the_mean_difference() -> None:
    assert run(ScoringEngine(-1.0), ScoringEngine(-1.25)) == 0.25


def test_the_last_tokens_of_a_long_text_are_compared() -> None:
    engine = ScoringEngine(-1.0)
    assert run(engine, ScoringEngine(-1.0), tokens=5000) == 0
    (request,) = engine.requests
    assert len(request.prompt) - request.sampling_params.prompt_logprobs_start == MAX_TEXT


def test_requests_do_not_meet_those_of_clients() -> None:
    engine = ScoringEngine(-1.0)
    run(engine, ScoringEngine(-1.0))
    (request,) = engine.requests
    assert (request.cache_salt, request.max_cached_tokens) == (CACHE_SALT, 0)
    assert request.priority > 10, "after those of clients"


@pytest.mark.parametrize("stable", [True, False])
def test_an_engine_that_fails_says_nothing_about_drift(stable: bool) -> None:
    engines = ScoringEngine(-1.0, fails=stable), ScoringEngine(-1.0, fails=not stable)
    assert run(*engines) is None


def test_a_score_that_fails_is_an_error() -> None:
    with pytest.raises(IngotError, match="not available"):
        asyncio.run(score(ScoringEngine(-1.0, fails=True), (1, 2), 1))  # pyright: ignore
