"""Reading malformed and adversarial config.json files."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ingot.core.errors import IngotError
from ingot.interop import hf
from ingot.interop.hf_config import SUPPORTED_VALUES
from ingot.nn import Decoder, MoEConfig

from .hf_models import MODELS

anything = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-2, 9),
        st.sampled_from([2**31, 2**63, 10**40, 1e308, -0.0, float("nan"), float("inf")]),
        st.sampled_from(["", "silu", "yarn", "llama3", "linear", "default", "sliding_attention"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["rope_type", "type", "rope_theta", "factor", "beta_fast", "x"]),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=6,
)


@pytest.mark.parametrize("examples", [50, pytest.param(150, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MODELS)
def test_adversarial_configs_load_or_raise(name: str, examples: int) -> None:
    right = json.loads(MODELS[name]().to_json_string(use_diff=False))
    keys = sorted({*right, *SUPPORTED_VALUES, "rope_scaling", "rope_theta"} - {"model_type"})

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(st.dictionaries(st.sampled_from(keys), anything, max_size=3))
    def check(change: dict[str, Any]) -> None:
        try:
            config = hf.read_config({**right, **change})
        except IngotError:
            return
        Decoder.on_meta(config)
        assert hf.read_config(hf.write_config(config, None, torch.float32)) == config

    check()


def test_moe_in_no_layer_is_none() -> None:
    raw = json.loads(MODELS["qwen3-moe"]().to_json_string(use_diff=False))
    assert hf.read_config({**raw, "mlp_only_layers": [0, 1, 2]}).moe is None
    experts = hf.read_config({**raw, "mlp_only_layers": [0]}).moe
    assert experts == MoEConfig(num_experts=6, top_k=3, ffn_dim=20, layers=(1, 2))
