"""The tables of the families against transformers' own configuration classes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import transformers

from ingot.core.errors import ConfigError
from ingot.interop import hf
from ingot.interop.hf_families import ENCODERS, FAMILIES
from ingot.nn import NormPosition, QkNorm, preset

from .hf_models import MODELS


@pytest.mark.parametrize("model_type", [*FAMILIES, *ENCODERS])
def test_defaults_match_transformers(model_type: str) -> None:
    """What transformers takes for a key that config.json leaves out."""
    config = transformers.AutoConfig.for_model(model_type)
    family = (FAMILIES | ENCODERS)[model_type]
    for key, value in family.defaults.items():
        if key == "rope_theta":
            assert config.rope_parameters["rope_theta"] == value
        elif key == "sliding_window" and "use_sliding_window" in family.defaults:
            windowed = transformers.AutoConfig.for_model(model_type, use_sliding_window=True)
            assert windowed.sliding_window == value
        elif key == "layer_types":
            assert set(config.layer_types) == {"full_attention"}
        else:
            assert getattr(config, key) == value or (value is None and not getattr(config, key))
    for key, values in family.supported_values.items():
        assert getattr(config, key, None) in values


def test_config_of_no_family_raises() -> None:
    config = replace(preset("tiny"), qk_norm=QkNorm.PER_HEAD, norm_position=NormPosition.POST)
    with pytest.raises(ConfigError, match="cannot be expressed"):
        hf.write_config(config, None, torch.float32)


@pytest.mark.parametrize("name", ["gpt2-124m", "smollm2-135m", "llama-100m", "tiny-moe"])
def test_presets_belong_to_a_family(name: str) -> None:
    raw = hf.write_config(preset(name), None, torch.bfloat16)
    assert hf.read_config(raw) == preset(name)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "qwen3-moe"])
@pytest.mark.parametrize("used", [False, True])
def test_sliding_window_of_transformers_4_counts_if_enabled(name: str, used: bool) -> None:
    """Files of Qwen2.5 give a window and say that it is not used."""
    right = json.loads(MODELS[name]().to_json_string(use_diff=False))
    raw = {k: v for k, v in right.items() if k != "layer_types"}
    raw |= {"use_sliding_window": used, "sliding_window": 32, "max_window_layers": 2}
    config = transformers.AutoConfig.for_model(**raw)
    kinds = getattr(config, "layer_types", ["sliding_attention"] * 3)
    windows = [config.sliding_window if "sliding" in kind else None for kind in kinds]
    assert list(hf.read_config(raw).window_per_layer) == windows
    assert any(windows) == used
