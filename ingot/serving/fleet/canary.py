"""A canary: a version on trial next to the stable one, and what is observed of both."""

from __future__ import annotations

import asyncio
import math
import time
from statistics import fmean

from ingot.serving.fleet.deployment import Deployment, DeploymentState
from ingot.serving.fleet.release import (
    WARM_UP,
    CanaryConfig,
    Decision,
    Observations,
    Verdict,
    decide,
)
from ingot.serving.fleet.shadow import measure_drift
from ingot.serving.server.completion import CompletionStream
from ingot.serving.server.response import AnyResponse

SHADOW_INTERVAL_S = 0.25
"""Between two texts whose drift is measured, one at a time."""


class Canary:
    """Compares a version with the stable one from the moment on that it is loaded."""

    def __init__(self, deployment: Deployment, stable: Deployment, config: CanaryConfig) -> None:
        self.deployment, self.stable, self.config = deployment, stable, config
        self.decision = Decision(Verdict.WAIT, "loading")
        """The latest one."""
        self.seen: Observations | None = None
        """Of the canary; None while it is loading."""
        self._seen_of_stable = Observations()
        self._shadow: asyncio.Task[None] | None = None
        self._shadow_at = -math.inf

    @property
    def drift(self) -> float | None:
        """Mean drift of the log-probabilities, once known."""
        return fmean(self.seen.drifts) if self.seen is not None and self.seen.drifts else None

    @property
    def accepts_requests(self) -> bool:
        """Whether it gets its share of the requests."""
        is_loaded = self.deployment.state is DeploymentState.READY and self.deployment.engine.ready
        return is_loaded and self.seen is not None

    def begin(self, now: float) -> None:
        """Observe from now on: it is loaded."""
        self._seen_of_stable = Observations(started_at=now)
        self.seen = Observations(started_at=now, num_warm_up=WARM_UP)
        infos = [one.engine.info for one in (self.stable, self.deployment)]
        if len({info.vocab_size for info in infos if info is not None}) > 1 and self._compares:
            self.seen.load_error = "its vocabulary is another one; `max_drift = inf` allows that"

    def decide(self, now: float) -> Decision:
        """Return what to do with it now."""
        if self.seen is not None:
            self.seen.num_restarts = self.deployment.engine.restarts
            self.decision = decide(self.config, self._seen_of_stable, self.seen, now)
        return self.decision

    def on_end(self, one: Deployment, response: AnyResponse) -> None:
        """Count a request that finished; perhaps send its text to the canary, too."""
        if self.seen is None or one not in (self.stable, self.deployment):
            return
        now = time.monotonic()
        ttft, pace = now - response.started, None
        if isinstance(response, CompletionStream):
            seconds, ttft = ttft, response.ttft
            num_tokens = max([choice.num_tokens for choice in response.choices])
            if ttft is not None and num_tokens > 1:
                pace = (seconds - ttft) / (num_tokens - 1)
            if one is self.stable and response.error is None:
                self._start_shadow(response, now)
        seen = self.seen if one is self.deployment else self._seen_of_stable
        ok = response.error is None or response.error.status < 500
        seen.add_request(ok=ok, ttft=ttft, seconds_per_token=pace)

    @property
    def _compares(self) -> bool:
        """Whether log-probabilities are compared."""
        info = self.stable.engine.info
        generates = info is not None and info.embedding_dim is None and info.signature is None
        return generates and math.isfinite(self.config.max_drift)

    def _start_shadow(self, response: CompletionStream, now: float) -> None:
        due = self._shadow is None and now - self._shadow_at > SHADOW_INTERVAL_S
        if due and not response.job.adapter and self._compares:
            tokens = (*response.job.prompts[0], *response.choices[0].tokens)
            self._shadow_at = now
            self._shadow = asyncio.create_task(self._compare(tokens))

    async def _compare(self, tokens: tuple[int, ...]) -> None:
        info = self.deployment.engine.info
        try:
            if info is not None and self.seen is not None:
                tokens = tokens[: info.max_model_len - 1]
                drift = await measure_drift(self.stable.engine, self.deployment.engine, tokens)
                if drift is not None:
                    self.seen.add_drift(drift)
        finally:
            self._shadow = None
