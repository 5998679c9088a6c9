from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ingot.core.errors import ConfigError
from ingot.nn.formats import Int4, LinearEpilogue

formats = st.builds(
    lambda group, offset, dtype: Int4(
        group=group, zero_point=offset == 1, minimum=offset == 2, scale_dtype=dtype
    ),
    st.sampled_from([32, 64, 128]),
    st.integers(0, 2),
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
)
seeds = st.integers(0, 2**32 - 1)


def weight(seed: int, rows: int = 5, channels: int = 256) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    scale = torch.rand(rows, 1, generator=random) + 0.1
    return torch.randn(rows, channels, generator=random) * scale


@given(formats, seeds)
def test_rounding_is_within_one_step(format: Int4, seed: int) -> None:
    """Half a step for values between the ends of the grid; more where they are clamped.

    That is a step, and the error of 8 scales in bfloat16, each at most 2**-8 of the scale.
    """
    original = weight(seed)
    tensors = format.encode(original)
    error = (format.decode(tensors) - original).abs().unflatten(1, (-1, format.group)).amax(-1)
    assert bool((error <= (1 + 2**-5) * 1.001 * tensors.scale.float().abs()).all())


@given(formats, seeds)
def test_a_decoded_weight_is_encoded_with_no_more_error(format: Int4, seed: int) -> None:
    once = format.decode(format.encode(weight(seed)))
    twice = format.decode(format.encode(once))
    step = format.encode(once).scale.float().abs().amax()
    assert float((twice - once).abs().amax()) <= 0.51 * float(step)


@given(formats, seeds)
def test_linear_multiplies_by_the_decoded_weight(format: Int4, seed: int) -> None:
    tensors = format.encode(weight(seed))
    x = weight(seed + 1, rows=3)
    y = format.linear(x, tensors, LinearEpilogue())
    expected = x @ format.decode(tensors).T
    # Rounding x to 8 bits in groups: each value by at most 1/254 of the largest of its group.
    bound = (x.abs().amax() / 254) * format.decode(tensors).abs().sum(1)
    assert bool(((y - expected).abs() <= bound + 1e-5).all())


@given(formats, seeds)
def test_embedding_returns_the_decoded_rows(format: Int4, seed: int) -> None:
    tensors = format.encode(weight(seed))
    rows = format.embedding(torch.tensor([3, 0, 3]), tensors, False)
    torch.testing.assert_close(rows, format.decode(tensors)[[3, 0, 3]], rtol=1e-6, atol=1e-6)
    assert format.embedding(torch.tensor([1]), tensors, True).dtype == torch.bfloat16


def test_a_channel_of_large_magnitude_costs_precision_in_its_group_only() -> None:
    format = Int4(group=32)
    tensors = format.encode(weight(0))
    decoded, x = format.decode(tensors), weight(1, rows=1)
    x[0, 7] = 1000.0
    error = format.linear(x, tensors, LinearEpilogue()) - x @ decoded.T
    one_scale = (x / 1000 * 127).round() * 1000 / 127  # for the row: multiples of 8
    assert float(error.norm()) < 0.6 * float(((one_scale - x) @ decoded.T).norm())
    x[0, :32] = 0  # without its group, nothing is lost
    error = format.linear(x, tensors, LinearEpilogue()) - x @ decoded.T
    assert float(error.abs().max()) < 0.5


def test_rows_of_zeros_stay_zero() -> None:
    for format in (Int4(), Int4(zero_point=True), Int4(minimum=True)):
        assert not format.decode(format.encode(torch.zeros(2, 64))).any()


@pytest.mark.parametrize("options", [{"group": 48}, {"zero_point": True, "minimum": True}])
def test_invalid_options_raise(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        Int4(**options)  # pyright: ignore[reportArgumentType]


def test_channels_that_are_not_a_multiple_of_the_group_raise() -> None:
    with pytest.raises(ConfigError, match="not a multiple"):
        Int4(group=128).encode(torch.zeros(2, 576))
