from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ingot.core.errors import ConfigError
from ingot.nn.formats import Int8, LinearEpilogue

formats = st.builds(
    lambda group, dtype: Int8(group=group, scale_dtype=dtype),
    st.sampled_from([None, 32, 64, 128]),
    st.sampled_from([torch.bfloat16, torch.float32]),
)
seeds = st.integers(0, 2**32 - 1)


def weight(seed: int, rows: int = 5, channels: int = 256) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(rows, channels, generator=random)


@given(formats, seeds)
def test_rounding_is_within_half_a_step(format: Int8, seed: int) -> None:
    """With scales in bfloat16, a clamped value may be off by half a percent more."""
    original = weight(seed)
    tensors = format.encode(original)
    step = tensors.scale.float().view(5, -1).amax(1, keepdim=True)
    error = (format.decode(tensors) - original).abs()
    assert bool((error <= 0.5 * step + 0.005 * original.abs()).all())


@given(formats, seeds)
def test_linear_multiplies_by_the_decoded_weight(format: Int8, seed: int) -> None:
    tensors = format.encode(weight(seed))
    x = weight(seed + 1, rows=3)
    y = format.linear(x, tensors, LinearEpilogue())
    bound = (x.abs().amax() / 254) * format.decode(tensors).abs().sum(1)
    assert bool(((y - x @ format.decode(tensors).T).abs() <= bound + 1e-5).all())


@given(formats, seeds)
def test_embedding_returns_the_decoded_rows(format: Int8, seed: int) -> None:
    tensors = format.encode(weight(seed))
    rows = format.embedding(torch.tensor([3, 0, 3]), tensors, False)
    torch.testing.assert_close(rows, format.decode(tensors)[[3, 0, 3]], rtol=1e-6, atol=1e-6)


def test_an_invalid_group_raises() -> None:
    with pytest.raises(ConfigError, match="must be one of"):
        Int8(group=8)
