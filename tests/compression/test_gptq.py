from __future__ import annotations

import pytest
import torch

from ingot.compression import GPTQ, RoundToNearest
from ingot.core.errors import IngotError
from ingot.nn.formats import Int4, Int8, WeightFormat

FORMATS: list[WeightFormat] = [Int8(), Int4(), Int4(group=64, zero_point=True), Int4(minimum=True)]


def correlated(channels: int, tokens: int = 512, seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    mixed = torch.randn(tokens, channels // 4, generator=random)
    x = mixed @ torch.randn(channels // 4, channels, generator=random)
    return x + 0.1 * torch.randn(tokens, channels, generator=random)


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("channels", [128, 320])
def test_the_error_of_the_outputs_is_less_than_by_rounding(
    format: WeightFormat, channels: int
) -> None:
    weight = torch.randn(48, channels, generator=torch.Generator().manual_seed(1))
    x = correlated(channels)
    hessian = x.T @ x / len(x)

    def error(method: GPTQ | RoundToNearest) -> float:
        decoded = format.decode(method.encode(format, weight, hessian))
        return float((x @ (decoded - weight).T).square().mean())

    assert error(GPTQ()) < 0.5 * error(RoundToNearest())


def test_without_correlations_only_the_scales_are_better() -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    one = GPTQ().encode(Int4(), weight, torch.eye(64))
    other = RoundToNearest().encode(Int4(), weight, None)
    errors = [float((Int4().decode(t) - weight).square().sum()) for t in (one, other)]
    assert 0.9 < errors[0] / errors[1] <= 1
    torch.testing.assert_close(one.scale, other.scale, rtol=0.1, atol=0)


def test_channels_without_inputs_do_no_harm() -> None:
    x = correlated(64)
    x[:, 5:40] = 0
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    decoded = Int4().decode(GPTQ().encode(Int4(), weight, x.T @ x))
    assert (decoded - weight).abs().max() < 1
    zero = GPTQ().encode(Int4(), weight, torch.zeros(64, 64))
    assert (Int4().decode(zero) - weight).abs().max() < 1


def test_rows_are_quantized_independently() -> None:
    x = correlated(96)
    weight = torch.randn(8, 96, generator=torch.Generator().manual_seed(1))
    whole = GPTQ().encode(Int4(), weight, x.T @ x)
    part = GPTQ().encode(Int4(), weight[2:5], x.T @ x)
    assert torch.equal(part.weight, whole.weight[2:5])


def test_inputs_that_are_not_finite_are_an_error() -> None:
    with pytest.raises(IngotError, match="not finite"):
        GPTQ().encode(Int4(), torch.ones(4, 32), torch.full((32, 32), torch.nan))
