from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ingot.core import config as configuration
from ingot.core.errors import ConfigError
from ingot.nn import PRESETS, DecoderConfig, Experts, QkNorm, Rope, preset
from ingot.ops import LinearScaling, Llama3Scaling, YarnScaling

TINY = preset("tiny")


@pytest.mark.parametrize(
    "field", ["vocab_size", "dim", "layers", "heads", "kv_heads", "head_dim", "ffn", "context"]
)
@pytest.mark.parametrize("value", [0, -1, 2**40, 10**30, 1.5, True, "8", None])
def test_sizes_have_bounds(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        replace(TINY, **{field: value})


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"heads": 6, "kv_heads": 4}, "evenly"),
        ({"head_dim": 15}, "pair"),
        ({"window": 0}, "window"),
        ({"window_layers": (0,)}, "without a window"),
        ({"window": 4, "window_layers": (1, 0)}, "window_layers"),
        ({"window": 4, "window_layers": (0, 2)}, "window_layers"),
        ({"window": 4, "window_layers": ()}, "window_layers"),
        ({"mlp_bias": True}, "SwiGLU"),
        ({"norm_eps": 0.0}, "norm_eps"),
        ({"norm_eps": float("nan")}, "norm_eps"),
        ({"tied": 1}, "tied"),
        ({"experts": Experts(count=4, top_k=1, ffn=8, layers=(5,))}, r"experts\.layers"),
    ],
)
def test_what_does_not_fit_together_is_refused(change: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        replace(TINY, **change)


@pytest.mark.parametrize("theta", [0.0, -1.0, float("inf"), float("nan"), 1e16])
def test_rope_has_bounds(theta: float) -> None:
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
def test_scalings_have_bounds(scaling: Any) -> None:
    with pytest.raises(ConfigError):
        Rope(scaling=scaling)


def test_experts_have_bounds() -> None:
    with pytest.raises(ConfigError, match="top_k"):
        Experts(count=2, top_k=3, ffn=8)
    with pytest.raises(ConfigError, match="count"):
        Experts(count=2**20, top_k=3, ffn=8)


def test_windows_and_experts_of_each_layer() -> None:
    config = replace(TINY, layers=3, window=7, window_layers=(1,))
    assert config.windows == (None, 7, None)
    assert replace(config, window_layers=None).windows == (7, 7, 7)
    experts = Experts(count=4, top_k=2, ffn=8, layers=(0, 2))
    assert replace(config, experts=experts).sparse == (True, False, True)
    assert config.sparse == (False,) * 3


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_survives_toml(name: str, tmp_path: Any) -> None:
    config = replace(PRESETS[name], qk_norm=QkNorm.HEAD, window=64, window_layers=(0,))
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
def test_a_scaling_survives_toml(scaling: Any, tmp_path: Any) -> None:
    config = replace(TINY, rope=Rope(theta=500.0, scaling=scaling))
    configuration.save(config, tmp_path / "model.toml")
    assert configuration.load(DecoderConfig, tmp_path / "model.toml") == config
