"""AdamW in C++: the bits of an element do not depend on the other elements."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor

from ingot import ops
from ingot.core.device import detect
from ingot.ops.adamw import join, split
from ingot.ops.arguments import map_tensors
from ingot.ops.dispatch import prefer

pytestmark = pytest.mark.skipif(detect().compiler is None, reason="no C++ compiler")

# Several chunks of 65536, some tensors in one chunk, and remainders of many sizes.
SIZES = (200_004, 1, 7, 0, 65_536, 15, 16, 17, 131_073, 40_000, 40_000)
FORMS = {
    "fp32": (torch.float32, torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16, torch.float32),
    "bf16 of fp32": (torch.bfloat16, torch.float32, torch.float32),
    "short": (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    "fp32 short": (torch.float32, torch.float32, torch.bfloat16),
}
SPLIT = [form for form, (param, *_) in FORMS.items() if param == torch.bfloat16]
CASES = [*((form, False) for form in FORMS), *((form, True) for form in SPLIT)]
each_case = pytest.mark.parametrize(("form", "parts"), CASES)

State = list[list[Tensor]]


def made(form: str, parts: bool) -> State:
    """Parameters, gradients, moments and lower halves."""
    random = torch.Generator().manual_seed(0)
    param, grad, moment = FORMS[form]
    masters = [torch.randn(size, generator=random) for size in SIZES]
    grads, first = ([torch.randn(size, generator=random) for size in SIZES] for _ in range(2))
    second = [torch.rand(size, generator=random) for size in SIZES]
    low = [split(master)[1] for master in masters] if parts else []
    params = [split(master)[0] for master in masters] if parts else [m.to(param) for m in masters]
    return [
        params,
        [g.to(grad) for g in grads],
        *([m.to(moment) for m in some] for some in (first, second)),
        low,
    ]


def run(state: State, threads: int = 2) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        args: Any = (*state, 7, 1e-2, 0.9, 0.95, 1e-8, 0.1, 0.5)
        assert ops.adamw.select(*args).name == "cpu"
        ops.adamw(*args)
    finally:
        torch.set_num_threads(before)


def assert_bits(one: State, other: State) -> None:
    kinds = {2: torch.int16, 4: torch.int32}
    for a, b in zip(one, other, strict=True):
        for x, y in zip(a, b, strict=True):
            kind = kinds[x.element_size()]
            assert torch.equal(x.contiguous().view(kind), y.contiguous().view(kind))


def misaligned(x: Tensor) -> Tensor:
    """Return the same values, one element after an aligned address."""
    return torch.cat([x.flatten()[:1], x.flatten()])[-x.numel() :] if x.numel() else x


def strided(x: Tensor) -> Tensor:
    return torch.stack([x, x], -1)[..., 0]


@each_case
@pytest.mark.parametrize("change", [torch.clone, misaligned, strided], ids=lambda f: f.__name__)
def test_bits_depend_on_the_element_alone(
    form: str, parts: bool, change: Callable[[Tensor], Tensor]
) -> None:
    wanted = made(form, parts)
    run(wanted, threads=1)
    for threads in (1, 2, 3):
        again = [map_tensors(change, some) for some in made(form, parts)]
        run(again, threads)
        assert_bits(again, wanted)
    one_by_one = made(form, parts)
    for place in range(len(SIZES)):
        run([some[place : place + 1] for some in one_by_one])
    assert_bits(one_by_one, wanted)
    # Shifted by 5, an element is in another lane or chunk, or in the remainder.
    shifted = [[t[5:] for t in some] for some in made(form, parts)]
    run(shifted)
    assert_bits(shifted, [[t[5:] for t in some] for some in wanted])


@each_case
def test_row_statistics_change_no_bits_and_do_not_depend_on_threads(form: str, parts: bool) -> None:
    wanted = made(form, parts)
    run(wanted)
    found: list[Tensor] = []
    for threads in (1, 2, 3):
        state = made(form, parts)
        for some in state:
            some[8:9] = [t.view(3, -1) for t in some[8:9]]
        stats = torch.full((sum(SIZES) - SIZES[8] + 3, 7), torch.nan)
        torch.set_num_threads(threads)
        ops.adamw(*state, 7, 1e-2, 0.9, 0.95, 1e-8, 0.1, 0.5, stats)  # pyright: ignore
        assert_bits([[t.flatten() for t in some] for some in state], wanted)
        found.append(stats)
    assert found[0].isfinite().all()
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("form", SPLIT)
def test_a_split_parameter_has_the_bits_of_a_float32(form: str) -> None:
    ours = made(form, True)
    masters = [join(*both) for both in zip(ours[0], ours[4], strict=True)]
    theirs = [
        masters,
        [g.float() for g in ours[1]],
        *(map_tensors(torch.clone, m) for m in ours[2:4]),
        [],
    ]
    run(ours)
    run(theirs)
    joined = [join(*both) for both in zip(ours[0], ours[4], strict=True)]
    assert_bits([joined, *ours[2:4]], [theirs[0], *theirs[2:4]])


@each_case
def test_matches_the_reference(form: str, parts: bool) -> None:
    ours, theirs = made(form, parts), made(form, parts)
    run(ours)
    with prefer("reference"):
        ops.adamw(*theirs, 7, 1e-2, 0.9, 0.95, 1e-8, 0.1, 0.5)  # pyright: ignore
    for state in (ours, theirs):
        if parts:
            state[0] = [join(*both) for both in zip(state[0], state[4], strict=True)]
    pairs = (zip(ours[i], theirs[i], strict=True) for i in (0, 2, 3))
    for a, b in chain.from_iterable(pairs):
        half = a.dtype == torch.bfloat16
        torch.testing.assert_close(a, b, rtol=8e-3 if half else 2e-6, atol=1e-6)


def test_a_parameter_with_a_zero_update_keeps_its_bits() -> None:
    """Also where it is halfway between two of bfloat16."""
    upper = torch.arange(0x0080, 0x7F7F, dtype=torch.int32) * 65536
    masters = (upper[:, None] + torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])).flatten()
    masters = masters.int().view(torch.float32)
    masters = torch.cat([masters, -masters])
    high, low = split(masters)
    zeros = torch.zeros(len(masters))
    ops.adamw([high], [zeros], [zeros.clone()], [zeros.clone()], [low], 1, 0.0)
    assert_bits([[high], [low]], [[part] for part in split(masters)])


def test_moments_without_gradient_decay_to_zero() -> None:
    """Subnormal ones would stay, and each takes as long as ten others."""
    p, g, m, v = torch.ones(20), torch.zeros(20), torch.full((20,), 1e-39), torch.full((20,), 1e-40)
    p[:10] = 1e-39
    ops.adamw([p], [g], [m], [v], [], 1000, 1e-2, weight_decay=0.0)
    assert not m.any()
    assert not v.any()
    assert torch.equal(p[10:], torch.ones(10))
    assert (torch.full((20,), 1e-39) * 0.5).all()  # nothing is flushed outside


def test_nan_gradients_give_nan_parameters() -> None:
    for bad in (torch.nan, torch.inf):
        high, low = split(torch.ones(40))
        g, m, v = torch.zeros(40), torch.zeros(40), torch.zeros(40)
        g[17] = bad
        ops.adamw([high], [g], [m], [v], [low], 1, 1e-2)
        assert high.isnan().nonzero().flatten().tolist() == [17]
        assert join(high, low).isnan().nonzero().flatten().tolist() == [17]
