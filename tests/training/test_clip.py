"""Clipping by a fixed norm and by running statistics, against the papers' equations."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ingot.core.errors import ConfigError
from ingot.training.clip import AdaGCConfig, ClipNormConfig, Clipper, ZClipConfig, grad_norms


def random_norms(steps: int, tensors: int = 3) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    found = [1 + 0.1 * torch.randn(tensors, generator=random) for _ in range(steps)]
    found[steps // 2] = torch.tensor([50.0, 1.0, 2.0])[:tensors]
    return found


def total(x: torch.Tensor) -> float:
    return math.sqrt(float(x.double().square().sum()))


def test_norms_of_half_precision_do_not_overflow() -> None:
    large = torch.full((2, 2), 6e4, dtype=torch.float16)
    assert grad_norms([large]).tolist() == pytest.approx([2 * 6e4], rel=1e-3)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.integers(0, 40),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_norms_do_not_depend_on_how_rows_are_divided(
    parts: list[int], channels: int, dtype: torch.dtype
) -> None:
    """Real ranks divide them in tests/parallel; here rows change their neighbours."""
    shape = (sum(parts), channels) if channels else (sum(parts),)
    whole = (torch.randn(shape, generator=torch.Generator().manual_seed(channels)) * 7).to(dtype)
    wanted = grad_norms([whole])
    assert wanted.item() == pytest.approx(total(whole), rel=1e-6)
    moved = torch.cat(whole.split(parts)[::-1])
    assert torch.equal(grad_norms([moved]), wanted)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("shape", [(3,), (3, 4)])
def test_a_norm_that_is_not_finite_is_infinite(value: float, shape: tuple[int, ...]) -> None:
    x = torch.ones(shape)
    x.view(-1)[1] = value
    assert grad_norms([x, torch.ones(4)]).tolist() == [math.inf, 2.0]


@pytest.mark.parametrize("scale", [1e-18, 1e-10, 1.0, 1e10, 1e18])
def test_norms_of_very_different_rows(scale: float) -> None:
    rows = torch.logspace(0, -12, 100)[:, None] * torch.ones(100, 33) * scale
    assert grad_norms([rows]).item() == pytest.approx(total(rows), rel=1e-6)


@pytest.mark.parametrize("shape", [(1, 100_003), (7, 50_001), (50_001, 7), (200_000,)])
def test_norms_do_not_depend_on_the_number_of_threads(shape: tuple[int, ...]) -> None:
    x, threads = torch.randn(shape, generator=torch.Generator().manual_seed(0)), []
    before = torch.get_num_threads()
    try:
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            threads.append(grad_norms([x]).item())
    finally:
        torch.set_num_threads(before)
    assert len(set(threads)) == 1


def test_kind_none_does_not_clip() -> None:
    assert Clipper(None, 2).factors(torch.tensor([1e9, 0.0])).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("size", [0.0, 1e-3, 0.5, 2.0, 1e6])
def test_by_norm(size: float) -> None:
    given = torch.tensor([0.6, 0.8]) * size
    clipped = given * Clipper(ClipNormConfig(max_norm=0.5), 2).factors(given)
    assert total(clipped) == pytest.approx(min(size, 0.5), rel=1e-5)


def test_zclip_is_the_papers() -> None:
    config = ZClipConfig(max_norm=5.0, warmup_steps=10)
    clipper = Clipper(config, 3)
    given = random_norms(60)
    first = [min(total(x), 5.0) for x in given[:10]]
    mean = sum(first) / 10
    variance = sum((x - mean) ** 2 for x in first) / 10
    for step, x in enumerate(given):
        found = clipper.factors(x)
        if step < 10:
            wanted = min(1.0, 5.0 / total(x))
        else:
            z = (total(x) - mean) / math.sqrt(variance)
            clipped = mean + 2.5**2 / z * math.sqrt(variance) if z > 2.5 else total(x)
            wanted = clipped / total(x)
            variance = 0.97 * variance + 0.03 * (clipped - mean) ** 2
            mean = 0.97 * mean + 0.03 * clipped
        assert found.tolist() == pytest.approx([wanted] * 3, rel=1e-5), step
        assert (wanted < 0.2) == (step == 30)


def test_zclip_of_norms_that_are_always_the_same() -> None:
    clipper = Clipper(ZClipConfig(warmup_steps=3), 1)
    for _ in range(10):
        assert clipper.factors(torch.tensor([0.5])).item() == 1.0
    assert 0 < clipper.factors(torch.tensor([5.0])).item() < 0.11
    assert Clipper(ZClipConfig(warmup_steps=2), 1).factors(torch.tensor([0.0])).item() == 1.0


def test_adagc_is_the_papers() -> None:
    config = AdaGCConfig(max_norm=2.0, warmup_steps=10, ratio=1.05, beta=0.9)
    clipper = Clipper(config, 3)
    usual = torch.full((3,), math.inf)
    for step, x in enumerate(random_norms(60)):
        found = clipper.factors(x)
        if step < 10:
            wanted = torch.full((3,), min(1.0, 2.0 / total(x)))
            usual = torch.minimum(usual, x * wanted)
        else:
            wanted = torch.minimum(torch.ones(3), 1.05 * usual / x)
            usual = 0.9 * usual + 0.1 * x * wanted
        torch.testing.assert_close(found, wanted)
        if step == 30:
            assert found[0] < 0.03 < 0.5 < found[1]  # the tensor that spiked, and no other


@pytest.mark.parametrize(
    "config", [ClipNormConfig(), ZClipConfig(warmup_steps=5), AdaGCConfig(warmup_steps=5)]
)
def test_a_saved_state_resumes_bitwise(config: Any) -> None:
    given = random_norms(30)
    whole = Clipper(config, 3)
    wanted = [whole.factors(x) for x in given]
    first, second = Clipper(config, 3), Clipper(config, 3)
    for x in given[:12]:
        first.factors(x)
    second.load_state_dict(first.state_dict())
    for x, factors in zip(given[12:], wanted[12:], strict=True):
        assert torch.equal(second.factors(x), factors)


def test_bounds() -> None:
    for most in (0.0, math.nan):
        with pytest.raises(ConfigError):
            ClipNormConfig(max_norm=most)
    with pytest.raises(ConfigError):
        ZClipConfig(beta=1.5)
    with pytest.raises(ConfigError):
        AdaGCConfig(warmup_steps=0)
