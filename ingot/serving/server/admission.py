"""Admission control: which requests are accepted, decided before anything is tokenized.

Requests that cannot be served soon are rejected at once with a time to retry: an unbounded queue
only makes every response late. The limits are

- requests and tokens in flight, over all tenants;
- a tenant's requests and tokens per minute, if its key has such limits (token bucket);
- a tenant's share: it may use at most `SHARE` times the remaining free capacity, so that k tenants
  that all want more converge to 8/(8k + 1) each, and 1/(8k + 1) stays free for the next one.
  (Choudhury and Hahne's dynamic thresholds for switches, IEEE/ACM Transactions on Networking 6,
  1998.) A tenant without requests in flight is accepted if there is room at all; without keys there
  is one tenant, to which shares do not apply.

Tokens are estimated from bytes and corrected once they are known. In the scheduler's queue, a
tenant's requests rank the later the more of them are in flight (`Ticket.priority`). Nothing here
reads a clock: `now` is an argument.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ingot.core.errors import IngotError
from ingot.serving.server.keys import ANONYMOUS, Tenant

SHARE = 8
MAX_PRIORITY = 10
MINUTE_S = 60.0
MAX_RETRY_AFTER_S = 60.0
_BYTES_PER_TOKEN = 3
"""Estimate: English has 4 to 5, code 3, other scripts 1 to 3."""


class Overloaded(IngotError):
    """The server is overloaded; the client should retry after `retry_after` seconds.

    >>> raise Overloaded("too many requests", 2.5)
    Traceback (most recent call last):
    ...
    ingot.serving.server.admission.Overloaded: too many requests
      hint: retry in 3 s
    """

    def __init__(self, message: str, wait: float) -> None:
        self.retry_after = math.ceil(min(max(wait, 1.0), MAX_RETRY_AFTER_S))
        super().__init__(message, hint=f"retry in {self.retry_after} s")


def estimate_tokens(num_bytes: int) -> int:
    """Estimate the number of tokens of a text.

    >>> estimate_tokens(1000)
    334
    """
    return -(-num_bytes // _BYTES_PER_TOKEN)


@dataclass(frozen=True, kw_only=True)
class AdmissionLimits:
    """Maximum requests and tokens in flight.

    >>> AdmissionLimits(requests=2).requests
    2
    """

    requests: int = 256
    tokens: int = 1 << 20


@dataclass(kw_only=True, eq=False)
class Ticket:
    """An accepted request; released exactly once."""

    tenant: Tenant
    requests: int
    tokens: int
    priority: int
    """For the scheduler: how many requests of the tenant were in flight already."""


class _Bucket:
    """Token bucket of a limit per minute."""

    def __init__(self, size: int, now: float) -> None:
        self.size, self.level, self.filled = size, float(size), now

    def wait(self, cost: int, now: float) -> float:
        """Return the seconds until `cost` is available. A cost above the size needs a full bucket
        and leaves it in debt."""
        self.level = min(self.size, self.level + (now - self.filled) * self.size / MINUTE_S)
        self.filled = now
        return max(0.0, min(cost, self.size) - self.level) * MINUTE_S / self.size


class _TenantState:
    """Requests and tokens of a tenant in flight, and its buckets."""

    def __init__(self, tenant: Tenant, now: float) -> None:
        self.requests = self.tokens = 0
        self.is_shared = tenant is not ANONYMOUS
        limits = (tenant.requests, tenant.tokens)
        self.buckets = [None if limit is None else _Bucket(limit, now) for limit in limits]


class Admission:
    """Requests and tokens in flight, by tenant.

    >>> admission = Admission(AdmissionLimits(requests=20, tokens=100))
    >>> alice = Tenant(name="alice")
    >>> ticket = admission.acquire(alice, requests=1, tokens=40, now=0.0)
    >>> admission.acquire(alice, requests=1, tokens=70, now=0.0)
    Traceback (most recent call last):
    ...
    ingot.serving.server.admission.Overloaded: 40 of 100 tokens in flight, cannot accept 70 more
      hint: retry in 1 s
    >>> admission.release(ticket, now=1.0)
    >>> admission.requests, admission.tokens
    (0, 0)
    """

    def __init__(self, limits: AdmissionLimits) -> None:
        self.limits = limits
        self.requests = self.tokens = 0
        self.num_rejected = 0
        """Number of rejected requests."""
        self._tenants: dict[str, _TenantState] = {}
        self._drain_rate = 0.0  # tokens released per second, moving average
        self._last = 0.0

    def acquire(self, tenant: Tenant, *, requests: int, tokens: int, now: float) -> Ticket:
        """Accept the requests, or raise `Overloaded`; `tokens` counts prompts and `max_tokens`."""
        tenant_state = self._tenants.get(tenant.name)
        if tenant_state is None:
            tenant_state = self._tenants[tenant.name] = _TenantState(tenant, now)
        try:
            self._check(tenant_state, requests, tokens, now)
        except Overloaded:
            self.num_rejected += 1
            raise
        ticket = Ticket(
            tenant=tenant,
            requests=requests,
            tokens=tokens,
            priority=min(tenant_state.requests, MAX_PRIORITY),
        )
        for bucket, cost in zip(tenant_state.buckets, (requests, tokens), strict=True):
            if bucket is not None:
                bucket.level -= cost
        self._add(tenant_state, requests, tokens)
        return ticket

    def correct(self, ticket: Ticket, tokens: int) -> None:
        """Replace the estimate by the actual number of tokens; no accepted request is rejected."""
        tenant_state, more = self._tenants[ticket.tenant.name], tokens - ticket.tokens
        self._add(tenant_state, 0, more)
        if tenant_state.buckets[1] is not None:
            tenant_state.buckets[1].level -= more
        ticket.tokens = tokens

    def release(self, ticket: Ticket, now: float) -> None:
        """Release a request that finished."""
        tenant_state = self._tenants[ticket.tenant.name]
        self._add(tenant_state, -ticket.requests, -ticket.tokens)
        elapsed = max(now - self._last, 1e-3)
        weight = math.exp(-elapsed / 10)
        self._drain_rate = weight * self._drain_rate + (1 - weight) * ticket.tokens / elapsed
        self._last = now
        if not tenant_state.requests and tenant_state.buckets == [None, None]:
            del self._tenants[ticket.tenant.name]

    def _check(self, tenant_state: _TenantState, requests: int, tokens: int, now: float) -> None:
        for bucket, cost, unit in zip(
            tenant_state.buckets, (requests, tokens), ("requests", "tokens"), strict=True
        ):
            wait = bucket.wait(cost, now) if bucket is not None else 0.0
            if bucket is not None and wait > 0:
                raise Overloaded(f"rate limit: {bucket.size:,} {unit} per minute", wait)
        limits = self.limits
        in_flight = (
            ("requests", self.requests, limits.requests, tenant_state.requests, requests),
            ("tokens", self.tokens, limits.tokens, tenant_state.tokens, tokens),
        )
        for unit, used, bound, own, more in in_flight:
            left = bound - used - more
            if left < 0:
                raise Overloaded(
                    f"{used:,} of {bound:,} {unit} in flight, cannot accept {more:,} more",
                    self._wait(-left if unit == "tokens" else tokens),
                )
            if tenant_state.is_shared and tenant_state.requests and own + more > SHARE * left:
                raise Overloaded(
                    f"fair share: this key has {own:,} of the {used:,} {unit} in flight",
                    self._wait(tokens),
                )

    def _wait(self, tokens: int) -> float:
        """Return the seconds until `tokens` are released, at the recent rate."""
        return tokens / self._drain_rate if self._drain_rate else 1.0

    def _add(self, tenant_state: _TenantState, requests: int, tokens: int) -> None:
        self.requests += requests
        self.tokens += tokens
        tenant_state.requests += requests
        tenant_state.tokens += tokens


class VersionAdmission:
    """Requests of one version in flight, within the limits of all versions of a deployment.

    >>> total = Admission(AdmissionLimits(requests=20, tokens=100))
    >>> old, new = VersionAdmission(total), VersionAdmission(total)
    >>> ticket = old.acquire(Tenant(name="alice"), requests=1, tokens=40, now=0.0)
    >>> old.requests, new.requests, total.requests
    (1, 0, 1)
    >>> old.release(ticket, now=1.0)
    >>> old.requests, total.requests
    (0, 0)
    """

    def __init__(self, total: Admission) -> None:
        self.total = total
        self.requests = self.tokens = self.num_rejected = 0

    def acquire(self, tenant: Tenant, *, requests: int, tokens: int, now: float) -> Ticket:
        """Accept the requests, or raise `Overloaded`."""
        try:
            ticket = self.total.acquire(tenant, requests=requests, tokens=tokens, now=now)
        except Overloaded:
            self.num_rejected += 1
            raise
        self.requests += requests
        self.tokens += tokens
        return ticket

    def correct(self, ticket: Ticket, tokens: int) -> None:
        """Replace the estimate by the actual number of tokens."""
        self.tokens += tokens - ticket.tokens
        self.total.correct(ticket, tokens)

    def release(self, ticket: Ticket, now: float) -> None:
        """Release a request that finished."""
        self.requests -= ticket.requests
        self.tokens -= ticket.tokens
        self.total.release(ticket, now)
