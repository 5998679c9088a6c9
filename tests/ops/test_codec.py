from __future__ import annotations

import pytest
import torch

from ingot.ops.codec import (
    decode_int4,
    decode_int8,
    fits_panels,
    pack_int4,
    quantize_kv,
    quantize_rows,
    round_activations,
    round_kv,
    scale_shape,
    to_panels,
    to_rows,
    unpack_int4,
    weight_shape,
)
from ingot.ops.inputs import TensorMaker


def test_scales_in_panels_are_the_same_in_another_order() -> None:
    rows = torch.arange(96.0).view(32, 3)
    panels = to_panels(rows)
    assert scale_shape(panels) == scale_shape(rows) == (32, 3)
    assert panels[1, 2, 5] == rows[16 + 5, 2]
    assert torch.equal(to_rows(panels), rows)
    assert scale_shape(torch.empty(2, 3, 8)) == (0, 0)


def test_unpack_inverts_pack() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(4, 64)
    assert torch.equal(pack_int4(unpack_int4(every)), every)
    assert unpack_int4(every).unique().tolist() == list(range(16))


def test_rows_are_rounded_to_nearest_even() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -3.49, 0.0]])
    q, step = quantize_rows(x)
    assert q.tolist() == [[127, 0, 2, 2, 0, -3, 0]]
    assert step.tolist() == [1.0]
    x = torch.randn(50, 300, generator=torch.Generator().manual_seed(0))
    q, step = quantize_rows(x)
    assert q.abs().amax(-1).tolist() == [127] * 50
    assert ((x - q * step[:, None]).abs() <= step[:, None] * 0.5001).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_rounding_is_the_same_in_every_dtype(dtype: torch.dtype) -> None:
    """Otherwise the error of a result could be that of a value rounded the other way."""
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    for one, other in zip(quantize_rows(x), quantize_rows(x.float()), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_values_are_decoded_by_the_scale_of_their_group(groups: int) -> None:
    random = torch.Generator().manual_seed(0)
    q = torch.randint(0, 16, (3, 64), generator=random)
    scale = torch.rand(3, groups, generator=random)
    offset = torch.randn(3, groups, generator=random)
    wide, wide_offset = (t.repeat_interleave(64 // groups, 1) for t in (scale, offset))
    packed, f32 = pack_int4(q), torch.float32
    assert torch.equal(decode_int4(packed, scale, None, None, f32), (q - 8) * wide)
    assert torch.equal(decode_int4(packed, scale, offset, None, f32), (q - wide_offset) * wide)
    assert torch.equal(decode_int4(packed, scale, None, offset, f32), q * wide + wide_offset)
    assert torch.equal(decode_int8((q - 8).to(torch.int8), scale, f32), (q - 8) * wide)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_panels_are_the_same_weight_in_another_order(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 128, (48, 24), generator=random).to(dtype)
    panels = to_panels(rows)
    assert weight_shape(panels) == weight_shape(rows) == (48, 24)
    assert panels[1, 2, 3].tolist() == rows[16 + 3, 8:12].tolist()
    assert torch.equal(to_rows(panels), rows)
    assert to_rows(rows) is rows
    scale = torch.rand(48, 2, generator=random)
    if dtype == torch.int8:
        assert torch.equal(*(decode_int8(w, scale, torch.float32) for w in (rows, panels)))
    else:
        values = (decode_int4(w, scale, None, None, torch.float32) for w in (rows, panels))
        assert torch.equal(*values)


def test_only_multiples_of_a_panel_fit() -> None:
    assert fits_panels(32, 8)
    assert not fits_panels(33, 8)
    assert not fits_panels(32, 6)
    assert weight_shape(torch.empty(2, 3, 4)) == (0, 0)


def test_activations_are_rounded_in_groups() -> None:
    x = torch.tensor([[1.0, 0.3, 1000.0, 0.3, 0.1]])
    rounded = round_activations(x, 2)
    assert rounded.shape == x.shape
    assert rounded[0, 1] == pytest.approx(0.3, rel=0.01)
    assert rounded[0, 3] == 0  # next to a large value
    assert round_activations(x, 0)[0, 1] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keys_are_rounded_by_at_most_half_a_step_of_their_own_row(dtype: torch.dtype) -> None:
    x = TensorMaker(dtype).spread(50, 3, 21)
    rows = quantize_kv(x)
    assert (rows.shape, rows.dtype) == ((50, 3, 25), torch.int8)
    step = x.float().abs().amax(-1, keepdim=True) / 127
    ulp = x.abs() * torch.finfo(dtype).eps
    assert ((round_kv(x) - x).abs() <= 0.5001 * step + ulp).all()
    for t, g in ((0, 0), (7, 2)):
        assert torch.equal(round_kv(x)[t, g], round_kv(x[t, g].clone()))
    assert not round_kv(torch.zeros(2, 4)).any()


def test_rounding_keys_has_the_gradient_of_the_identity() -> None:
    x = torch.randn(3, 2, 8, requires_grad=True)
    weight = torch.randn(3, 2, 8)
    (round_kv(x) * weight).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, weight)
