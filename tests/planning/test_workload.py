from __future__ import annotations

from dataclasses import asdict

import pytest

from ingot.core.errors import ConfigError, UnknownName
from ingot.nn import preset
from ingot.planning.workload import (
    SHAPES,
    ModelShape,
    TrainingWorkload,
    shape_from_config,
    shape_from_decoder,
)

LLAMA = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
DEEPSEEK = {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "vocab_size": 129280,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama3-8b", 8.03),
        ("llama3-70b", 70.55),
        ("llama3-405b", 405.85),
        ("gpt3-175b", 174.6),
        ("mixtral-8x7b", 46.7),
        ("qwen3-30b-a3b", 30.5),
        ("deepseek-v3", 671.0),
    ],
)
def test_named_models_have_their_published_size(name: str, billions: float) -> None:
    assert SHAPES[name].params / 1e9 == pytest.approx(billions, rel=0.005)


def test_a_config_of_hugging_face_gives_the_named_shapes() -> None:
    assert shape_from_config(LLAMA) == SHAPES["llama3-8b"]
    assert shape_from_config(DEEPSEEK) == SHAPES["deepseek-v3"]


def test_gpt2_has_its_own_names_for_sizes() -> None:
    raw = {"n_embd": 768, "n_head": 12, "n_layer": 12, "vocab_size": 50257}
    assert shape_from_config(raw).params / 1e6 == pytest.approx(124, rel=0.01)


@pytest.mark.parametrize("raw", [{}, {**LLAMA, "hidden_size": "wide"}, {**LLAMA, "vocab_size": 0}])
def test_a_config_without_sizes_is_an_error(raw: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        shape_from_config(raw)


@pytest.mark.parametrize("name", ["gpt2-124m", "smollm2-135m", "tiny-moe"])
def test_presets_become_shapes(name: str) -> None:
    config = preset(name)
    shape = shape_from_decoder(asdict(config))
    assert (shape.layers, shape.dim, shape.gated) == (
        config.layers,
        config.dim,
        name != "gpt2-124m",
    )
    assert shape.experts == (config.moe.num_experts if config.moe else 0)


def test_a_recipe_without_sizes_is_an_error() -> None:
    with pytest.raises(ConfigError, match="needs vocab_size"):
        shape_from_decoder({"kind": "cnn"})


def test_only_active_experts_count_as_flops() -> None:
    mixtral = SHAPES["mixtral-8x7b"]
    dense = 6 * (mixtral.dense_weights + mixtral.embedding_weights)
    attention = mixtral.flops_per_token(2048) - mixtral.flops_per_token(0)
    assert mixtral.flops_per_token(0) == dense + 6 * mixtral.expert_weights / 4
    assert attention == pytest.approx(6 * mixtral.layers * mixtral.dim * 2048)


@pytest.mark.parametrize("experts", [{"top_k": 0}, {"top_k": 9}, {"expert_dim": 0}])
def test_experts_that_no_token_can_use_are_an_error(experts: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="top_k"):
        ModelShape(**{**asdict(SHAPES["mixtral-8x7b"]), **experts})


def test_a_workload_needs_tokens_and_a_known_precision() -> None:
    model = SHAPES["llama3-8b"]
    with pytest.raises(ConfigError, match="sequence length"):
        TrainingWorkload(model=model, seq_len=0, global_batch_size=1)
    with pytest.raises(UnknownName, match="precision"):
        TrainingWorkload(model=model, seq_len=1, global_batch_size=1, precision="fp64")  # pyright: ignore
