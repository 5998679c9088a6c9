"""Shadow traffic: the log-probabilities that a version gives to texts which another one has served.

A text is sent to both versions as a prompt whose log-probabilities are requested. It ranks after
the requests of clients, and has a cache salt of its own: it neither finds the blocks of clients nor
leaves any that they could find. A token's log-probability depends only on the tokens before it, so
those of the version that served the text are the same as at that time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from ingot.core.errors import IngotError
from ingot.serving.engine.output import Output
from ingot.serving.engine.request import MAX_PRIORITY, FinishReason, Request
from ingot.serving.engine.sampling_params import SamplingParams
from ingot.serving.fleet.release import drift
from ingot.serving.workers.replicas import ReplicaSet

CACHE_SALT = b"shadow traffic"
TIMEOUT_S = 60.0
MAX_TEXT = 512
"""Tokens of a text that are compared: its last ones."""


class ScoreHandler:
    """Collects the log-probabilities of one prompt; an `OutputHandler`."""

    def __init__(self) -> None:
        self.client = self
        self.scores: asyncio.Future[list[float]] = asyncio.get_running_loop().create_future()
        self._scores: list[float] = []

    def on_output(self, output: Output, now: float) -> None:
        """Process the output of a step."""
        self._scores += [one.logprob for one in output.prompt_logprobs or ()]
        if output.finish_reason is None or self.scores.done():
            return
        if output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.scores.set_result(self._scores)
        else:
            self.on_error(500, f"finished with {output.finish_reason.value}", "")

    def on_error(self, status: int, message: str, hint: str) -> None:
        """Fail."""
        if not self.scores.done():
            self.scores.set_exception(IngotError(message, hint=hint))

    def flush(self) -> None:
        """Do nothing: no client waits."""


async def score(engine: ReplicaSet, tokens: Sequence[int], start: int) -> list[float]:
    """Return the log-probabilities of the tokens from position `start` on, which is at least 1."""
    handler = ScoreHandler()
    request = Request(
        id=engine.new_id(),
        prompt=tuple(tokens),
        max_tokens=1,
        priority=MAX_PRIORITY,
        deadline=time.monotonic() + TIMEOUT_S,
        cache_salt=CACHE_SALT,
        max_cached_tokens=0,
        sampling_params=SamplingParams(
            temperature=0.0, prompt_logprobs=0, prompt_logprobs_start=start
        ),
    )
    engine.add_request(request, handler)
    try:
        async with asyncio.timeout(2 * TIMEOUT_S):
            return await handler.scores
    finally:
        engine.abort(request.id, FinishReason.CANCELLED)


async def measure_drift(
    stable: ReplicaSet, canary: ReplicaSet, tokens: Sequence[int]
) -> float | None:
    """Return the drift of the canary over a text; None if a version could not compute it now."""
    start = max(1, len(tokens) - MAX_TEXT)
    results = await asyncio.gather(
        score(stable, tokens, start), score(canary, tokens, start), return_exceptions=True
    )
    scores = [one for one in results if isinstance(one, list)]
    if len(scores) < 2 or not scores[0] or len(scores[0]) != len(scores[1]):
        return None
    return drift(*scores)
