from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ingot import ops
from ingot.core.errors import OpError
from ingot.ops.adamw import ROW_STATS, join, num_rows, split
from ingot.ops.dispatch import prefer
from tests.training import papers


def tensors(*values: float) -> list[Tensor]:
    return [torch.full((3,), value) for value in values]


def test_update_equals_torch_adamw() -> None:
    random = torch.Generator().manual_seed(0)
    shapes = [(5, 7), (3,), (2, 3, 4)]
    theirs = [torch.nn.Parameter(torch.randn(shape, generator=random)) for shape in shapes]
    ours = [p.detach().clone() for p in theirs]
    first, second = ([torch.zeros(shape) for shape in shapes] for _ in range(2))
    options: dict[str, Any] = {"lr": 0.05, "eps": 1e-6}
    optimizer = torch.optim.AdamW(theirs, betas=(0.8, 0.95), weight_decay=0.1, **options)
    for step in range(1, 6):
        grads = [torch.randn(shape, generator=random) for shape in shapes]
        for p, grad in zip(theirs, grads, strict=True):
            p.grad = grad
        optimizer.step()
        with prefer("reference"):
            betas = {"beta1": 0.8, "beta2": 0.95}
            ops.adamw(ours, grads, first, second, [], step, weight_decay=0.1, **betas, **options)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=2e-6, atol=2e-6)


def test_weight_decay_is_decoupled() -> None:
    """Without gradients and moments, a parameter shrinks by lr * decay at every step."""
    (p,) = tensors(2.0)
    ops.adamw([p], tensors(0.0), tensors(0.0), tensors(0.0), [], 7, 0.1, weight_decay=0.5)
    torch.testing.assert_close(p, torch.full((3,), 2.0 * (1 - 0.05)))


def test_first_step_has_the_length_of_the_learning_rate() -> None:
    params = tensors(1.0, 1.0)
    state = tensors(0.0, 0.0), tensors(0.0, 0.0)
    ops.adamw(params, tensors(1e-3, -50.0), *state, [], 1, 0.1, weight_decay=0.0)
    torch.testing.assert_close(torch.stack(params)[:, 0], torch.tensor([0.9, 1.1]))


def test_row_statistics_are_the_sums_of_each_row() -> None:
    random = torch.Generator().manual_seed(0)
    shapes = [(4, 33), (5,), (), (2, 3, 4)]
    params, grads, first = ([torch.randn(s, generator=random) for s in shapes] for _ in range(3))
    second = [torch.rand(s, generator=random) for s in shapes]
    before, momentum = [p.clone() for p in params], [m.clone() for m in first]
    stats = torch.empty(4 + 5 + 1 + 2, len(ROW_STATS))
    ops.adamw(params, grads, first, second, [], 3, 0.1, grad_scale=0.5, row_stats=stats)
    start = 0
    for p, old, grad, m, v in zip(params, before, grads, momentum, second, strict=True):
        count = num_rows(p)
        g, u = 0.5 * grad, old - p
        terms = (g * g, g * m, m * m, u * u, old * old, g * u, v.sqrt())
        expected = torch.stack([term.reshape(count, -1).sum(1) for term in terms], 1)
        torch.testing.assert_close(stats[start : start + count], expected, rtol=1e-4, atol=1e-5)
        start += count


def test_row_statistics_of_another_shape_are_an_error() -> None:
    state: Any = [tensors(1.0) for _ in range(4)]
    with pytest.raises(OpError, match="row_stats"):
        ops.adamw(*state, master_lo=[], step=1, lr=0.1, row_stats=torch.zeros(2, 7))


def test_grad_scale_multiplies_the_gradients() -> None:
    one = [tensors(1.0), tensors(0.5), tensors(0.5)]
    other = [[t.clone() for t in some] for some in one]
    ops.adamw(one[0], tensors(2.0), one[1], one[2], [], 3, 0.1, grad_scale=0.25)
    ops.adamw(other[0], tensors(0.5), other[1], other[2], [], 3, 0.1)
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a[0], b[0])


# ---- split master weights


def patterns() -> Tensor:
    """Return float32 bit patterns of every exponent and sign, both roundings, and NaNs."""
    random = torch.Generator().manual_seed(0)
    random_bits = torch.randint(-(2**31), 2**31, (10**6,), generator=random, dtype=torch.int64)
    upper = torch.arange(-(2**15), 2**15).mul(2**16)[:, None]
    edges = upper + torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    return torch.cat([random_bits, edges.flatten()]).to(torch.int32).view(torch.float32)


def test_join_restores_a_split_float_bitwise() -> None:
    master_weights = patterns()
    high, low = split(master_weights)
    assert (high.dtype, low.dtype) == (torch.bfloat16, torch.int16)
    assert torch.equal(join(high, low).view(torch.int32), master_weights.view(torch.int32))


@given(st.integers(-(2**31), 2**31 - 1))
def test_join_restores_any_bit_pattern(bits: int) -> None:
    master = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    assert join(*split(master)).view(torch.int32).item() == bits


def test_upper_part_is_rounded_with_ties_away_from_zero() -> None:
    master_weights = patterns()
    master_weights = master_weights[master_weights.isfinite()]
    high, _ = split(master_weights)
    nearest, exact = master_weights.bfloat16().double(), master_weights.double()
    finite = nearest.isfinite() & high.isfinite()
    off = (high.double() - exact).abs()[finite]
    assert torch.equal(off, (nearest - exact).abs()[finite])
    ties = torch.tensor([1 + 2**-8, -1 - 2**-8, 1 + 3 * 2**-8], dtype=torch.float32)
    up = torch.tensor([1 + 2**-7, -1 - 2**-7, 1 + 2**-6], dtype=torch.bfloat16)
    assert torch.equal(split(ties)[0], up)


def moved(
    dtype: torch.dtype, moments: torch.dtype, grads: torch.dtype, steps: int, lr: float
) -> tuple[Tensor, Tensor]:
    """Return a weight before and after some steps; in bfloat16, it has `master_lo`."""
    random = torch.Generator().manual_seed(3)
    start = torch.randn(37, generator=random)
    weight, *low = (start.clone(),) if dtype == torch.float32 else split(start)
    first, second = (torch.zeros(37, dtype=moments) for _ in range(2))
    for step in range(1, steps + 1):
        g = torch.randn(37, generator=random).add(0.5).bfloat16().to(grads)
        state = [weight], [g], [first], [second], low
        ops.adamw(*state, step, lr, 0.9, 0.95, 1e-8, 0.1, 0.7)
    return start, join(weight, low[0]) if low else weight


PROVIDERS = ["reference", *(["cpu"] if "cpu" in ops.adamw.providers else [])]


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("grads", [torch.bfloat16, torch.float32], ids=str)
def test_split_parameter_is_bitwise_equal_to_float32(provider: str, grads: torch.dtype) -> None:
    with prefer(provider):
        _, ours = moved(torch.bfloat16, torch.float32, grads, 100, 1e-3)
        _, theirs = moved(torch.float32, torch.float32, torch.float32, 100, 1e-3)
    assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize(
    ("moments", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str
)
def test_100_steps_match_the_paper(provider: str, moments: torch.dtype, bound: float) -> None:
    with prefer(provider):
        start, ours = moved(torch.bfloat16, moments, torch.bfloat16, 100, 1e-3)
    random = torch.Generator().manual_seed(3)
    torch.randn(37, generator=random)
    grads = [torch.randn(37, generator=random).add(0.5).bfloat16().double() for _ in range(100)]
    wanted = papers.adamw(
        start.double().numpy(),
        [0.7 * g.numpy() for g in grads],
        **{"lr": 1e-3, "b1": 0.9, "b2": 0.95, "eps": 1e-8, "decay": 0.1},
    )
    way = float(abs(wanted - start.double().numpy()).max())
    off = float(abs(ours.double().numpy() - wanted).max())
    assert way > 0.05
    # A float32 weight is also rounded at every step, by half a unit in the last place.
    assert off < bound * way + 100 * 2**-24 * float(abs(wanted).max())


@pytest.mark.parametrize("provider", PROVIDERS)
def test_small_weight_decay_is_not_rounded_to_zero(provider: str) -> None:
    """The float32 next to 1 - 1e-6 is 1 - 1.013e-6; averaged over many weights, it is closer."""
    before = torch.rand(10**5, generator=torch.Generator().manual_seed(0)) + 0.5
    zeros, after = torch.zeros(10**5), before.clone()
    with prefer(provider):
        state = [after], [zeros], [zeros.clone()], [zeros.clone()], []
        ops.adamw(*state, 1, 1e-5, weight_decay=0.1)
    lost = (before.double() - after.double()).sum() / before.double().sum()
    assert lost.item() == pytest.approx(1e-6, rel=0.004)


def test_small_updates_are_lost_without_master_lo() -> None:
    weight, low = split(torch.ones(4))
    alone = weight.clone()
    for params, lower in (([alone], []), ([weight], [low])):
        m, v = torch.zeros(4), torch.zeros(4)
        for step in range(1, 101):
            ops.adamw(params, [torch.ones(4)], [m], [v], lower, step, 1e-4, weight_decay=0.0)
    assert torch.equal(alone, torch.ones(4).bfloat16())
    torch.testing.assert_close(join(weight, low), torch.full((4,), 0.99))


# ---- what is refused


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"params": []}, "[0, 1, 1, 1]"),
        ({"grads": [torch.ones(4)]}, "parameter 0 is (3,)"),
        ({"grads": [torch.ones(3).bfloat16()]}, "gradients are torch.bfloat16"),
        ({"params": [torch.ones(3).int()]}, "parameters are torch.int32"),
        ({"exp_avgs": [torch.ones(3).bfloat16()]}, "moments are torch.bfloat16, torch.float32"),
        ({"exp_avg_sqs": [torch.ones(3).double()]}, "moments are torch.float32, torch.float64"),
        (
            {"master_lo": [torch.ones(3).short()]},
            "`master_lo` is torch.int16, with parameters in torch.float32",
        ),
        (
            {"master_lo": [torch.ones(3)], "params": [torch.ones(3).bfloat16()]},
            "`master_lo` is torch.float32",
        ),
        (
            {"master_lo": [torch.ones(4).short()], "params": [torch.ones(3).bfloat16()]},
            "[(3,), (3,), (3",
        ),
        ({"master_lo": [torch.ones(3).short()] * 2}, "2 master_lo"),
        ({"exp_avg_sqs": [torch.ones(3, device="meta")]}, "meta"),
        ({"step": 0}, "step 0"),
        ({"beta2": 1.0}, "betas"),
    ],
)
def test_invalid_arguments_raise(changed: dict[str, Any], message: str) -> None:
    names = ("params", "grads", "exp_avgs", "exp_avg_sqs")
    args: dict[str, Any] = {name: tensors(1.0) for name in names}
    args |= {"master_lo": [], "step": 1, "lr": 0.1}
    with pytest.raises(OpError) as caught:
        ops.adamw(**(args | changed))
    assert message in str(caught.value)
