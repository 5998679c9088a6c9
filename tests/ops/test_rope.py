from __future__ import annotations

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ingot import ops
from ingot.core.device import detect
from ingot.core.errors import OpError
from ingot.ops import (
    LinearScaling,
    Llama3Scaling,
    NtkScaling,
    YarnScaling,
    rope_frequencies,
)
from ingot.ops.codec import KV_SCALE_BYTES, dequantize_kv, quantize_kv
from ingot.ops.inputs import TensorMaker

RANDOM = torch.Generator().manual_seed(0)
Q, K = (torch.randn(1, 2, 16, generator=RANDOM).double() for _ in range(2))


def turned(x: torch.Tensor, position: int, interleaved: bool = False) -> torch.Tensor:
    freqs = rope_frequencies(16)[0].double()
    return ops.rope(x, torch.tensor([position]), freqs, interleaved)


@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 5000), st.booleans())
def test_scores_depend_only_on_distance(q: int, k: int, shift: int, interleaved: bool) -> None:
    here = (turned(Q, q, interleaved) * turned(K, k, interleaved)).sum()
    there = (turned(Q, q + shift, interleaved) * turned(K, k + shift, interleaved)).sum()
    torch.testing.assert_close(here, there)


def test_rope_is_a_rotation_of_complex_numbers() -> None:
    angle = 7 * rope_frequencies(16)[0].double()
    pairs = torch.complex(Q[..., :8], Q[..., 8:]) * torch.polar(torch.ones_like(angle), angle)
    torch.testing.assert_close(turned(Q, 7), torch.cat((pairs.real, pairs.imag), -1))


def test_interleaved_is_a_permutation_of_the_pairs() -> None:
    order = torch.arange(16).view(2, 8).T.flatten()  # 0 8 1 9 ...
    torch.testing.assert_close(turned(Q[..., order], 5, True), turned(Q, 5)[..., order])


def test_channels_without_frequency_are_copied() -> None:
    freqs, _ = rope_frequencies(6)
    y = ops.rope(Q.float(), torch.tensor([9]), freqs)
    assert torch.equal(y[..., 6:], Q.float()[..., 6:])


def test_linear_scaling_divides_positions() -> None:
    slow, _ = rope_frequencies(16, scaling=LinearScaling(factor=4.0))
    x = Q.float()
    here = ops.rope(x, torch.tensor([8]), slow)
    torch.testing.assert_close(here, ops.rope(x, torch.tensor([2]), rope_frequencies(16)[0]))


def test_ntk_keeps_the_highest_frequency_and_divides_the_lowest() -> None:
    plain, (scaled, _) = (
        rope_frequencies(16)[0],
        rope_frequencies(16, scaling=NtkScaling(factor=4.0)),
    )
    torch.testing.assert_close(scaled[0], plain[0])
    torch.testing.assert_close(scaled[-1], plain[-1] / 4)


def test_llama3_scaling_equals_the_original_code() -> None:
    plain, _ = rope_frequencies(128, theta=500000.0)
    scaling = Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )
    scaled, _ = rope_frequencies(128, theta=500000.0, scaling=scaling)
    for before, after in zip(plain.tolist(), scaled.tolist(), strict=True):
        wavelength = 2 * math.pi / before
        if wavelength < 8192 / 4.0:
            expected = before
        elif wavelength > 8192 / 1.0:
            expected = before / 8.0
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            expected = (1 - smooth) * before / 8.0 + smooth * before
        assert after == pytest.approx(expected, rel=1e-5)


def test_yarn_keeps_high_divides_low_frequencies_and_scales_the_result() -> None:
    plain, _ = rope_frequencies(128)
    scaled, scale = rope_frequencies(
        128, scaling=YarnScaling(factor=4.0, original_max_position_embeddings=4096)
    )
    torch.testing.assert_close(scaled[:20], plain[:20])  # turn over 32 times in the context
    torch.testing.assert_close(scaled[-15:], plain[-15:] / 4)  # less than once
    assert scale == pytest.approx(0.1 * math.log(4) + 1)
    y = ops.rope(Q.float(), torch.tensor([0]), rope_frequencies(16)[0], False, scale)
    torch.testing.assert_close(y, Q.float() * scale)


def test_yarn_with_factor_one_does_not_scale() -> None:
    assert (
        rope_frequencies(
            16, scaling=YarnScaling(factor=0.5, original_max_position_embeddings=4096)
        )[1]
        == 1.0
    )


@pytest.mark.skipif(detect().compiler is None, reason="no C++ compiler")
@pytest.mark.parametrize(("position", "frequency"), [(2**40, 0.5), (-(2**63), 0.5), (2**20, 2e6)])
def test_angles_too_large_for_the_kernel_raise(position: int, frequency: float) -> None:
    with pytest.raises(OpError, match=re.escape("below 2**40")):
        ops.rope(torch.ones(1, 1, 4), torch.tensor([position]), torch.tensor([0.5, -frequency]))


@pytest.mark.skipif(detect().compiler is None, reason="no C++ compiler")
def test_large_angles_are_accurate() -> None:
    """Compare with the reference in float64; the kernel reduces the angle in double."""
    x, positions = torch.ones(2, 1, 2), torch.tensor([2**20 - 1, -(2**19)])
    freqs = torch.tensor([999999.0])
    expected = ops.rope.reference(x.double(), positions, freqs.double())
    with ops.prefer("cpu"):
        torch.testing.assert_close(
            ops.rope(x, positions, freqs).double(), expected, atol=1e-3, rtol=0
        )


@pytest.mark.parametrize("width", [0, 2, 7])
def test_invalid_width_raises(width: int) -> None:
    with pytest.raises(OpError, match="even number"):
        rope_frequencies(width)


@given(
    tokens=st.integers(1, 40),
    heads=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    width=st.integers(4, 70),
    block_size=st.integers(1, 9),
    interleaved=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_cached_keys_are_bitwise_equal_to_rope(
    tokens: int,
    heads: tuple[int, int],
    width: int,
    block_size: int,
    interleaved: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    (n, g), make = heads, TensorMaker(dtype, seed=seed)
    q, k, v = make(tokens, n + 2 * g, width).split([n, g, g], dim=1)
    turn = make.ints(5000, tokens), rope_frequencies(max(4, width // 4 * 2))[0]
    options = interleaved, 1.25
    num_blocks = tokens // block_size + 2
    k_cache, v_cache = (
        make(num_blocks, block_size, g, width),
        make(num_blocks, block_size, g, width),
    )
    random = torch.Generator().manual_seed(seed)
    slot_mapping = torch.randperm(num_blocks * block_size, generator=random)[:tokens]
    expected = [k_cache.clone(), v_cache.clone()]
    expected[0].flatten(0, 1)[slot_mapping] = ops.rope(k, *turn, *options)
    expected[1].flatten(0, 1)[slot_mapping] = v
    turned_q = ops.rope_and_cache(q, k, v, *turn, k_cache, v_cache, slot_mapping, *options)
    assert torch.equal(turned_q, ops.rope(q, *turn, *options))
    assert torch.equal(k_cache, expected[0])
    assert torch.equal(v_cache, expected[1])


@pytest.mark.parametrize("slot", [-1, 4])
@pytest.mark.parametrize("provider", ["cpu", "reference"])
def test_slot_outside_the_cache_raises(slot: int, provider: str) -> None:
    k = torch.ones(1, 1, 4)
    cache = torch.zeros(2, 2, 1, 4)
    freqs, slot_mapping = rope_frequencies(4)[0], torch.tensor([slot])
    with ops.prefer(provider), pytest.raises(OpError, match="slots of the cache: 0 to 3"):
        ops.rope_and_cache(k, k, k, torch.tensor([0]), freqs, cache, cache.clone(), slot_mapping)
    assert not cache.any()


@pytest.mark.parametrize("width", [4, 16, 37, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_int8_cache_has_the_bits_of_the_reference(dtype: torch.dtype, width: int) -> None:
    make = TensorMaker(dtype)
    q, k, v = make(9, 3, width), make.spread(9, 2, width, low=-12, high=12), make(9, 2, width)
    v[0], v[1, 0, -1] = 0, 1000.0  # a row of zeros, and an outlier
    v[2], v[3, 0, 0] = 1e-38, torch.nan
    turn, slots = (make.ints(5000, 9), rope_frequencies(4)[0]), torch.randperm(12)[:9]
    k_cache, v_cache = (
        torch.full((3, 4, 2, width + KV_SCALE_BYTES), 99, dtype=torch.int8) for _ in range(2)
    )
    expected = [k_cache.clone(), v_cache.clone()]
    expected[0].flatten(0, 1)[slots] = quantize_kv(ops.rope(k, *turn))
    expected[1].flatten(0, 1)[slots] = quantize_kv(v)
    turned_q = ops.rope_and_cache(q, k, v, *turn, k_cache, v_cache, slots)
    assert torch.equal(turned_q, ops.rope(q, *turn))
    assert torch.equal(k_cache, expected[0])
    nan = v_cache.flatten(0, 1)[slots[3], 0]
    assert dequantize_kv(nan, dtype).isnan().all()
    v_cache.flatten(0, 1)[slots[3], 0] = expected[1].flatten(0, 1)[slots[3], 0] = 0
    assert torch.equal(v_cache, expected[1])
