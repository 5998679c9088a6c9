"""Figures of a comparison against their definitions, and properties that always hold."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ingot.core.errors import IngotError
from ingot.observe.drift import (
    Comparison,
    DistributionDrift,
    DistributionMeter,
    ErrorMeter,
    OpDrift,
    TopLogprobMeter,
    Trace,
    TraceComparison,
    same_bits,
)

EQUAL = {"error": 0.0, "bitwise_equal": True, "channel_error": 0.0, "channel": 0}


def op(name: str, isolated: float, channel: float = 0.0) -> OpDrift:
    numbers = {**EQUAL, "channel_error": channel or isolated}
    return OpDrift(
        name=name, isolated_error=isolated, isolated_bitwise_equal=not isolated, **numbers
    )


def logits(seed: int, rows: int = 7, tokens: int = 11, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(rows, tokens, generator=torch.Generator().manual_seed(seed))


def meter(first: Tensor, second: Tensor, chunk: int = 100) -> DistributionDrift:
    made, targets = DistributionMeter(), torch.arange(len(first)) % first.shape[1]
    for at in range(0, len(first), chunk):
        rows = slice(at, at + chunk)
        made.add(first[rows], second[rows], targets[rows])
    return made.result()


def test_figures_are_those_of_their_definitions() -> None:
    first, second = logits(0), logits(1)
    drift = meter(first, second, chunk=3)
    p, q = (x.double().softmax(-1) for x in (first, second))
    kl = torch.nn.functional.kl_div(q.log(), p, reduction="none").sum(-1)
    assert drift.kl_mean == pytest.approx(float(kl.mean()))
    assert drift.kl_max == pytest.approx(float(kl.max()))
    assert drift.tv_max == pytest.approx(float((p - q).abs().sum(-1).max() / 2))
    rows = torch.arange(7)
    ratios = (q / p)[rows, rows]
    assert drift.logprob_mean == pytest.approx(float(ratios.log().abs().mean()))
    assert drift.logprob_max == pytest.approx(float(ratios.log().abs().max()))
    inside = (ratios <= 1.05) & (ratios >= 1 / 1.05)
    assert drift.within_5_percent == pytest.approx(float(inside.double().mean()))
    assert drift.argmax_agreement == float((p.argmax(-1) == q.argmax(-1)).double().mean())
    assert not drift.bitwise_equal


def test_p99_of_a_planted_distribution_is_that_of_numpy() -> None:
    """Against equal odds, q has a KL of -log(4 q (1 - q)) / 2; most are small, and few large."""
    random = np.random.default_rng(0)
    log_odds = random.permutation(np.r_[random.normal(0, 0.01, 780), random.normal(0, 3, 20)])
    q = 1 / (1 + np.exp(-log_odds))
    kl = -np.log(4 * q * (1 - q)) / 2
    first = torch.zeros(800, 2, dtype=torch.float64)
    second = torch.stack([first[:, 0], torch.from_numpy(log_odds)], 1)
    drift, some = meter(first, second, chunk=33), TopLogprobMeter()
    for row in second.log_softmax(-1).tolist():
        some.add(torch.tensor([0.5, 0.5]).log(), 0, row[0], {1: row[1]}, None)
    expected = float(np.quantile(kl, 0.99))
    assert drift.kl_p99 == pytest.approx(expected, rel=1e-9)
    assert some.result().kl_p99 == pytest.approx(expected, rel=1e-4)
    assert kl.mean() < 0.2 * expected < 0.2 * kl.max()


def test_equal_logits_have_no_drift() -> None:
    drift = meter(logits(0), logits(0))
    assert drift.bitwise_equal
    assert (drift.kl_max, drift.tv_max, drift.logprob_max) == (0.0, 0.0, 0.0)
    assert (drift.argmax_agreement, drift.within_1_percent) == (1.0, 1.0)
    assert not meter(logits(0), logits(0).bfloat16()).bitwise_equal


@given(st.integers(0, 10**6), st.floats(0.01, 20.0), st.integers(1, 9))
def test_figures_are_in_their_ranges(seed: int, scale: float, chunk: int) -> None:
    first, second = logits(seed, scale=scale), logits(seed + 1, scale=scale)
    drift = meter(first, second, chunk)
    assert drift.kl_max is not None
    assert drift.kl_mean is not None
    assert drift.tv_max is not None
    assert 0 <= drift.kl_mean <= drift.kl_max * (1 + 1e-12)
    assert 0 <= drift.tv_max <= 1 + 1e-12
    assert 2 * drift.tv_max**2 <= drift.kl_max + 1e-12  # Pinsker
    assert drift.logprob_mean <= drift.logprob_max * (1 + 1e-12)
    assert drift.within_1_percent <= drift.within_5_percent


@given(st.integers(0, 10**6), st.integers(1, 10))
def test_top_logprobs_give_lower_bounds(seed: int, top: int) -> None:
    first, second = logits(seed), logits(seed + 1)
    p, q = (x.double().log_softmax(-1) for x in (first, second))
    some = TopLogprobMeter()
    for row in range(len(p)):
        likely = q[row].topk(top).indices.tolist()
        known = {token: float(q[row, token]) for token in likely}
        some.add(p[row], row, float(q[row, row]), known, likely[0])
    whole, bound = meter(first, second), some.result()
    assert bound.is_lower_bound
    assert (bound.kl_mean or 0) <= (whole.kl_mean or 0) + 1e-9
    assert (bound.tv_max or 0) <= (whole.tv_max or 0) + 1e-9
    assert bound.logprob_max == pytest.approx(whole.logprob_max)
    assert bound.argmax_agreement == whole.argmax_agreement
    assert not bound.bitwise_equal


def test_a_server_without_top_tokens_gives_the_next_token_alone() -> None:
    some = TopLogprobMeter()
    some.add(torch.tensor([0.5, 0.5]).log(), 1, -0.6, {}, None)
    found = some.result()
    assert (found.kl_mean, found.tv_max, found.argmax_agreement) == (None, None, None)
    assert found.logprob_max == pytest.approx(math.log(2) - 0.6)


def test_logits_that_are_not_finite_are_an_error() -> None:
    wrong = logits(0)
    wrong[3, 4] = math.nan
    with pytest.raises(IngotError, match="second model"):
        meter(logits(0), wrong)
    with pytest.raises(IngotError, match="first model"):
        meter(wrong, logits(0))


@given(st.integers(0, 10**6), st.integers(0, 10), st.integers(1, 20))
def test_a_changed_channel_is_named(seed: int, channel: int, chunk: int) -> None:
    first = logits(seed, rows=20)
    second = first.clone()
    second[:, channel] *= 1.5
    meter = ErrorMeter()
    for at in range(0, 20, chunk):
        meter.add(first[at : at + chunk], second[at : at + chunk])
    error, equal, channel_error, found = meter.result()
    assert (equal, found) == (False, channel)
    assert error == pytest.approx(float((first - second).norm() / first.norm()), rel=1e-5)
    assert 0 < channel_error <= 0.5


def test_a_value_that_is_not_finite_is_an_infinite_error() -> None:
    meter = ErrorMeter()
    meter.add(torch.ones(2, 3), torch.tensor([[1.0, math.nan, 1.0], [1.0, 1.0, 1.0]]))
    assert meter.result() == (math.inf, False, math.inf, 1)


def test_bits_are_compared_not_values() -> None:
    assert not same_bits(torch.zeros(1), -torch.zeros(1))
    assert not same_bits(torch.zeros(1), torch.zeros(1, dtype=torch.float64))
    assert same_bits(torch.full((1,), math.nan), torch.full((1,), math.nan))


def test_isolated_pass_replaces_results() -> None:
    trace, value = Trace(), torch.zeros(2, 3, 4)
    trace.visit("a", torch.ones(2, 3, 4))
    TraceComparison(trace, isolate=False).visit("a", value)
    assert not value.any()
    TraceComparison(trace, isolate=True).visit("a", value)
    assert value.all()


def comparison(ops: list[OpDrift], **changes: Any) -> Comparison:
    drift = meter(logits(0), logits(0))
    made = Comparison(
        model="a",
        other="b",
        dtype="bfloat16",
        device="cpu",
        token_ids=(1, 2),
        logprobs=(-1.0,),
        other_logprobs=(-1.0,),
        distribution=drift,
        ops=tuple(ops),
    )
    return replace(made, **changes)


def layers(*errors: float, kind: str = "mlp.down") -> list[OpDrift]:
    return [op(f"blocks.{layer}.{kind}", error) for layer, error in enumerate(errors)]


def outliers(made: Comparison) -> list[str]:
    return [op.name for op, _ in made.outliers]


def test_an_outlier_is_above_the_median_of_its_kind_and_above_rounding() -> None:
    usual = layers(1e-2, 1e-2, 1e-2, 1e-2)
    assert outliers(comparison(usual)) == []
    assert outliers(comparison(layers(1e-2, 1e-2, 5e-2, 1e-2))) == ["blocks.2.mlp.down"]
    assert outliers(comparison(layers(1e-5, 1e-5, 5e-4, 1e-5))) == [], "rounding in bfloat16"
    assert outliers(comparison(layers(1e-5, 1e-5, 5e-4), dtype="float32")) == ["blocks.2.mlp.down"]
    ops = [*usual, *layers(1e-4, 2e-2, 1e-4, kind="attention.q")]
    assert outliers(comparison(ops)) == ["blocks.1.attention.q"]
    worse = [op("blocks.0.mlp.down", 1e-3), op("blocks.1.mlp.down", 1e-3, channel=0.5)]
    assert outliers(comparison(worse)) == ["blocks.1.mlp.down"]


def test_with_equal_kernels_every_difference_of_a_few_ops_is_an_outlier() -> None:
    ops = layers(0.0, 0.0, 1e-9)
    assert outliers(comparison(ops)) == []
    found = comparison(ops, same_kernels=True)
    assert outliers(found) == ["blocks.2.mlp.down"]
    assert found.first_difference == ops[2]
    quantized = comparison(layers(1e-3, 1e-3, 1.1e-3), same_kernels=True)
    assert outliers(quantized) == []
    single = comparison([op("embedding", 0.0), op("norm", 1e-6)], same_kernels=True)
    assert outliers(single) == ["norm"]


def test_the_result_is_json() -> None:
    ops = [*layers(0.0, 0.1), op("norm", math.inf)]
    found = comparison(ops, same_kernels=True).as_dict()
    decoded = json.loads(json.dumps(found, allow_nan=False))
    assert decoded["first_difference"] == "blocks.1.mlp.down"
    assert {"name": "blocks.1.mlp.down", "ratio": None} in decoded["outliers"]
    assert decoded["ops"][-1]["isolated_error"] is None
    assert decoded["distribution"]["kl_mean"] == 0.0
