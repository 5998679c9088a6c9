from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ingot import ops
from ingot.core.errors import ConfigError
from ingot.nn import Attention, BatchLayout, QkNorm, Rope


def by_torch(layer: Attention, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Compute one sequence with `scaled_dot_product_attention`."""
    heads, kv_heads, width = layer.heads, layer.kv_heads, layer.head_dim
    rows = [heads * width, kv_heads * width, kv_heads * width]
    q, k, v = F.linear(x, layer.qkv.weight, layer.qkv.bias).split(rows, dim=-1)
    if layer.qk_norm is QkNorm.FULL:
        q, k = layer.q_norm(q), layer.k_norm(k)
    q, k, v = (t.view(len(x), -1, width) for t in (q, k, v))
    if layer.qk_norm is QkNorm.PER_HEAD:
        q, k = layer.q_norm(q), layer.k_norm(k)
    if layer.rotary is not None:
        q, k = (ops.rope.reference(t, positions, layer.rotary.freqs) for t in (q, k))
    q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    found = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return F.linear(found.transpose(0, 1).flatten(1), layer.out.weight, layer.out.bias)


@pytest.mark.parametrize("qk_norm", [None, *QkNorm])
@pytest.mark.parametrize("rope", [None, Rope(theta=100.0)])
@pytest.mark.parametrize("bias", [False, True])
def test_attention_matches_sdpa(qk_norm: QkNorm | None, rope: Rope | None, bias: bool) -> None:
    torch.manual_seed(0)
    options = {"qk_norm": qk_norm, "rope": rope, "qkv_bias": bias, "o_bias": bias}
    layer = Attention(24, heads=6, kv_heads=2, head_dim=10, **options)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x, layout = torch.randn(12, 24), BatchLayout.packed([7, 5])
    positions = layout.positions
    expected = torch.cat([by_torch(layer, x[a:b], positions[a:b]) for a, b in ((0, 7), (7, 12))])
    torch.testing.assert_close(layer(x, layout), expected, rtol=1e-4, atol=1e-4)
    added = layer(x, layout, residual=x)
    torch.testing.assert_close(added, expected + x, rtol=1e-4, atol=1e-4)


def test_sliding_window_masks_distant_tokens() -> None:
    layer = Attention(16, heads=2, sliding_window=3)
    x, layout = torch.randn(9, 16), BatchLayout.packed([9])
    near = BatchLayout.packed([3])
    whole = layer(x, layout)
    assert torch.equal(whole[8:], layer(x[6:], near)[2:])


def test_rope_frequencies_stay_in_float32_and_off_meta() -> None:
    with torch.device("meta"):
        layer = Attention(16, heads=2, rope=Rope())
    layer = layer.to(torch.bfloat16).to("meta").to_empty(device="cpu")
    assert layer.rotary is not None
    assert torch.equal(layer.rotary.freqs, ops.rope_frequencies(8)[0])
    assert layer.qkv.weight.dtype == torch.bfloat16


def test_indivisible_heads_raise() -> None:
    with pytest.raises(ConfigError, match="divide"):
        Attention(10, heads=4)
    with pytest.raises(ConfigError, match="multiple"):
        Attention(12, heads=4, kv_heads=3)
