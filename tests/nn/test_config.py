from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ingot.core import config as configuration
from ingot.core.errors import ConfigError
from ingot.nn import PRESETS, DecoderConfig, MoEConfig, QkNorm, Rope, preset
from ingot.ops import LinearScaling, Llama3Scaling, YarnScaling

TINY = preset("tiny")


@pytest.mark.parametrize(
    "field",
    ["vocab_size", "dim", "layers", "heads", "kv_heads", "head_dim", "ffn_dim", "max_seq_len"],
)
@pytest.mark.parametrize("value", [0, -1, 2**40, 10**30, 1.5, True, "8", None])
def test_sizes_out_of_bounds_raise(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        replace(TINY, **{field: value})


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"heads": 6, "kv_heads": 4}, "multiple of kv_heads"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"sliding_window_layers": (0,)}, "without a sliding_window"),
        ({"sliding_window": 4, "sliding_window_layers": (1, 0)}, "sliding_window_layers"),
        ({"sliding_window": 4, "sliding_window_layers": (0, 2)}, "sliding_window_layers"),
        ({"sliding_window": 4, "sliding_window_layers": ()}, "sliding_window_layers"),
        ({"mlp_bias": True}, "SwiGLU"),
        ({"norm_eps": 0.0}, "norm_eps"),
        ({"norm_eps": float("nan")}, "norm_eps"),
        ({"tie_embeddings": 1}, "tie_embeddings"),
        ({"moe": MoEConfig(num_experts=4, top_k=1, ffn_dim=8, layers=(5,))}, r"moe\.layers"),
    ],
)
def test_inconsistent_fields_raise(change: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        replace(TINY, **change)


@pytest.mark.parametrize("theta", [0.0, -1.0, float("inf"), float("nan"), 1e16])
def test_theta_out_of_bounds_raises(theta: float) -> None:
    with pytest.raises(ConfigError, match="theta"):
        Rope(theta=theta)


@pytest.mark.parametrize(
    "scaling",
    [
        LinearScaling(factor=0.0),
        Llama3Scaling(
            factor=8.0,
            low_freq_factor=4.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
        YarnScaling(factor=4.0, original_max_position_embeddings=32, beta_fast=1.0, beta_slow=1.0),
    ],
)
def test_scaling_out_of_bounds_raises(scaling: Any) -> None:
    with pytest.raises(ConfigError):
        Rope(scaling=scaling)


def test_moe_out_of_bounds_raises() -> None:
    with pytest.raises(ConfigError, match="top_k"):
        MoEConfig(num_experts=2, top_k=3, ffn_dim=8)
    with pytest.raises(ConfigError, match="num_experts"):
        MoEConfig(num_experts=2**20, top_k=3, ffn_dim=8)


def test_window_and_moe_per_layer() -> None:
    config = replace(TINY, layers=3, sliding_window=7, sliding_window_layers=(1,))
    assert config.window_per_layer == (None, 7, None)
    assert replace(config, sliding_window_layers=None).window_per_layer == (7, 7, 7)
    moe = MoEConfig(num_experts=4, top_k=2, ffn_dim=8, layers=(0, 2))
    assert replace(config, moe=moe).is_moe_layer == (True, False, True)
    assert config.is_moe_layer == (False,) * 3


@pytest.mark.parametrize("name", PRESETS)
def test_presets_round_trip_through_toml(name: str, tmp_path: Any) -> None:
    config = replace(
        PRESETS[name], qk_norm=QkNorm.PER_HEAD, sliding_window=64, sliding_window_layers=(0,)
    )
    configuration.save(config, tmp_path / "model.toml")
    assert configuration.load(DecoderConfig, tmp_path / "model.toml") == config


@pytest.mark.parametrize(
    "scaling",
    [
        LinearScaling(factor=2.0),
        Llama3Scaling(
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
        YarnScaling(factor=4.0, original_max_position_embeddings=32),
    ],
)
def test_scalings_round_trip_through_toml(scaling: Any, tmp_path: Any) -> None:
    config = replace(TINY, rope=Rope(theta=500.0, scaling=scaling))
    configuration.save(config, tmp_path / "model.toml")
    assert configuration.load(DecoderConfig, tmp_path / "model.toml") == config
