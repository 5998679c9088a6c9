"""How far the results of two models, or of two implementations of a model, are apart.

**Distributions.** `DistributionMeter` compares the next-token distributions of every position, and
`TopLogprobMeter` what a server reports of them: the log-probability of the next token and of the
most likely ones.

**Ops.** A `Trace` holds the result of every op of the first model. `TraceComparison` visits the ops
of the second model, twice. The first pass only compares: an error includes those of all ops before
it and shows how the difference grows. The second pass also replaces every result by that of the
first model, so each op computes from the same inputs: an *isolated* error is what this op adds.

    relative error   ||a - b|| / ||a||, over all positions and channels
    channel error    the largest over channels c of ||a_c - b_c|| / (||a_c|| + m), where m is the
                     median of all ||a_c||: a wrong row of a weight changes one channel

An op is an outlier if its isolated error is above rounding and far above the median of the same op
in all layers.

Legend: T positions, V vocabulary, K reported tokens.
"""

# pyright: basic
from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any

import torch
from torch import Tensor

from ingot.core.errors import IngotError

OUTLIER_RATIO = 4.0
"""An isolated error is an outlier from this multiple of the median of the same op on."""
_SUM_ERROR = 32 * torch.finfo(torch.float32).eps
"""Error of a float32 sum of thousands of terms in another order."""
_SINGLE = 8.0
"""An op that exists once is an outlier from this multiple of the rounding error on."""
_MIN_REST = 1e-6
"""Lowest probability of all tokens that a server does not report: float32 has no better."""


@dataclass(frozen=True, kw_only=True)
class DistributionDrift:
    """Differences of next-token distributions over all positions.

    KL is KL(first || second) in nats; ratios are of the probabilities of the next token.
    """

    positions: int
    bitwise_equal: bool
    """Whether all compared numbers are: logits, or the log-probabilities that a server reports."""
    kl_mean: float | None
    kl_p99: float | None
    kl_max: float | None
    tv_mean: float | None
    """Total variation: half the sum of the absolute differences of all probabilities."""
    tv_max: float | None
    logprob_mean: float
    """Of the absolute differences of the next token's log-probability."""
    logprob_p99: float
    logprob_max: float
    argmax_agreement: float | None
    """Fraction of positions with the same most likely token."""
    within_1_percent: float
    """Fraction of positions whose ratio is between 1 / 1.01 and 1.01."""
    within_5_percent: float
    is_lower_bound: bool = False
    """Whether KL and total variation are lower bounds, from the most likely tokens alone."""


@dataclass(frozen=True, kw_only=True)
class OpDrift:
    """Differences of the result of one op."""

    name: str
    """As in `ingot.nn.probe`."""
    error: float
    """Relative error, with those of all ops before it."""
    bitwise_equal: bool
    isolated_error: float
    """Relative error from the same inputs."""
    isolated_bitwise_equal: bool
    channel_error: float
    """Largest error of a channel, from the same inputs."""
    channel: int
    """The channel that has it."""

    @property
    def layer(self) -> int | None:
        """Index of the block; None for embedding, final norm and LM head."""
        parts = self.name.split(".")
        return int(parts[1]) if parts[0] == "blocks" else None

    @property
    def kind(self) -> str:
        """Name within a block.

        >>> numbers = dict(error=0.0, isolated_error=0.0, channel_error=0.0, channel=0)
        >>> equal = dict(bitwise_equal=True, isolated_bitwise_equal=True)
        >>> OpDrift(name="blocks.17.mlp.down", **numbers, **equal).kind
        'mlp.down'
        """
        return self.name if self.layer is None else self.name.split(".", 2)[2]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Result of `ingot.compare`."""

    model: str
    other: str
    dtype: str
    device: str
    token_ids: tuple[int, ...]
    """The input, and the next token of its last position."""
    logprobs: tuple[float, ...]
    """Of each next token, by the first model."""
    other_logprobs: tuple[float, ...]
    distribution: DistributionDrift
    lm_head: DistributionDrift | None = None
    """Drift of the LM head alone, from the same hidden states."""
    ops: tuple[OpDrift, ...] = ()
    """In the order of computation."""
    same_kernels: bool = False
    """Whether both sides are computed by ingot: equal weights and inputs give equal bits."""
    note: str | None = None
    """Why there are no ops, or what else limits the comparison."""

    @property
    def bitwise_equal(self) -> bool:
        """Whether every compared number is."""
        return self.distribution.bitwise_equal and all(op.bitwise_equal for op in self.ops)

    @property
    def first_difference(self) -> OpDrift | None:
        """The first op that computes other bits from the same inputs."""
        return next((op for op in self.ops if not op.isolated_bitwise_equal), None)

    @property
    def rounding_error(self) -> float:
        """Isolated error up to which two implementations differ by rounding; 0 for the same
        kernels."""
        if self.same_kernels:
            return 0.0
        return torch.finfo(getattr(torch, self.dtype)).eps + _SUM_ERROR

    @property
    def outliers(self) -> list[tuple[OpDrift, float]]:
        """Ops whose isolated error is far above the median of the same op in all layers, with the
        ratio to it; the largest first. The ratio is infinite where the median is 0."""
        floor = self.rounding_error
        found: list[tuple[OpDrift, float]] = []
        for op in self.ops:
            alike = [other for other in self.ops if other.kind == op.kind]
            ratio = max(
                _ratio(op.isolated_error, [one.isolated_error for one in alike], floor),
                _ratio(op.channel_error, [one.channel_error for one in alike], floor),
            )
            if op.layer is None:
                ratio = math.inf if op.isolated_error > _SINGLE * floor else 0.0
            if ratio > OUTLIER_RATIO:
                found.append((op, ratio))
        return sorted(found, key=lambda pair: (-pair[1], -pair[0].isolated_error))

    def as_dict(self) -> dict[str, Any]:
        """Return everything as values of JSON; infinite errors and ratios are None."""
        first = self.first_difference
        ops = [{**dataclasses.asdict(op), "error": _finite(op.error)} for op in self.ops]
        for op in ops:
            op |= {name: _finite(op[name]) for name in ("isolated_error", "channel_error")}
        return {
            **dataclasses.asdict(self),
            "ops": ops,
            "bitwise_equal": self.bitwise_equal,
            "first_difference": first and first.name,
            "outliers": [{"name": op.name, "ratio": _finite(ratio)} for op, ratio in self.outliers],
        }


def _finite(value: float) -> float | None:
    """Return the number; None if it is infinite, which JSON has no word for."""
    return value if math.isfinite(value) else None


def _ratio(value: float, alike: Sequence[float], floor: float) -> float:
    if value <= floor:
        return 0.0
    usual = median_low(alike)
    return value / usual if usual > 0 else math.inf


class Trace:
    """The result of every op of a model: `visit` is an argument of `ingot.nn.probe.probe`."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}

    def visit(self, name: str, value: Tensor) -> None:
        """Keep a copy of the result."""
        self.values[name] = value.detach().flatten(1).clone()


class TraceComparison:
    """Errors of the ops of a second model; those of one pass.

    With `isolate`, each result is replaced by that of the first model after it was compared.
    """

    def __init__(self, reference: Trace, *, isolate: bool) -> None:
        self._reference, self._isolate = reference.values, isolate
        self.errors: dict[str, tuple[float, bool, float, int]] = {}
        """Relative error, whether bitwise equal, largest error of a channel, that channel."""

    def visit(self, name: str, value: Tensor) -> None:
        """Compare a result with that of the first model."""
        reference, meter = self._reference[name], ErrorMeter()
        meter.add(reference, value.detach().flatten(1))
        self.errors[name] = meter.result()
        if self._isolate:
            value.copy_(reference.view(value.shape))


class ErrorMeter:
    """Accumulates the errors of one result, chunk by chunk of its rows.

    >>> meter = ErrorMeter()
    >>> meter.add(torch.ones(4, 2), torch.tensor([[1.0, 1.5]]).expand(4, 2))
    >>> meter.result()
    (0.35355339059327373, False, 0.25, 1)
    """

    def __init__(self) -> None:
        self._norms: Tensor | float = 0.0
        self._distances: Tensor | float = 0.0
        self._bitwise_equal = True

    def add(self, reference_TC: Tensor, value_TC: Tensor) -> None:
        """Add some rows of (T, channels)."""
        self._bitwise_equal &= same_bits(reference_TC, value_TC)
        a, b = reference_TC.double(), value_TC.double()
        self._norms = self._norms + a.square().sum(0)
        self._distances = self._distances + (a - b).square().sum(0)

    def result(self) -> tuple[float, bool, float, int]:
        """Return relative error, whether bitwise equal, largest error of a channel, that channel.

        A value that is not finite on the second side is an infinite error.
        """
        assert isinstance(self._norms, Tensor)
        assert isinstance(self._distances, Tensor)
        norms, distances = self._norms.sqrt(), self._distances.nan_to_num(math.inf).sqrt()
        by_channel = distances / (norms + norms.median()).clamp_min(1e-300)
        channel = int(by_channel.argmax())
        error = float(distances.norm() / norms.norm().clamp_min(1e-300))
        return error, self._bitwise_equal, float(by_channel[channel]), channel


def same_bits(some: Tensor, others: Tensor) -> bool:
    """Return whether two tensors have the same dtype and the same bits.

    >>> same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    False
    """
    if some.dtype != others.dtype:
        return False
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[some.dtype.itemsize]
    return torch.equal(some.contiguous().view(kind), others.contiguous().view(kind))


class DistributionMeter:
    """Compares logits chunk by chunk; all sums are in float64.

    >>> meter = DistributionMeter()
    >>> logits_TV = torch.tensor([[0.0, 0.0]])
    >>> meter.add(logits_TV, torch.tensor([[0.0, 1.0]]), torch.tensor([1]))
    >>> drift = meter.result()
    >>> round(drift.kl_mean, 4), round(drift.tv_mean, 4), drift.argmax_agreement
    (0.1201, 0.2311, 0.0)
    """

    def __init__(self) -> None:
        self._parts: dict[str, list[Tensor]] = {}
        self._bitwise_equal = True
        self.logprobs: list[float] = []
        self.other_logprobs: list[float] = []

    def add(self, logits_TV: Tensor, other_TV: Tensor, targets_T: Tensor) -> None:
        """Compare the distributions of some positions; `targets_T` are the next tokens."""
        for side, logits in (("first", logits_TV), ("second", other_TV)):
            if not torch.isfinite(logits).all():
                raise IngotError(
                    f"the {side} model computes logits that are not finite",
                    hint="check its weights, or compare in another dtype: --dtype float32",
                )
        self._bitwise_equal &= same_bits(logits_TV, other_TV)
        p_TV, q_TV = (x.double().log_softmax(-1) for x in (logits_TV, other_TV))
        index_T1 = targets_T[:, None]
        of_p, of_q = p_TV.gather(1, index_T1)[:, 0], q_TV.gather(1, index_T1)[:, 0]
        self.logprobs += of_p.tolist()
        self.other_logprobs += of_q.tolist()
        probs_TV = p_TV.exp()
        for name, value in (
            ("kl", (probs_TV * (p_TV - q_TV)).sum(-1).clamp_min(0)),  # rounding may leave -1e-17
            ("tv", (probs_TV - q_TV.exp()).abs().sum(-1) / 2),
            ("argmax", (logits_TV.argmax(-1) == other_TV.argmax(-1)).double()),
        ):
            self._parts.setdefault(name, []).append(value.cpu())

    def result(self) -> DistributionDrift:
        """Return the differences over all positions so far."""
        parts = {name: torch.cat(values) for name, values in self._parts.items()}
        return DistributionDrift(
            bitwise_equal=self._bitwise_equal,
            kl_mean=float(parts["kl"].mean()),
            kl_p99=float(parts["kl"].quantile(0.99)),
            kl_max=float(parts["kl"].max()),
            tv_mean=float(parts["tv"].mean()),
            tv_max=float(parts["tv"].max()),
            argmax_agreement=float(parts["argmax"].mean()),
            **_of_next_token(_difference(self.logprobs, self.other_logprobs)),
        )


class TopLogprobMeter:
    """Compares with the log-probabilities that a server reports of each position.

    The reported tokens and the rest as one event are a coarser distribution. Its KL and total
    variation are lower bounds of those of the whole vocabulary (data processing inequality).

    >>> meter = TopLogprobMeter()
    >>> meter.add(torch.tensor([-0.5, -1.0]), 1, -1.0, {0: -0.5}, 0)
    >>> meter.result().bitwise_equal
    True
    """

    def __init__(self) -> None:
        self._kl: list[float] = []
        self._tv: list[float] = []
        self._agrees: list[bool] = []
        self._bitwise_equal = True
        self.logprobs: list[float] = []
        self.other_logprobs: list[float] = []

    def add(
        self,
        logprobs_V: Tensor,
        target: int,
        other_logprob: float,
        top: dict[int, float],
        top_token: int | None,
    ) -> None:
        """Compare one position.

        Args:
            logprobs_V: Log-probabilities of the first model.
            target: The next token.
            other_logprob: What the server reports of it.
            top: What the server reports of other tokens, by token id; empty if nothing.
            top_token: The server's most likely token; None if it is unknown.
        """
        self.logprobs.append(float(logprobs_V[target]))
        self.other_logprobs.append(other_logprob)
        reported = {**top, target: other_logprob}
        ours_K = logprobs_V[list(reported)].double()
        theirs_K = torch.tensor(list(reported.values()), dtype=torch.float64)
        self._bitwise_equal &= torch.equal(ours_K, theirs_K)
        if not top:
            return
        p_K, q_K = ours_K.exp(), theirs_K.exp()
        rest = [max(1 - float(x.sum()), _MIN_REST) for x in (p_K, q_K)]
        kl = float((p_K * (ours_K - theirs_K)).sum()) + rest[0] * math.log(rest[0] / rest[1])
        self._kl.append(max(0.0, kl))
        self._tv.append((float((p_K - q_K).abs().sum()) + abs(rest[0] - rest[1])) / 2)
        if top_token is not None:
            self._agrees.append(int(logprobs_V.argmax()) == top_token)

    def result(self) -> DistributionDrift:
        """Return the differences over all positions so far."""
        kl, tv, agrees = self._kl, self._tv, self._agrees
        return DistributionDrift(
            bitwise_equal=self._bitwise_equal,
            kl_mean=math.fsum(kl) / len(kl) if kl else None,
            kl_p99=float(torch.tensor(kl, dtype=torch.float64).quantile(0.99)) if kl else None,
            kl_max=max(kl, default=None),
            tv_mean=math.fsum(tv) / len(tv) if tv else None,
            tv_max=max(tv, default=None),
            argmax_agreement=sum(agrees) / len(agrees) if agrees else None,
            is_lower_bound=True,
            **_of_next_token(_difference(self.logprobs, self.other_logprobs)),
        )


def _difference(some: list[float], others: list[float]) -> Tensor:
    return torch.tensor(others, dtype=torch.float64) - torch.tensor(some, dtype=torch.float64)


def _of_next_token(deltas_T: Tensor) -> dict[str, Any]:
    sizes_T = deltas_T.abs()

    def within(bound: float) -> float:
        return float((sizes_T <= math.log1p(bound)).double().mean())

    return {
        "positions": len(deltas_T),
        "logprob_mean": float(sizes_T.mean()),
        "logprob_p99": float(sizes_T.quantile(0.99)),
        "logprob_max": float(sizes_T.max()),
        "within_1_percent": within(0.01),
        "within_5_percent": within(0.05),
    }
