"""Canary releases: whether a new version of a model replaces the stable one, or is rolled back.

A canary gets a share of the users. Their requests are compared with those of the stable version
since it began, and `decide` says what to do: wait, promote or roll back.

- **Errors**: responses with a status of 500 or more. The canary is rolled back if it has at least
  `MIN_ERRORS` and their rate is above that of the stable version by `ERROR_SIGMAS` standard
  deviations of the difference.
- **Latency**: time to first token, and seconds per token after it. The canary is rolled back if its
  median is above `max_slowdown` times that of the stable version, each at the bound of three
  standard deviations that is in its favour: the ratio of two medians of 20 requests is mostly
  noise. Its first `WARM_UP` requests do not count.
- **Drift**: the mean absolute difference of the log-probabilities that both versions give to the
  tokens of a served text, which is what `ingot compare` reports. Texts are sampled from the
  requests of the stable version; no client waits for it.
- **Restarts** of its engines, and failure to load.

It is promoted if nothing of this is the case, the medians and the drift are within their limits,
and `min_requests` and `min_seconds` have passed. The functions read no clock and keep no
state.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean, median, stdev
from typing import NamedTuple

from ingot.core.config import check_bounds

WARM_UP = 20
"""Requests of a canary whose latency does not count."""
MIN_LATENCIES = 20
MIN_ERRORS = 3
ERROR_SIGMAS = 4.0
"""More than three, because the rate is judged again and again while it is measured."""
SIGMAS = 3.0
MIN_DRIFTS = 8
MAX_RESTARTS = 2
MIN_DELAY = 0.002
"""Seconds by which a canary may be slower in any case: what two processes on one machine differ."""
WINDOW = 2000
"""Requests whose latency is kept."""
_MEDIAN_ERROR = math.sqrt(math.pi / 2)  # of a normal distribution, in standard errors of the mean
_MAD_TO_SIGMA = 1.4826


@dataclass(frozen=True, kw_only=True)
class CanaryConfig:
    """When a canary is promoted or rolled back."""

    share: float = 0.1
    """Fraction of the users that get it."""
    promote: bool = True
    """False for an A/B test: it keeps its share until the file changes, or it is rolled back."""
    min_seconds: float = 600.0
    """Seconds before it is promoted. Raise it if load varies over the day."""
    min_requests: int = 200
    """Requests before it is promoted."""
    max_slowdown: float = 1.5
    """Ratio of its median latency to that of the stable version. Raise it if a slower model is what
    you want."""
    max_drift: float = 0.1
    """Mean absolute difference of log-probabilities. Raise it for a model with other answers: `inf`
    turns the comparison off."""

    def __post_init__(self) -> None:
        check_bounds(
            self,
            share=(0.001, 0.9),
            min_seconds=(0, 1e7),
            min_requests=(1, 10**9),
            max_slowdown=(1, 1e6),
            max_drift=(0, math.inf),
        )


class Verdict(StrEnum):
    """What to do with a canary."""

    WAIT = "wait"
    PROMOTE = "promote"
    ROLL_BACK = "roll back"


class Decision(NamedTuple):
    """A verdict and its reason."""

    verdict: Verdict
    reason: str


@dataclass(kw_only=True)
class Observations:
    """What is known of a version since the canary began.

    >>> seen = Observations(started_at=5.0)
    >>> seen.add_request(ok=True, ttft=0.2, seconds_per_token=0.01)
    >>> seen.num_requests, seen.num_errors, seen.ttfts
    (1, 0, [0.2])
    """

    started_at: float = 0.0
    num_requests: int = 0
    num_errors: int = 0
    ttfts: list[float] = field(default_factory=list[float])
    """Of the latest requests, the oldest first."""
    seconds_per_token: list[float] = field(default_factory=list[float])
    drifts: list[float] = field(default_factory=list[float])
    """One for each text; empty for the stable version."""
    num_restarts: int = 0
    load_error: str | None = None
    """Why it cannot be loaded, or not be compared."""
    num_warm_up: int = 0
    """First requests, whose latency does not count."""

    def add_request(
        self, *, ok: bool, ttft: float | None = None, seconds_per_token: float | None = None
    ) -> None:
        """Count a request that finished, whatever its client did."""
        self.num_requests += 1
        self.num_errors += not ok
        if not ok or self.num_requests <= self.num_warm_up:
            return
        for values, value in ((self.ttfts, ttft), (self.seconds_per_token, seconds_per_token)):
            if value is not None:
                values.append(value)
                del values[:-WINDOW]

    def add_drift(self, drift: float) -> None:
        """Count the drift of a text."""
        self.drifts.append(drift)
        del self.drifts[:-WINDOW]


def decide(
    config: CanaryConfig, stable: Observations, canary: Observations, now: float
) -> Decision:
    """Return whether to wait, to promote the canary or to roll it back, and why.

    >>> config = CanaryConfig(min_seconds=60, min_requests=1, max_drift=math.inf)
    >>> stable, canary = Observations(), Observations()
    >>> decide(config, stable, canary, now=1.0).reason
    'requests: 0 of 1'
    >>> for _ in range(40):
    ...     stable.add_request(ok=True, ttft=0.2)
    ...     canary.add_request(ok=True, ttft=0.2)
    >>> decide(config, stable, canary, now=1.0).reason
    'seconds: 1 of 60'
    >>> decide(config, stable, canary, now=60.0).verdict
    <Verdict.PROMOTE: 'promote'>
    >>> for _ in range(20):
    ...     canary.add_request(ok=False)
    >>> decide(config, stable, canary, now=60.0)
    Decision(verdict=<Verdict.ROLL_BACK: 'roll back'>, reason='20 of 60 requests failed, and 0 of 40 of the stable version')
    """  # noqa: E501
    for fault in (
        _crash(canary),
        _errors(stable, canary),
        _slowness(config, "time to first token", stable.ttfts, canary.ttfts),
        _slowness(config, "seconds per token", stable.seconds_per_token, canary.seconds_per_token),
        _drift(config, canary.drifts),
    ):
        if fault is not None:
            return Decision(Verdict.ROLL_BACK, fault)
    missing = _missing(config, stable, canary, now - canary.started_at)
    return Decision(Verdict.WAIT, missing) if missing else Decision(Verdict.PROMOTE, "no fault")


def gets_canary(user: str, share: float, salt: str = "") -> bool:
    """Return whether a user is among the `share` of all that get the canary.

    It is a function of the name and the salt, on every machine and in every process; the users of a
    share are among those of a larger one.

    >>> names = [f"user{n}" for n in range(1000)]
    >>> some, more = ({n for n in names if gets_canary(n, s)} for s in (0.1, 0.3))
    >>> len(some), some < more
    (110, True)
    """
    digest = hashlib.sha256(f"{len(salt)} {salt} {user}".encode("utf-8", "replace")).digest()
    return int.from_bytes(digest[:8]) < share * 2**64


def drift(stable: Sequence[float], canary: Sequence[float]) -> float:
    """Return the mean absolute difference of the log-probabilities of the same tokens.

    >>> drift([-1.0, -2.0], [-1.5, -2.0])
    0.25
    """
    return fmean(abs(a - b) for a, b in zip(stable, canary, strict=True))


def median_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the median and its standard error, from the median absolute deviation.

    >>> median_and_error([1.0, 1.0, 1.0])
    (1.0, 0.0)
    """
    middle = median(values)
    sigma = _MAD_TO_SIGMA * median([abs(value - middle) for value in values])
    return middle, _MEDIAN_ERROR * sigma / math.sqrt(len(values))


def _crash(canary: Observations) -> str | None:
    if canary.load_error is not None:
        return canary.load_error
    if canary.num_restarts >= MAX_RESTARTS:
        return f"its engine was restarted {canary.num_restarts} times"
    return None


def _errors(stable: Observations, canary: Observations) -> str | None:
    k, n, stable_k = canary.num_errors, canary.num_requests, stable.num_errors
    if k < MIN_ERRORS:
        return None
    stable_n = max(stable.num_requests, 1)
    pooled = (k + stable_k + 1) / (n + stable_n + 2)
    sigma = math.sqrt(pooled * (1 - pooled) * (1 / n + 1 / stable_n))
    if k / n - stable_k / stable_n <= ERROR_SIGMAS * sigma:
        return None
    return (
        f"{k:,} of {n:,} requests failed, and {stable_k:,} of {stable.num_requests:,} "
        "of the stable version"
    )


def _slowness(
    config: CanaryConfig, name: str, stable: Sequence[float], canary: Sequence[float]
) -> str | None:
    if min(len(stable), len(canary)) < MIN_LATENCIES:
        return None
    before, before_error = median_and_error(stable)
    after, after_error = median_and_error(canary)
    limit = config.max_slowdown * (before + SIGMAS * before_error)
    if after - SIGMAS * after_error <= max(limit, before + MIN_DELAY):
        return None
    return f"{name}: median {after:.4f}, and {before:.4f} of the stable version"


def _drift(config: CanaryConfig, drifts: Sequence[float]) -> str | None:
    if math.isinf(config.max_drift) or not drifts:
        return None
    if not all(map(math.isfinite, drifts)):
        return "its log-probabilities are not finite"
    if len(drifts) < MIN_DRIFTS:
        return None
    mean, error = _mean_and_error(drifts)
    if mean - SIGMAS * error <= config.max_drift:
        return None
    return (
        f"log-probabilities differ by {mean:.3f} on average over {len(drifts)} texts, "
        f"max_drift is {config.max_drift:g}"
    )


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    return fmean(values), stdev(values) / math.sqrt(len(values))


def _missing(
    config: CanaryConfig, stable: Observations, canary: Observations, seconds: float
) -> str:
    """Return what is missing for a promotion; empty if nothing is."""
    if not config.promote:
        return "promote = false"
    if canary.num_requests < config.min_requests:
        return f"requests: {canary.num_requests} of {config.min_requests}"
    for before, after in (
        (stable.ttfts, canary.ttfts),
        (stable.seconds_per_token, canary.seconds_per_token),
    ):
        if not (before and after):
            continue
        limit = max(config.max_slowdown * median(before), median(before) + MIN_DELAY)
        if median(after) > limit:
            return "latency: above max_slowdown, but not significantly"
    if math.isfinite(config.max_drift):
        if len(canary.drifts) < MIN_DRIFTS:
            return f"texts whose drift is known: {len(canary.drifts)} of {MIN_DRIFTS}"
        if fmean(canary.drifts) > config.max_drift:
            return "drift: above max_drift, but not significantly"
    if seconds < config.min_seconds:
        return f"seconds: {seconds:.0f} of {config.min_seconds:g}"
    return ""
