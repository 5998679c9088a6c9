from __future__ import annotations

from ingot.nn import Decoder, preset
from ingot.training.flops import flops_per_token


def test_flops_are_six_for_each_weight_and_token() -> None:
    config = preset("llama-100m")
    weights = sum(p.numel() for p in Decoder.on_meta(config).parameters() if p.dim() == 2)
    attention = config.layers * config.heads * config.head_dim * 4096
    assert flops_per_token(config, 4096) == 6 * (weights + attention)
