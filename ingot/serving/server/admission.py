"""Who is let in, decided before anything is tokenized.

Work that cannot be done soon is refused at once, with a time to come back: a queue without a
bound only makes everybody's answer late. Bounded are

- the requests and the tokens that are inside at a time, over all tenants;
- a tenant's requests and tokens in a minute, if its key says so (a bucket that refills);
- a tenant's share: it may hold `SHARE` times as much as is left free, so that k tenants that all
  want more than they get hold 8/(8k + 1) each, and 1/(8k + 1) stays free for whoever comes next.
  Nobody counts tenants or divides: Choudhury and Hahne's dynamic thresholds for switches
  (IEEE/ACM Transactions on Networking 6, 1998). A tenant that holds nothing is let in if there is
  room at all; without keys there is one tenant, who shares with nobody.

Tokens are estimated from bytes, and corrected when they are known. Among those inside, a tenant's
requests go behind others' the more of them there are (`Ticket.priority`). Nothing here reads a
clock: `now` is an argument.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ingot.core.errors import IngotError
from ingot.serving.server.keys import ANYBODY, Tenant

SHARE = 8
MAX_PRIORITY = 10
MINUTE = 60.0
MAX_RETRY = 60.0
_BYTES = 3
"""Of a token, about: English has 4 to 5, code 3, other scripts 1 to 3."""


class Shed(IngotError):
    """A request that is refused for now; `retry` says in how many seconds to come back.

    >>> raise Shed("too many requests", 2.5)
    Traceback (most recent call last):
    ...
    ingot.serving.server.admission.Shed: too many requests
      hint: try again in 3 s
    """

    def __init__(self, what: str, retry: float) -> None:
        self.retry = math.ceil(min(max(retry, 1.0), MAX_RETRY))
        super().__init__(what, hint=f"try again in {self.retry} s")


def estimate(size: int) -> int:
    """The tokens of a text of so many bytes, about.

    >>> estimate(1000)
    334
    """
    return -(-size // _BYTES)


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What may be inside at a time.

    >>> Bounds(requests=2).requests
    2
    """

    requests: int = 256
    tokens: int = 1 << 20


@dataclass(kw_only=True, eq=False)
class Ticket:
    """Somebody who is inside; to be given back once."""

    tenant: Tenant
    requests: int
    tokens: int
    priority: int
    """For the scheduler: how many of the tenant's requests were inside already."""


class _Bucket:
    """What may be used in a minute, refilled evenly."""

    def __init__(self, size: int, now: float) -> None:
        self.size, self.level, self.filled = size, float(size), now

    def wait(self, cost: int, now: float) -> float:
        """The seconds until there is enough. What is more than a minute's may go when it is full,
        and leaves a debt."""
        self.level = min(self.size, self.level + (now - self.filled) * self.size / MINUTE)
        self.filled = now
        return max(0.0, min(cost, self.size) - self.level) * MINUTE / self.size


class _Held:
    """What a tenant has inside, and its buckets."""

    def __init__(self, tenant: Tenant, now: float) -> None:
        self.requests = self.tokens = 0
        self.shares = tenant is not ANYBODY
        bounds = (tenant.requests, tenant.tokens)
        self.buckets = [None if bound is None else _Bucket(bound, now) for bound in bounds]


class Admission:
    """What is inside, and whose it is.

    >>> admission = Admission(Bounds(requests=20, tokens=100))
    >>> alice = Tenant(name="alice")
    >>> ticket = admission.enter(alice, requests=1, tokens=40, now=0.0)
    >>> admission.enter(alice, requests=1, tokens=70, now=0.0)
    Traceback (most recent call last):
    ...
    ingot.serving.server.admission.Shed: the server holds 40 tokens of 100 and cannot take 70 more
      hint: try again in 1 s
    >>> admission.leave(ticket, now=1.0)
    >>> admission.requests, admission.tokens
    (0, 0)
    """

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.requests = self.tokens = 0
        self.shed = 0
        """How many were refused."""
        self._of: dict[str, _Held] = {}
        self._pace = 0.0  # tokens that leave in a second, of late
        self._last = 0.0

    def enter(self, tenant: Tenant, *, requests: int, tokens: int, now: float) -> Ticket:
        """Let them in, or raise `Shed`. So many tokens are the prompts' and what is asked for."""
        held = self._of.get(tenant.name)
        if held is None:
            held = self._of[tenant.name] = _Held(tenant, now)
        try:
            self._check(held, requests, tokens, now)
        except Shed:
            self.shed += 1
            raise
        ticket = Ticket(
            tenant=tenant,
            requests=requests,
            tokens=tokens,
            priority=min(held.requests, MAX_PRIORITY),
        )
        for bucket, cost in zip(held.buckets, (requests, tokens), strict=True):
            if bucket is not None:
                bucket.level -= cost
        self._add(held, requests, tokens)
        return ticket

    def correct(self, ticket: Ticket, tokens: int) -> None:
        """Say how many tokens they are in truth. Nobody inside is sent away for it."""
        held, more = self._of[ticket.tenant.name], tokens - ticket.tokens
        self._add(held, 0, more)
        if held.buckets[1] is not None:
            held.buckets[1].level -= more
        ticket.tokens = tokens

    def leave(self, ticket: Ticket, now: float) -> None:
        """Give the place back."""
        held = self._of[ticket.tenant.name]
        self._add(held, -ticket.requests, -ticket.tokens)
        elapsed = max(now - self._last, 1e-3)
        weight = math.exp(-elapsed / 10)
        self._pace = weight * self._pace + (1 - weight) * ticket.tokens / elapsed
        self._last = now
        if not held.requests and held.buckets == [None, None]:
            del self._of[ticket.tenant.name]

    def _check(self, held: _Held, requests: int, tokens: int, now: float) -> None:
        for bucket, cost, what in zip(
            held.buckets, (requests, tokens), ("requests", "tokens"), strict=True
        ):
            wait = bucket.wait(cost, now) if bucket is not None else 0.0
            if bucket is not None and wait > 0:
                raise Shed(f"this key may use {bucket.size:,} {what} a minute", wait)
        bounds = self.bounds
        inside = (
            ("requests", self.requests, bounds.requests, held.requests, requests),
            ("tokens", self.tokens, bounds.tokens, held.tokens, tokens),
        )
        for what, used, bound, own, more in inside:
            left = bound - used - more
            if left < 0:
                raise Shed(
                    f"the server holds {used:,} {what} of {bound:,} and cannot take {more:,} more",
                    self._wait(-left if what == "tokens" else tokens),
                )
            if held.shares and held.requests and own + more > SHARE * left:
                raise Shed(
                    f"this key holds {own:,} of the {used:,} {what} inside, which is its share",
                    self._wait(tokens),
                )

    def _wait(self, tokens: int) -> float:
        """When so many tokens will have left, if it goes on as of late."""
        return tokens / self._pace if self._pace else 1.0

    def _add(self, held: _Held, requests: int, tokens: int) -> None:
        self.requests += requests
        self.tokens += tokens
        held.requests += requests
        held.tokens += tokens
