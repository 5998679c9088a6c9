"""Every family against transformers: the same logits, the same tokens, the same files.

The models are small and random, all their weights: transformers' own fresh ones have biases of 0
and norms of 1, which would hide one that is left out or taken for another.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig

from ingot.core.errors import ConfigError, IngotError, UnknownName
from ingot.interop import hf
from ingot.nn import BatchLayout, Decoder, KVCache, MoEConfig, NormPosition, QkNorm, Rope, preset
from ingot.nn.weights import SINGLE, WeightsError

VOCABULARY = 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
GPT2: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_positions": 128,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}
MOE: dict[str, Any] = {
    "head_dim": 12,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
}
WINDOW: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 11}

MODELS: dict[str, Callable[[], PreTrainedConfig]] = {
    "gpt2": lambda: transformers.GPT2Config(**GPT2),
    "gpt2-untied-relu": lambda: transformers.GPT2Config(
        **GPT2, n_inner=40, activation_function="relu", tie_word_embeddings=False
    ),
    "llama2": lambda: transformers.LlamaConfig(**SIZES),
    "llama3": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3, head_dim=12),
    "llama-yarn": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=YARN),
    "llama-linear-bias": lambda: transformers.LlamaConfig(
        **SIZES, rope_parameters=LINEAR, attention_bias=True
    ),
    "smollm2": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=9),
    "mistral-unbounded": lambda: transformers.MistralConfig(**SIZES, sliding_window=None),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen2-window": lambda: transformers.Qwen2Config(**SIZES, **WINDOW, max_window_layers=1),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=12),
    "qwen3-window": lambda: transformers.Qwen3Config(
        **SIZES,
        **WINDOW,
        head_dim=12,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "olmo2": lambda: transformers.Olmo2Config(**SIZES),
    "mixtral": lambda: transformers.MixtralConfig(
        **SIZES, num_local_experts=5, num_experts_per_tok=2
    ),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(**SIZES, **MOE, norm_topk_prob=True),
    "qwen3-moe-some": lambda: transformers.Qwen3MoeConfig(
        **SIZES, **MOE, **WINDOW, mlp_only_layers=[2], norm_topk_prob=False
    ),
    "qwen3-moe-step": lambda: transformers.Qwen3MoeConfig(**SIZES, **MOE, decoder_sparse_step=2),
}
each_model = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a model that transformers made and saved."""
    root, made = tmp_path_factory.mktemp("models"), set[str]()

    def directory(name: str) -> Path:
        if name not in made:
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(MODELS[name]())
            with torch.no_grad():
                for key, parameter in model.named_parameters():
                    is_norm = parameter.dim() == 1 and "bias" not in key
                    parameter.normal_(1.0 if is_norm else 0.0, 0.2)
            model.save_pretrained(root / name)
            made.add(name)
        return root / name

    return directory


def theirs(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype="auto").eval()


def prompt(length: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(7))


@torch.inference_mode()
def greedy(decoder: Decoder, tokens: list[int], count: int) -> list[int]:
    """Decoded from blocks, the prompt in two chunks."""
    block_size, blocks = 7, 24
    pool = KVCache(decoder.kv_spec, blocks, block_size)
    table = torch.randperm(blocks, generator=torch.Generator().manual_seed(1))[None]
    done, tokens = 0, list(tokens)
    while count:
        chunk = tokens[done : done + 5]
        done += len(chunk)
        layout = BatchLayout.paged(pool, [len(chunk)], [done], table)
        hidden = decoder(torch.tensor(chunk), layout)
        if done == len(tokens):
            tokens.append(int(decoder.logits(hidden[-1:]).argmax()))
            count -= 1
    return tokens


@each_model
def test_logits_are_those_of_transformers(name: str, saved: Any) -> None:
    decoder, model, tokens = hf.load(saved(name)), theirs(saved(name)), prompt(100)
    layout = BatchLayout.packed([100])
    with torch.inference_mode():
        actual = decoder.logits(decoder(tokens, layout))
        expected = model(tokens[None]).logits[0]
    assert (actual - expected).abs().max() <= 1e-4 * expected.abs().max()


@each_model
def test_64_greedy_tokens_are_those_of_transformers(name: str, saved: Any) -> None:
    decoder, model, tokens = hf.load(saved(name)), theirs(saved(name)), prompt(9)
    options = {"do_sample": False, "max_new_tokens": 64, "pad_token_id": 0}
    expected = model.generate(tokens[None], attention_mask=torch.ones(1, 9), **options)
    assert greedy(decoder, tokens.tolist(), 64) == expected[0].tolist()


@each_model
def test_a_round_trip_gives_the_same_files(name: str, saved: Any, tmp_path: Path) -> None:
    hf.save(hf.load(saved(name)), tmp_path / "ours")
    assert_same_files(tmp_path / "ours", saved(name))
    again = theirs(tmp_path / "ours")
    again.save_pretrained(tmp_path / "theirs")
    assert_same_files(tmp_path / "theirs", saved(name))
    for one, other in zip(again.parameters(), theirs(saved(name)).parameters(), strict=True):
        assert torch.equal(one, other)


def assert_same_files(one: Path, other: Path) -> None:
    assert (one / SINGLE).read_bytes() == (other / SINGLE).read_bytes()
    assert read(one) == read(other)


def read(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())


@each_model
def test_shards_are_read_by_both(name: str, saved: Any, tmp_path: Path) -> None:
    decoder = hf.load(saved(name))
    hf.save(decoder, tmp_path, shard_bytes=20_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    again = hf.load(tmp_path)
    for one, other in zip(decoder.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(
        theirs(tmp_path).parameters(), theirs(saved(name)).parameters(), strict=True
    ):
        assert torch.equal(one, other)


@each_model
def test_a_config_without_its_origin_is_found_and_read_alike(name: str, saved: Any) -> None:
    """By us, and by transformers' own config class."""
    decoder = hf.load(saved(name))
    raw = hf.write_config(decoder.config, None, torch.float32)
    assert hf.read_config(raw) == decoder.config
    config = transformers.AutoConfig.for_model(**raw)
    assert hf.read_config(json.loads(config.to_json_string(use_diff=False))) == decoder.config


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype, saved: Any, tmp_path: Path) -> None:
    decoder = hf.load(saved("smollm2"), dtype=dtype)
    assert {p.dtype for p in decoder.parameters()} == {dtype}
    hf.save(decoder, tmp_path)
    assert read(tmp_path)["dtype"] == str(dtype).removeprefix("torch.")
    again = hf.load(tmp_path)
    for one, other in zip(decoder.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    assert theirs(tmp_path).dtype == dtype


@pytest.mark.parametrize("model_type", hf.FAMILIES)
def test_defaults_are_those_of_transformers(model_type: str) -> None:
    """What transformers takes for a key that config.json leaves out."""
    config = transformers.AutoConfig.for_model(model_type)
    family = hf.FAMILIES[model_type]
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
    for key, values in family.only.items():
        assert getattr(config, key, None) in values


def test_keys_we_do_not_know_are_kept(saved: Any, tmp_path: Path) -> None:
    copy = changed(saved("llama2"), tmp_path / "copy", {"a_note": {"of": ["ours"]}})
    hf.save(hf.load(copy), tmp_path / "out")
    assert read(tmp_path / "out")["a_note"] == {"of": ["ours"]}


def test_a_model_that_was_changed_says_so_in_its_config(saved: Any, tmp_path: Path) -> None:
    decoder = hf.load(saved("llama3"))
    decoder.config = replace(decoder.config, layers=2, rope=Rope(theta=777.0))
    del decoder.blocks[2]
    hf.save(decoder, tmp_path)
    assert hf.load(tmp_path).config == decoder.config
    assert theirs(tmp_path).config.num_hidden_layers == 2


def test_what_no_family_has_is_not_written() -> None:
    config = replace(preset("tiny"), qk_norm=QkNorm.PER_HEAD, norm_position=NormPosition.POST)
    with pytest.raises(ConfigError, match="cannot be said"):
        hf.write_config(config, None, torch.float32)


@pytest.mark.parametrize("name", ["gpt2-124m", "smollm2-135m", "llama-100m", "tiny-moe"])
def test_presets_are_of_a_family(name: str) -> None:
    raw = hf.write_config(preset(name), None, torch.bfloat16)
    assert hf.read_config(raw) == preset(name)


def changed(directory: Path, to: Path, change: dict[str, Any]) -> Path:
    """A copy with other keys in its config; None takes one out."""
    shutil.copytree(directory, to)
    raw = {**read(directory), **change}
    kept = {key: value for key, value in raw.items() if change.get(key, 0) is not None}
    (to / "config.json").write_text(json.dumps(kept))
    return to


def test_the_keys_of_transformers_4(saved: Any, tmp_path: Path) -> None:
    scaling = {k: v for k, v in LLAMA3.items() if k != "rope_theta"}
    old = {"rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": scaling, "dtype": None}
    copy = changed(saved("llama3"), tmp_path / "copy", {**old, "torch_dtype": "float32"})
    decoder = hf.load(copy)
    assert decoder.config == hf.load(saved("llama3")).config
    hf.save(decoder.bfloat16(), tmp_path / "out")
    assert read(tmp_path / "out") == {**read(copy), "torch_dtype": "bfloat16"}


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "qwen3-moe"])
@pytest.mark.parametrize("used", [False, True])
def test_a_window_of_transformers_4_counts_if_it_is_used(name: str, used: bool) -> None:
    """Files of Qwen2.5 give a window and say that it is not used."""
    right = json.loads(MODELS[name]().to_json_string(use_diff=False))
    raw = {k: v for k, v in right.items() if k != "layer_types"}
    raw |= {"use_sliding_window": used, "sliding_window": 32, "max_window_layers": 2}
    config = transformers.AutoConfig.for_model(**raw)
    kinds = getattr(config, "layer_types", ["sliding_attention"] * 3)
    windows = [config.sliding_window if "sliding" in kind else None for kind in kinds]
    assert list(hf.read_config(raw).window_per_layer) == windows
    assert any(windows) == used


def test_the_names_of_old_gpt2_files(saved: Any, tmp_path: Path) -> None:
    """No prefix, and the mask of attention among the weights."""
    copy = changed(saved("gpt2"), tmp_path / "copy", {})
    tensors = load_file(copy / SINGLE)
    old = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    old["h.0.attn.bias"] = torch.ones(1, 1, 4, 4, dtype=torch.uint8)
    old["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(old, copy / SINGLE)
    for one, other in zip(
        hf.load(copy).parameters(), hf.load(saved("gpt2")).parameters(), strict=True
    ):
        assert torch.equal(one, other)


def test_a_tied_head_may_be_in_the_file_if_it_is_the_embedding(saved: Any, tmp_path: Path) -> None:
    copy = changed(saved("smollm2"), tmp_path / "copy", {})
    tensors = load_file(copy / SINGLE)
    head = tensors["model.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": head}, copy / SINGLE)
    hf.load(copy)
    head[0, 0] += 1
    save_file({**tensors, "lm_head.weight": head}, copy / SINGLE)
    with pytest.raises(WeightsError, match="tied"):
        hf.load(copy)


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        ("llama2", {"model_type": "lama"}, "did you mean 'llama'"),
        ("llama2", {"model_type": None}, "no model_type"),
        ("llama2", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("llama2", {"mlp_bias": True}, "mlp_bias"),
        ("llama2", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("llama2", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama2", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ("llama2", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "original_max"),
        ("llama-yarn", {"rope_parameters": {**YARN, "mscale": 2.0}}, "mscale"),
        ("llama-yarn", {"rope_parameters": {**YARN, "attention_factor": 2.0}}, "attention_factor"),
        ("llama2", {"rope_parameters": {"sliding_attention": {"rope_theta": 1.0}}}, "sliding"),
        ("llama2", {"hidden_size": 33, "head_dim": None}, "divide"),
        ("llama2", {"hidden_size": None}, "no hidden_size"),
        ("llama2", {"num_hidden_layers": 10**9}, "layers is 1000000000"),
        ("llama2", {"vocab_size": -1}, "vocab_size"),
        ("llama2", {"tie_word_embeddings": "no"}, "tie_embeddings is 'no'"),
        ("llama2", {"num_hidden_layers": 4}, "not in"),
        ("llama2", {"num_hidden_layers": 2}, "not in the model"),
        ("llama2", {"intermediate_size": 49}, "where the model has"),
        ("llama2", {"attention_bias": True}, "not in"),
        ("mistral", {"layer_types": ["full_attention"] * 3}, "layer_types"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 3}, "layer_types"),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse"),
        ("gpt2", {"activation_function": "tanh"}, "activation_function"),
        ("mixtral", {"num_experts_per_tok": 6}, "top_k"),
        ("mixtral", {"num_local_experts": 2**30}, "num_experts"),
    ],
)
def test_what_is_not_supported_is_said(
    name: str, change: dict[str, Any], match: str, saved: Any, tmp_path: Path
) -> None:
    with pytest.raises((ConfigError, UnknownName, WeightsError), match=match):
        hf.load(changed(saved(name), tmp_path / "copy", change))


def test_the_model_must_not_be_larger_than_its_file(saved: Any, tmp_path: Path) -> None:
    """The largest sizes that are allowed would take terabytes: refused before that."""
    huge = {"vocab_size": 2**22, "hidden_size": 2**17, "intermediate_size": 2**20, "head_dim": 4096}
    with pytest.raises(WeightsError, match="where the model has"):
        hf.load(changed(saved("llama2"), tmp_path / "copy", huge))


@pytest.mark.parametrize("text", ["", "null", "{", "[" * 100_000, '{"a": 1', "\xff"])
def test_a_config_that_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin1")
    with pytest.raises(IngotError):
        hf.load(tmp_path)


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


@each_model
def test_hostile_configs_are_read_or_refused(name: str) -> None:
    right = json.loads(MODELS[name]().to_json_string(use_diff=False))
    keys = sorted({*right, *hf._ONLY, "rope_scaling", "rope_theta"} - {"model_type"})

    @settings(
        max_examples=150,
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


def test_experts_in_no_layer_are_none() -> None:
    raw = json.loads(MODELS["qwen3-moe"]().to_json_string(use_diff=False))
    assert hf.read_config({**raw, "mlp_only_layers": [0, 1, 2]}).moe is None
    experts = hf.read_config({**raw, "mlp_only_layers": [0]}).moe
    assert experts == MoEConfig(num_experts=6, top_k=3, ffn_dim=20, layers=(1, 2))
