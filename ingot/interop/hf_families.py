"""The supported model families, as data.

To add a family, append a `Family` to `FAMILIES`, or to `ENCODERS`. If its config.json has keys that
no mapping of `ingot.interop.hf_config` covers, write a `KeyMapping` for them.
"""

# pyright: basic
from __future__ import annotations

from ingot.interop.hf_config import (
    GPT2_MLP,
    HEADS,
    HIDDEN_ACT,
    INTERLEAVED_MOE,
    LAYERED_WINDOW,
    MOE,
    ROPE,
    SLIDING_WINDOW,
    SWITCHED_WINDOW,
    Family,
    keys,
)
from ingot.nn.config import EncoderConfig, NormKind, NormPosition, QkNorm

LM_HEAD = "lm_head.weight"

_SIZES = keys(
    vocab_size="vocab_size",
    dim="hidden_size",
    layers="num_hidden_layers",
    heads="num_attention_heads",
    ffn_dim="intermediate_size",
    max_seq_len="max_position_embeddings",
    norm_eps="rms_norm_eps",
    tie_embeddings="tie_word_embeddings",
)
_LLAMA = (_SIZES, HEADS, ROPE)
_BIASES = keys(qkv_bias="attention_bias", o_bias="attention_bias")
_DEFAULTS = {"tie_word_embeddings": False, "rope_theta": 10000.0, "rms_norm_eps": 1e-6}
_SILU = {"hidden_act": ("silu", "swish")}
_WINDOW_OFF = {"use_sliding_window": False, "sliding_window": 4096}
_LAYERED_WINDOW_OFF = {**_WINDOW_OFF, "max_window_layers": 28, "layer_types": None}

_LAYER = "model.layers.{i}."
_NAMES: dict[str, str | tuple[str, ...]] = {
    "tok_embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "lm_head.weight": LM_HEAD,
    **{
        f"blocks.{{i}}.attention.qkv.{kind}": tuple(
            f"{_LAYER}self_attn.{x}_proj.{kind}" for x in "qkv"
        )
        for kind in ("weight", "bias")
    },
    "blocks.{i}.attention.out.weight": _LAYER + "self_attn.o_proj.weight",
    "blocks.{i}.attention.out.bias": _LAYER + "self_attn.o_proj.bias",
    "blocks.{i}.attention.q_norm.weight": _LAYER + "self_attn.q_norm.weight",
    "blocks.{i}.attention.k_norm.weight": _LAYER + "self_attn.k_norm.weight",
    "blocks.{i}.attention_norm.weight": _LAYER + "input_layernorm.weight",
    "blocks.{i}.mlp_norm.weight": _LAYER + "post_attention_layernorm.weight",
    "blocks.{i}.mlp.gate.weight": _LAYER + "mlp.gate_proj.weight",
    "blocks.{i}.mlp.up.weight": _LAYER + "mlp.up_proj.weight",
    "blocks.{i}.mlp.down.weight": _LAYER + "mlp.down_proj.weight",
}
_OLMO2_NAMES = {
    **_NAMES,
    "blocks.{i}.attention_norm.weight": _LAYER + "post_attention_layernorm.weight",
    "blocks.{i}.mlp_norm.weight": _LAYER + "post_feedforward_layernorm.weight",
}
_MIXTRAL_NAMES = {
    **_NAMES,
    "blocks.{i}.mlp.router.weight": _LAYER + "block_sparse_moe.gate.weight",
    "blocks.{i}.mlp.gate": _LAYER + "block_sparse_moe.experts.{e}.w1.weight",
    "blocks.{i}.mlp.down": _LAYER + "block_sparse_moe.experts.{e}.w2.weight",
    "blocks.{i}.mlp.up": _LAYER + "block_sparse_moe.experts.{e}.w3.weight",
}
_QWEN3_MOE_NAMES = {
    **_NAMES,
    "blocks.{i}.mlp.router.weight": _LAYER + "mlp.gate.weight",
    "blocks.{i}.mlp.gate": _LAYER + "mlp.experts.{e}.gate_proj.weight",
    "blocks.{i}.mlp.up": _LAYER + "mlp.experts.{e}.up_proj.weight",
    "blocks.{i}.mlp.down": _LAYER + "mlp.experts.{e}.down_proj.weight",
}
_GPT2_NAMES = {
    "tok_embed.weight": "transformer.wte.weight",
    "pos_embed.weight": "transformer.wpe.weight",
    "lm_head.weight": LM_HEAD,
    **{
        f"{ours}.{kind}": f"transformer.{theirs}.{kind}"
        for kind in ("weight", "bias")
        for ours, theirs in {
            "norm": "ln_f",
            "blocks.{i}.attention_norm": "h.{i}.ln_1",
            "blocks.{i}.mlp_norm": "h.{i}.ln_2",
            "blocks.{i}.attention.qkv": "h.{i}.attn.c_attn",
            "blocks.{i}.attention.out": "h.{i}.attn.c_proj",
            "blocks.{i}.mlp.up": "h.{i}.mlp.c_fc",
            "blocks.{i}.mlp.down": "h.{i}.mlp.c_proj",
        }.items()
    },
}

_FAMILIES = (
    Family(
        model_type="llama",
        architecture="LlamaForCausalLM",
        prefix="model.",
        mappings=(*_LLAMA, _BIASES),
        tensor_names=_NAMES,
        defaults={**_DEFAULTS, "attention_bias": False},
        supported_values={**_SILU, "mlp_bias": (False,)},
    ),
    Family(
        model_type="gpt2",
        architecture="GPT2LMHeadModel",
        prefix="transformer.",
        mappings=(
            keys(
                vocab_size="vocab_size",
                dim="n_embd",
                layers="n_layer",
                heads="n_head",
                max_seq_len="n_positions",
                norm_eps="layer_norm_epsilon",
                tie_embeddings="tie_word_embeddings",
            ),
            GPT2_MLP,
        ),
        tensor_names=_GPT2_NAMES,
        constants={"norm": NormKind.LAYER, "qkv_bias": True, "o_bias": True, "mlp_bias": True},
        defaults={
            "n_positions": 1024,
            "n_inner": None,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
        },
        supported_values={
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
        transposed=frozenset(
            f"blocks.{{i}}.{name}.weight"
            for name in ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
        ),
        ignored_tensors=r".*\.h\.\d+\.attn\.(masked_)?bias",
    ),
    Family(
        model_type="mistral",
        architecture="MistralForCausalLM",
        prefix="model.",
        mappings=(*_LLAMA, SLIDING_WINDOW),
        tensor_names=_NAMES,
        defaults={**_DEFAULTS, "sliding_window": 4096},
        supported_values={**_SILU, "layer_types": (None,)},
    ),
    Family(
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        prefix="model.",
        mappings=(*_LLAMA, LAYERED_WINDOW),
        tensor_names=_NAMES,
        constants={"qkv_bias": True},
        defaults={**_DEFAULTS, **_LAYERED_WINDOW_OFF},
        supported_values=_SILU,
    ),
    Family(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        prefix="model.",
        mappings=(*_LLAMA, _BIASES, LAYERED_WINDOW),
        tensor_names=_NAMES,
        constants={"qk_norm": QkNorm.PER_HEAD},
        defaults={**_DEFAULTS, **_LAYERED_WINDOW_OFF, "attention_bias": False, "head_dim": 128},
        supported_values=_SILU,
    ),
    Family(
        model_type="olmo2",
        architecture="Olmo2ForCausalLM",
        prefix="model.",
        mappings=(*_LLAMA, _BIASES),
        tensor_names=_OLMO2_NAMES,
        constants={"norm_position": NormPosition.POST, "qk_norm": QkNorm.FULL},
        defaults={**_DEFAULTS, "rms_norm_eps": 1e-5, "attention_bias": False},
        supported_values=_SILU,
    ),
    Family(
        model_type="mixtral",
        architecture="MixtralForCausalLM",
        prefix="model.",
        mappings=(*_LLAMA, SLIDING_WINDOW, MOE),
        tensor_names=_MIXTRAL_NAMES,
        defaults={**_DEFAULTS, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None},
        supported_values=_SILU,
    ),
    Family(
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        prefix="model.",
        mappings=(*_LLAMA, _BIASES, SWITCHED_WINDOW, INTERLEAVED_MOE),
        tensor_names=_QWEN3_MOE_NAMES,
        constants={"qk_norm": QkNorm.PER_HEAD},
        defaults={
            **_DEFAULTS,
            **_WINDOW_OFF,
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
            "norm_topk_prob": False,
        },
        supported_values=_SILU,
    ),
)

FAMILIES: dict[str, Family] = {family.model_type: family for family in _FAMILIES}
"""By `model_type`. `write_config` takes the first family that can express a configuration."""

_BERT_LAYER = "encoder.layer.{i}."
_BERT_NAMES: dict[str, str | tuple[str, ...]] = {
    "tok_embed.weight": "embeddings.word_embeddings.weight",
    "pos_embed.weight": "embeddings.position_embeddings.weight",
    "type_embed.weight": "embeddings.token_type_embeddings.weight",
    **{
        f"blocks.{{i}}.attention.qkv.{kind}": tuple(
            f"{_BERT_LAYER}attention.self.{x}.{kind}" for x in ("query", "key", "value")
        )
        for kind in ("weight", "bias")
    },
    **{
        f"{ours}.{kind}": f"{theirs}.{kind}"
        for kind in ("weight", "bias")
        for ours, theirs in {
            "norm": "embeddings.LayerNorm",
            "blocks.{i}.attention.out": _BERT_LAYER + "attention.output.dense",
            "blocks.{i}.attention_norm": _BERT_LAYER + "attention.output.LayerNorm",
            "blocks.{i}.mlp.up": _BERT_LAYER + "intermediate.dense",
            "blocks.{i}.mlp.down": _BERT_LAYER + "output.dense",
            "blocks.{i}.mlp_norm": _BERT_LAYER + "output.LayerNorm",
        }.items()
    },
}

ENCODERS: dict[str, Family] = {
    "bert": Family(
        model_type="bert",
        architecture="BertModel",
        prefix="bert.",
        mappings=(
            keys(
                vocab_size="vocab_size",
                dim="hidden_size",
                layers="num_hidden_layers",
                heads="num_attention_heads",
                ffn_dim="intermediate_size",
                max_seq_len="max_position_embeddings",
                type_vocab_size="type_vocab_size",
                norm_eps="layer_norm_eps",
            ),
            HIDDEN_ACT,
        ),
        tensor_names=_BERT_NAMES,
        defaults={
            "vocab_size": 30522,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "intermediate_size": 3072,
            "max_position_embeddings": 512,
            "type_vocab_size": 2,
            "layer_norm_eps": 1e-12,
            "hidden_act": "gelu",
        },
        supported_values={
            "position_embedding_type": ("absolute", None),
            "is_decoder": (False,),
            "add_cross_attention": (False,),
        },
        # The pooler and the heads of other tasks: embeddings do not depend on them.
        ignored_tensors=r"embeddings\.position_ids|(pooler|cls|classifier)\..*",
        config_type=EncoderConfig,
    ),
}
"""Encoders by `model_type`; their files have the prefix only if they are those of another task."""
