"""Rounding to int8: unbiased, bounded, and by row; sums of messages. Bits on ranks: test_shard."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ingot.parallel import compression
from ingot.parallel.compression import Int8Messages, Int8Rounding, dequantize
from ingot.parallel.ranks import Ranks, tree_sum


def rounding(step: int = 0, shard: int = 0, seed: int = 0) -> Int8Rounding:
    found = Int8Rounding(seed)
    found.set_shard(step=step, shard=shard)
    return found


def gradient(*shape: int, seed: int = 0) -> torch.Tensor:
    """Rows of very different sizes."""
    random = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-12, 6, shape[0]).view(-1, *(1 for _ in shape[1:]))
    return torch.randn(*shape, generator=random) * sizes


def test_the_mean_of_many_roundings_is_the_gradient() -> None:
    exact, count = gradient(4, 33).double(), 2000
    total = sum(rounding(step=s).round("w", exact.float()).double() for s in range(count))
    scale = exact.abs().amax(1, keepdim=True) / 127
    error = (total / count - exact) / scale
    # A rounding has a standard deviation of at most half a unit.
    assert error.abs().max() < 5 * 0.5 / math.sqrt(count)
    assert error.mean().abs() < 3 * 0.5 / math.sqrt(count * exact.numel())


@given(st.integers(1, 9), st.integers(1, 70), st.integers(0, 1000))
def test_an_error_is_less_than_a_unit_of_the_row(rows: int, width: int, seed: int) -> None:
    exact = gradient(rows, width, seed=seed)
    error = (rounding(seed=seed).round("w", exact) - exact).abs()
    assert (error < exact.abs().amax(1, keepdim=True) / 127 * (1 + 1e-4)).all()


@given(st.integers(1, 40), st.integers(1, 70), st.data())
def test_a_row_does_not_depend_on_the_others(rows: int, width: int, data: st.DataObject) -> None:
    exact = gradient(rows, width)
    first = data.draw(st.integers(0, rows - 1))
    last = data.draw(st.integers(first + 1, rows))
    integers, scales = rounding().quantize("w", exact)
    part = rounding().quantize("w", exact[first:last], first)
    assert torch.equal(part[0], integers[first:last])
    assert torch.equal(part[1], scales[first:last])


def test_every_key_has_random_numbers_of_its_own() -> None:
    exact = gradient(8, 64)
    one = rounding().round("w", exact)
    assert torch.equal(one, rounding().round("w", exact))
    others = [rounding(step=1), rounding(shard=1), rounding(seed=1)]
    found = [other.round("w", exact) for other in others] + [rounding().round("v", exact)]
    assert not any(torch.equal(one, other) for other in found)


def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = gradient(50, 20)
    whole = rounding().round("w", exact)
    monkeypatch.setattr(compression, "_CHUNK", 64)
    assert torch.equal(rounding().round("w", exact), whole)


def test_extreme_rows() -> None:
    tiny, huge = torch.finfo(torch.float32).tiny, 0.99 * torch.finfo(torch.float32).max
    exact = torch.tensor([[0.0, 0.0], [huge, -huge], [1.0, math.inf], [math.nan, 1.0], [tiny, 0]])
    zero, large, infinite, nan, small = rounding().round("w", exact)
    assert zero.tolist() == [0, 0]
    assert torch.allclose(large / huge, torch.tensor([1.0, -1.0]))
    # The spike guard finds gradients that are not finite.
    assert not infinite.isfinite().any()
    assert not nan.isfinite().any()
    assert small.abs().max() <= 2 * tiny


def test_vectors_are_not_rounded_and_experts_have_scales_for_each_row() -> None:
    vector = gradient(7)
    assert rounding().round("w", vector) is vector
    experts = gradient(3, 5, 16)
    assert torch.equal(
        rounding().round("w", experts).flatten(0, 1), rounding().round("w", experts.flatten(0, 1))
    )


SHAPES = {"a": (4, 6), "norm": (3,), "experts": (2, 3, 8), "conv": (2, 3, 2, 2), "one": (5, 1)}


def test_a_sum_of_messages_is_that_of_rounded_gradients() -> None:
    """Two messages with half of the rows each, from four ranks."""
    shapes = {name: torch.Size(shape) for name, shape in SHAPES.items()}
    halves: list[list[torch.Tensor]] = [[], []]
    wanted: dict[str, list[torch.Tensor]] = {}
    for shard in range(4):
        own = rounding(shard=shard)
        grads = {n: gradient(2 * s[0], *s[1:], seed=shard) for n, s in shapes.items()}
        for name, grad in grads.items():
            wanted.setdefault(name, []).append(own.round(name, grad))
        flat = [torch.cat([g.chunk(2)[i].flatten() for g in grads.values()]) for i in (0, 1)]
        sent = Int8Messages(shapes, own).encode(torch.stack(flat))
        for half, message in zip(halves, sent, strict=True):
            half.append(message)
    messages = Int8Messages(shapes, rounding())
    for index, half in enumerate(halves):
        found = messages.all_reduce(torch.stack(half), Ranks())
        parts = [tree_sum(sums).chunk(2)[index].flatten() for sums in wanted.values()]
        assert torch.equal(found, torch.cat(parts))


def test_the_bytes_of_a_message() -> None:
    messages = Int8Messages({n: torch.Size(s) for n, s in SHAPES.items()}, rounding())
    elements = sum(math.prod(s) for s in SHAPES.values())
    scales, integers = 4 + 6 + 2 + 5, elements - 3
    size = 4 * (scales + 3) + -(-integers // 4) * 4
    assert messages.encode(torch.zeros(1, elements)).shape == (1, size)


def test_a_receiver_computes_what_the_sender_rounds_to() -> None:
    exact = gradient(6, 40)
    assert torch.equal(dequantize(*rounding().quantize("w", exact)), rounding().round("w", exact))
