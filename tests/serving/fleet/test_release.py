"""Decisions on canaries: random traffic, with faults planted at random times."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from ingot.serving.fleet import release
from ingot.serving.fleet.release import (
    WARM_UP,
    CanaryConfig,
    Decision,
    Observations,
    Verdict,
    decide,
    gets_canary,
)

Decide = Callable[[CanaryConfig, Observations, Observations, float], Decision]
CONFIG = CanaryConfig(share=0.3, min_seconds=60, min_requests=100)
FAULTS = ("errors", "slow start", "slow tokens", "drift", "nan", "crash", "load")
ENOUGH = 400
"""Requests after which a fault must have been found."""


class Trial:
    """Two versions and their traffic; the canary may have a fault from some request on."""

    def __init__(self, decide: Decide, seed: int) -> None:
        self.decide, self.rng = decide, random.Random(seed)
        self.now, self.fault, self.since_fault, self.num_requests = 0.0, "", 0, 0
        self.stable = Observations(started_at=0.0)
        self.canary = Observations(started_at=0.0, num_warm_up=WARM_UP)
        self.decision = Decision(Verdict.WAIT, "begins")

    def request(self) -> None:
        """A request of one of the versions; latency is noisy and has a long tail."""
        rng, is_canary = self.rng, self.rng.random() < CONFIG.share
        fault = self.fault if is_canary else ""
        self.since_fault += bool(fault)
        seen = self.canary if is_canary else self.stable
        ttft, pace = rng.lognormvariate(-3, 0.7), rng.lognormvariate(-5, 0.4)
        if is_canary and seen.num_requests < WARM_UP:
            ttft *= 10
        seen.add_request(
            ok=rng.random() >= (0.5 if fault == "errors" else 0.02),
            ttft=ttft * (4 if fault == "slow start" else 1),
            seconds_per_token=pace * (3 if fault == "slow tokens" else 1),
        )
        if not is_canary and rng.random() < 0.2:
            drift = rng.expovariate(1 / 0.03)
            drift += {"drift": 0.5, "nan": math.nan}.get(self.fault, 0.0)
            self.canary.add_drift(drift)
        self.now += rng.expovariate(10)
        self.num_requests += 1
        if self.num_requests % 5 == 0:
            self.look()

    def plant(self, fault: str) -> None:
        self.fault, self.since_fault = fault, 0
        if fault == "crash":
            self.canary.num_restarts = 2
        if fault == "load":
            self.canary.load_error = "no such file"

    def look(self) -> None:
        if self.decision.verdict is Verdict.WAIT:
            self.decision = self.decide(CONFIG, self.stable, self.canary, self.now)
            assert self.decision == self.decide(CONFIG, self.stable, self.canary, self.now), "pure"

    def check(self) -> None:
        """What holds at any time."""
        verdict, reason = self.decision
        if verdict is Verdict.PROMOTE:
            assert self.canary.num_requests >= CONFIG.min_requests
            assert self.now >= CONFIG.min_seconds
        if verdict is Verdict.ROLL_BACK:
            assert self.fault, f"a good canary is rolled back: {reason}"
        if self.fault and verdict is Verdict.WAIT:
            assert self.since_fault < ENOUGH, f"{self.fault} is not found: {reason}"
        if verdict is Verdict.PROMOTE and self.fault:
            assert self.since_fault < 60, f"{self.fault} is not found"
        assert reason


def check_fault(decide: Decide, seed: int, before: int, fault: str) -> None:
    """A fault appears before the canary can be promoted."""
    trial = Trial(decide, seed)
    for _ in range(before):
        trial.request()
    trial.plant(fault)
    while trial.decision.verdict is Verdict.WAIT:
        trial.request()
        trial.check()
    trial.check()
    assert trial.decision.verdict is Verdict.ROLL_BACK, f"{fault} is not found"


def check_good(decide: Decide, seed: int) -> None:
    trial = Trial(decide, seed)
    for _ in range(1500):
        trial.request()
        trial.check()
        if trial.decision.verdict is not Verdict.WAIT:
            break
    assert trial.decision.verdict is Verdict.PROMOTE, trial.decision.reason


class Releases(RuleBasedStateMachine):
    """One canary after the other."""

    @rule(seed=st.integers(0, 2**32), before=st.integers(0, 100), fault=st.sampled_from(FAULTS))
    def faulty(self, seed: int, before: int, fault: str) -> None:
        check_fault(decide, seed, before, fault)

    @rule(seed=st.integers(0, 2**32))
    def good(self, seed: int) -> None:
        check_good(decide, seed)


def test_faults_are_found_and_good_canaries_promoted() -> None:
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
    run_state_machine_as_test(  # pyright: ignore[reportUnknownMemberType]
        Releases,
        settings=settings(
            max_examples=15,
            stateful_step_count=4,
            deadline=None,
            derandomize=True,
            suppress_health_check=checks,
            phases=(Phase.generate,),
        ),
    )


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_from_the_first_request_on(fault: str) -> None:
    for seed in range(3):
        check_fault(decide, seed, 0, fault)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("_errors", "errors"),
        ("_slowness", "slow start"),
        ("_slowness", "slow tokens"),
        ("_drift", "drift"),
        ("_drift", "nan"),
        ("_crash", "crash"),
        ("_crash", "load"),
    ],
)
def test_the_test_finds_a_decision_that_forgets_a_check(
    name: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release, name, lambda *_: None)
    with pytest.raises(AssertionError, match="is not found"):
        check_fault(decide, 0, 0, fault)


def test_the_test_finds_a_promotion_that_is_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "_missing", lambda *_: "")
    with pytest.raises(AssertionError):
        check_good(decide, 0)


def ratio_of_medians(
    config: CanaryConfig, stable: Observations, canary: Observations, now: float
) -> Decision:
    """The bare ratio of two medians, from a few requests on."""
    if min(len(stable.ttfts), len(canary.ttfts)) > 4:
        ratio = sorted(canary.ttfts)[len(canary.ttfts) // 2] / release.median(stable.ttfts)
        if ratio > config.max_slowdown:
            return Decision(Verdict.ROLL_BACK, f"ratio {ratio}")
    return decide(config, stable, canary, now)


def test_a_bare_ratio_rolls_good_canaries_back() -> None:
    def check() -> None:
        for seed in range(10):
            check_good(ratio_of_medians, seed)

    with pytest.raises(AssertionError, match="a good canary is rolled back"):
        check()


def test_users_are_divided_alike_everywhere_and_independently_of_the_release() -> None:
    users = [f"user{number}" for number in range(4000)]
    assert [gets_canary(user, 0.5) for user in users[:6]] == [True, True, False, True, True, False]
    for share in (0.05, 0.5):
        one, two = ({u for u in users if gets_canary(u, share, salt)} for salt in ("v2", "v3"))
        assert len(one) == pytest.approx(4000 * share, rel=0.2)
        assert len(one & two) == pytest.approx(4000 * share**2, abs=60)


def test_an_ab_test_is_never_promoted_but_rolled_back() -> None:
    config = CanaryConfig(promote=False, min_seconds=0, min_requests=1, max_drift=math.inf)
    stable, canary = Observations(), Observations()
    for _ in range(100):
        stable.add_request(ok=True, ttft=0.1)
        canary.add_request(ok=True, ttft=0.1)
    assert decide(config, stable, canary, 1e9) == (Verdict.WAIT, "promote = false")
    for _ in range(50):
        canary.add_request(ok=False)
    assert decide(config, stable, canary, 1e9).verdict is Verdict.ROLL_BACK


@pytest.mark.parametrize(("slower", "verdict"), [(0.0015, "promote"), (0.0025, "roll back")])
def test_a_delay_of_two_milliseconds_does_not_count(slower: float, verdict: str) -> None:
    config = CanaryConfig(min_seconds=0, min_requests=1, max_drift=math.inf)
    stable, canary = Observations(), Observations()
    for number in range(100):
        noise = number % 10 * 1e-6
        stable.add_request(ok=True, ttft=0.01, seconds_per_token=0.0002 + noise)
        canary.add_request(ok=True, ttft=0.01, seconds_per_token=0.0002 + slower + noise)
    assert decide(config, stable, canary, now=1.0).verdict == verdict
