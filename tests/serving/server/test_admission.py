"""Limits hold, released capacity is not lost, and a new tenant finds room."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ingot.serving.server.admission import (
    MAX_RETRY_AFTER_S,
    SHARE,
    Admission,
    AdmissionLimits,
    Overloaded,
    Ticket,
    estimate_tokens,
)
from ingot.serving.server.keys import ANONYMOUS, Tenant

TENANTS = [
    Tenant(name="alice"),
    Tenant(name="bob", requests=5),
    Tenant(name="carol", tokens=300),
    ANONYMOUS,
]


class Door(RuleBasedStateMachine):
    """Tenants come and go; the books are kept here as well."""

    def __init__(self) -> None:
        super().__init__()
        self.limits = AdmissionLimits(requests=12, tokens=500)
        self.admission = Admission(self.limits)
        self.inside: list[Ticket] = []
        self.corrected = 0
        self.now = 0.0
        self.entered: list[tuple[float, str, int, int]] = []

    @rule(seconds=st.floats(0, 100))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(tenant=st.sampled_from(TENANTS), requests=st.integers(1, 4), tokens=st.integers(1, 600))
    def come(self, tenant: Tenant, requests: int, tokens: int) -> None:
        own = [t for t in self.inside if t.tenant is tenant]
        before = (self.admission.requests, self.admission.tokens)
        left = self.limits.requests - before[0] - requests, self.limits.tokens - before[1] - tokens
        ticket = shed = None
        try:
            ticket = self.admission.acquire(tenant, requests=requests, tokens=tokens, now=self.now)
        except Overloaded as error:
            shed = error
        if ticket is None:
            assert shed
            assert 1 <= shed.retry_after <= MAX_RETRY_AFTER_S
            assert (self.admission.requests, self.admission.tokens) == before
            # A tenant with nothing in flight and no limits of its own is never rejected if it fits.
            assert own or tenant.requests or tenant.tokens or min(left) < 0
        else:
            assert min(left) >= 0
            if own and tenant is not ANONYMOUS:
                assert sum(t.requests for t in own) + requests <= SHARE * left[0]
                assert sum(t.tokens for t in own) + tokens <= SHARE * left[1]
            assert ticket.priority == min(sum(t.requests for t in own), 10)
            self.inside.append(ticket)
            self.entered.append((self.now, tenant.name, requests, tokens))

    @precondition(lambda self: self.inside)
    @rule(data=st.data(), tokens=st.integers(1, 600))
    def correct(self, data: st.DataObject, tokens: int) -> None:
        self.admission.correct(data.draw(st.sampled_from(self.inside)), tokens)
        self.corrected += 1

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.inside))
        self.inside.remove(ticket)
        self.admission.release(ticket, self.now)

    @invariant()
    def the_books_agree(self) -> None:
        assert self.admission.requests == sum(t.requests for t in self.inside)
        assert self.admission.tokens == sum(t.tokens for t in self.inside)
        assert self.admission.requests <= self.limits.requests
        if not self.corrected:
            assert self.admission.tokens <= self.limits.tokens

    @invariant()
    def a_minute_has_at_most_two_buckets(self) -> None:
        """A full bucket, and what flows in meanwhile."""
        recent = [e for e in self.entered if e[0] > self.now - 60]
        assert sum(e[2] for e in recent if e[1] == "bob") <= 2 * 5


TestDoor = Door.TestCase


def test_tenants_that_want_more_than_they_get_get_the_same() -> None:
    admission = Admission(AdmissionLimits(requests=10_000, tokens=90_000))
    tenants = [Tenant(name=name) for name in ("a", "b", "c")]
    counts = dict.fromkeys("abc", 0)
    for _ in range(3000):
        for tenant in tenants:
            try:
                admission.acquire(tenant, requests=1, tokens=100, now=0.0)
                counts[tenant.name] += 1
            except Overloaded:
                pass
    assert max(counts.values()) - min(counts.values()) <= 1
    assert sum(counts.values()) * 100 >= 0.93 * 90_000  # 24/25 with three
    late = Tenant(name="late")
    admission.acquire(late, requests=1, tokens=100, now=0.0)


def test_one_that_was_there_before_leaves_room_for_the_next() -> None:
    admission = Admission(AdmissionLimits(requests=90, tokens=10**9))
    first, second = Tenant(name="first"), Tenant(name="second")
    for _ in range(80):
        admission.acquire(first, requests=1, tokens=1, now=0.0)
    with pytest.raises(Overloaded, match="fair share"):
        admission.acquire(first, requests=1, tokens=1, now=0.0)
    assert admission.acquire(second, requests=1, tokens=1, now=0.0).priority == 0
    assert admission.num_rejected == 1


def test_without_keys_all_of_the_room_is_one_tenants() -> None:
    admission = Admission(AdmissionLimits(requests=9, tokens=1000))
    for _ in range(9):
        admission.acquire(ANONYMOUS, requests=1, tokens=1, now=0.0)
    with pytest.raises(Overloaded, match="9 of 9 requests in flight"):
        admission.acquire(ANONYMOUS, requests=1, tokens=1, now=0.0)


def test_a_bucket_says_when_to_come_back_and_keeps_its_word() -> None:
    admission, tenant = Admission(AdmissionLimits()), Tenant(name="t", requests=6)
    for _ in range(6):
        admission.release(admission.acquire(tenant, requests=1, tokens=1, now=100.0), 100.0)
    with pytest.raises(Overloaded, match="6 requests per minute") as shed:
        admission.acquire(tenant, requests=1, tokens=1, now=100.0)
    assert shed.value.retry_after == 10
    with pytest.raises(Overloaded):
        admission.acquire(tenant, requests=1, tokens=1, now=109.0)
    admission.acquire(tenant, requests=1, tokens=1, now=110.0)


def test_a_request_larger_than_the_bucket_goes_when_it_is_full_and_leaves_a_debt() -> None:
    admission, tenant = Admission(AdmissionLimits()), Tenant(name="t", tokens=60)
    admission.acquire(tenant, requests=1, tokens=90, now=0.0)
    with pytest.raises(Overloaded):
        admission.acquire(tenant, requests=1, tokens=1, now=30.0)
    admission.acquire(tenant, requests=1, tokens=1, now=31.5)


def test_the_time_to_come_back_follows_the_pace() -> None:
    admission = Admission(AdmissionLimits(tokens=1000))
    for second in range(1, 60):
        ticket = admission.acquire(ANONYMOUS, requests=1, tokens=100, now=float(second))
        admission.release(ticket, float(second))
    admission.acquire(ANONYMOUS, requests=1, tokens=1000, now=60.0)
    with pytest.raises(Overloaded) as shed:
        admission.acquire(ANONYMOUS, requests=1, tokens=1000, now=60.0)
    assert shed.value.retry_after in (10, 11)


@given(st.integers(0, 10**9))
def test_an_estimate_is_never_none_for_some_bytes(size: int) -> None:
    assert (estimate_tokens(size) > 0) == (size > 0)
