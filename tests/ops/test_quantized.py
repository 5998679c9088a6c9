from __future__ import annotations

from typing import Any

import pytest
import torch

from ingot import ops
from ingot.core.errors import OpError
from ingot.ops.codec import decode_int4, pack_int4, to_panels

INT8 = torch.tensor([[1, -128, 127], [0, 5, -7]], dtype=torch.int8)


def test_zero_rows_stay_zero_and_non_finite_rows_non_finite() -> None:
    x = torch.tensor([[0.0, 0.0, 0.0], [1.0, torch.inf, 2.0], [1.0, torch.nan, 2.0]])
    y = ops.linear_int8_dynamic(x, INT8, torch.ones(2))
    assert y[0].tolist() == [0.0, 0.0]
    assert not y[1:].isfinite().any()


def test_integers_in_x_are_multiplied_without_error() -> None:
    x = torch.tensor([[127.0, 3.0, -100.0]])
    y = ops.linear_int8_dynamic(x, INT8, torch.ones(2))
    assert torch.equal(y, x @ INT8.float().T)


def test_linear_uses_the_dequantized_weight() -> None:
    random = torch.Generator().manual_seed(0)
    x, scale = torch.randn(4, 64, generator=random), torch.tensor([0.5, 0.25])
    weight = torch.randint(-128, 128, (2, 64), generator=random, dtype=torch.int8)
    wide = weight.float() * scale[:, None]
    torch.testing.assert_close(ops.linear_int8(x, weight, scale), x @ wide.T)
    values = torch.randint(0, 16, (2, 64), generator=random)
    scales, zeros = torch.rand(2, 2, generator=random), torch.tensor([[3.0, 8.0], [0.5, 15.0]])
    by_group = scales.repeat_interleave(32, 1), zeros.repeat_interleave(32, 1)
    wide = (values - by_group[1]) * by_group[0]
    y = ops.linear_int4(x, pack_int4(values), scales, zeros)
    torch.testing.assert_close(y, x @ wide.T)


def test_default_zero_point_is_8() -> None:
    x, weight = torch.randn(2, 32), torch.randint(0, 256, (4, 16), dtype=torch.uint8)
    scale = torch.rand(4, 1)
    middle = ops.linear_int4(x, weight, scale, torch.full((4, 1), 8.0))
    assert torch.equal(ops.linear_int4(x, weight, scale), middle)


def test_x_and_scales_have_gradients() -> None:
    x = torch.randn(4, 3, requires_grad=True)
    scale = torch.rand(2, requires_grad=True)
    ops.linear_int8(x, INT8, scale).sum().backward()
    torch.testing.assert_close(x.grad, (INT8 * scale.detach()[:, None]).sum(0).expand(4, 3))
    assert scale.grad is not None


@pytest.mark.parametrize("gated", [False, True])
def test_gradient_is_that_of_the_layer_whose_inputs_are_not_rounded(gated: bool) -> None:
    """For x that is a multiple of its scale, so that both compute the same activations."""
    random = torch.Generator().manual_seed(0)
    x = torch.randint(-127, 128, (5, 64), generator=random).double()
    x[:, ::32] = 127.0
    packed = to_panels(torch.randint(0, 256, (32, 32), generator=random, dtype=torch.uint8))
    scale = (torch.rand(32, 2, generator=random).double() + 0.5) / 500
    h = torch.randn(5, 4 * (1 + gated), generator=random).double()
    b = torch.randn(1, 4, 32, generator=random).double()
    leaves = [tensor.clone().requires_grad_() for tensor in (x, scale, h, b)]
    again = [tensor.clone().requires_grad_() for tensor in (x, scale, h, b)]
    y = ops.linear_int4_dynamic(
        *(leaves[0], packed, leaves[1], None, None, None, 3, None, gated, leaves[2], leaves[3])
    )
    plain = again[0] @ decode_int4(packed, again[1], None, None, torch.float64).T
    parts = 2 if gated else 1
    chunks = (tensor.chunk(parts, -1) for tensor in (plain, *again[2:]))
    outs = [part + h @ b[0] for part, h, b in zip(*chunks, strict=True)]
    silu = torch.nn.functional.silu(outs[0])
    expected = silu * outs[1] if gated else silu
    torch.testing.assert_close(y, expected)
    y.square().sum().backward()
    expected.square().sum().backward()
    for ours, theirs in zip(leaves, again, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 33])
@pytest.mark.parametrize("gated", [False, True])
def test_panels_do_not_change_bits(rows: int, gated: bool) -> None:
    random = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 96, generator=random).bfloat16()
    scale = torch.rand(3, 64, generator=random).T
    packed = torch.randint(0, 256, (64, 48), generator=random, dtype=torch.uint8)
    weight = torch.randint(-128, 128, (64, 96), generator=random, dtype=torch.int8)

    def int4(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return ops.linear_int4_dynamic(x, weight, scale, None, scale, None, 3, None, gated)

    def int8(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return ops.linear_int8_dynamic(x, weight, scale, None, 3, None, 0, gated)

    for function, rows_of_weight in ((int4, packed), (int8, weight)):
        expected = function(rows_of_weight, scale)
        assert torch.equal(function(to_panels(rows_of_weight), scale), expected)
        assert torch.equal(function(to_panels(rows_of_weight), to_panels(scale)), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("offset", [None, "zero_point", "minimum"])
def test_one_row_has_the_bits_of_a_batch(dtype: torch.dtype, offset: str | None) -> None:
    """One row has its own kernels for scales of 16 bits, but not for the last 8 of 40 columns."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(5, 160, generator=random)
    scale, other = (torch.rand(5, 40, generator=random).to(dtype).T for _ in range(2))
    packed = torch.randint(0, 256, (40, 80), generator=random, dtype=torch.uint8)
    weight = torch.randint(-128, 128, (40, 160), generator=random, dtype=torch.int8)
    offsets: Any = {offset: other} if offset else {}
    batch = ops.linear_int4_dynamic(x, packed, scale, **offsets)
    int8_batch = ops.linear_int8_dynamic(x, weight, scale)
    for row in range(len(x)):
        one = x[row : row + 1]
        assert torch.equal(ops.linear_int4_dynamic(one, packed, scale, **offsets)[0], batch[row])
        assert torch.equal(ops.linear_int8_dynamic(one, weight, scale)[0], int8_batch[row])


X, SCALE = torch.ones(2, 64), torch.ones(3)
WEIGHT, PACKED = torch.ones(3, 64, dtype=torch.int8), torch.ones(3, 32, dtype=torch.uint8)
PANELS = to_panels(torch.ones(16, 64, dtype=torch.int8))


@pytest.mark.parametrize(
    ("op", "args", "message"),
    [
        ("linear_int8", (X, WEIGHT[:, :63], SCALE), "x has 64 channels"),
        ("linear_int8", (X, WEIGHT.int(), SCALE), "torch.int32"),
        ("linear_int8", (X, WEIGHT, SCALE[:2]), "scale torch.float32 (2,)"),
        ("linear_int8", (X, WEIGHT, SCALE.long()), "scale torch.int64"),
        ("linear_int8", (X, WEIGHT, SCALE, SCALE[:2]), "bias must be (3,), got (2,)"),
        ("linear_int8", (X, WEIGHT, SCALE, SCALE.double()), "bias is torch.float64"),
        ("linear_int8_dynamic", (X[:, :0], WEIGHT[:, :0], SCALE), "x has 0 channels"),
        ("linear_int8", (X, PANELS, torch.ones(16)), "(1, 16, 16, 4)"),
        ("linear_int8_dynamic", (X, PANELS[:, :15], torch.ones(16)), "x has 64 channels"),
        ("linear_int8_dynamic", (X, PANELS[..., :2], torch.ones(16)), "x has 64 channels"),
        ("linear_int8_dynamic", (X, PANELS, SCALE), "scale torch.float32 (3,)"),
        ("linear_int8_dynamic", (X, PANELS, torch.ones(1, 3, 16)), "scale is (1, 3, 16)"),
        ("linear_int8_dynamic", (X, PANELS, torch.ones(1, 2, 8)), "scale is (1, 2, 8)"),
        ("linear_int8_dynamic", (X, WEIGHT, torch.ones(1, 2, 16)), "scale is (1, 2, 16)"),
        ("linear_int4", (X, PACKED[:, :31], torch.ones(3, 1)), "x has 64 channels"),
        ("linear_int4", (X, PACKED.char(), torch.ones(3, 1)), "torch.int8"),
        ("linear_int4", (X, PACKED, torch.ones(3, 4)), "scale is (3, 4)"),
        ("linear_int4", (X, PACKED, torch.ones(3, 0)), "scale is (3, 0)"),
        ("linear_int4", (X, PACKED, SCALE), "scale is (3,)"),
        ("linear_int4_dynamic", (X, PACKED, SCALE), "scale is (3,)"),
        ("linear_int4", (X, PACKED, torch.ones(3, 1), torch.ones(3, 2)), "zero_point (3, 2)"),
    ],
)
def test_invalid_arguments_raise(op: str, args: tuple[Any, ...], message: str) -> None:
    with pytest.raises(OpError) as caught:
        ops.registry()[op](*args)
    assert message in str(caught.value)
