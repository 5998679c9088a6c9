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
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ingot.core.errors import ConfigError, IngotError, UnknownName
from ingot.interop import hf
from ingot.nn import BatchLayout, Decoder, KVCache, Rope
from ingot.nn.weights import SINGLE, WeightsError

from .hf_models import BERT, LLAMA3, MODELS, VOCABULARY, YARN

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
def test_logits_match_transformers(name: str, saved: Any) -> None:
    decoder, model, tokens = hf.load(saved(name)), theirs(saved(name)), prompt(100)
    layout = BatchLayout.packed([100])
    with torch.inference_mode():
        actual = decoder.logits(decoder(tokens, layout))
        expected = model(tokens[None]).logits[0]
    assert (actual - expected).abs().max() <= 1e-4 * expected.abs().max()


@each_model
def test_greedy_tokens_match_transformers(name: str, saved: Any) -> None:
    decoder, model, tokens = hf.load(saved(name)), theirs(saved(name)), prompt(9)
    options = {"do_sample": False, "max_new_tokens": 64, "pad_token_id": 0}
    expected = model.generate(tokens[None], attention_mask=torch.ones(1, 9), **options)
    assert greedy(decoder, tokens.tolist(), 64) == expected[0].tolist()


@each_model
def test_load_and_save_give_identical_files(name: str, saved: Any, tmp_path: Path) -> None:
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
def test_shards_load_in_ingot_and_transformers(name: str, saved: Any, tmp_path: Path) -> None:
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
def test_config_written_without_source_reads_back_equal(name: str, saved: Any) -> None:
    """By us, and by transformers' own config class."""
    decoder = hf.load(saved(name))
    raw = hf.write_config(decoder.config, None, torch.float32)
    assert hf.read_config(raw) == decoder.config
    config = transformers.AutoConfig.for_model(**raw)
    assert hf.read_config(json.loads(config.to_json_string(use_diff=False))) == decoder.config


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtype_of_a_saved_model_is_kept(dtype: torch.dtype, saved: Any, tmp_path: Path) -> None:
    decoder = hf.load(saved("smollm2"), dtype=dtype)
    assert {p.dtype for p in decoder.parameters()} == {dtype}
    hf.save(decoder, tmp_path)
    assert read(tmp_path)["dtype"] == str(dtype).removeprefix("torch.")
    again = hf.load(tmp_path)
    for one, other in zip(decoder.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    assert theirs(tmp_path).dtype == dtype


def test_unknown_keys_are_kept(saved: Any, tmp_path: Path) -> None:
    copy = changed(saved("llama2"), tmp_path / "copy", {"a_note": {"of": ["ours"]}})
    hf.save(hf.load(copy), tmp_path / "out")
    assert read(tmp_path / "out")["a_note"] == {"of": ["ours"]}


def test_config_of_a_modified_model_is_updated(saved: Any, tmp_path: Path) -> None:
    decoder = hf.load(saved("llama3"))
    decoder.config = replace(decoder.config, layers=2, rope=Rope(theta=777.0))
    del decoder.blocks[2]
    hf.save(decoder, tmp_path)
    assert hf.load(tmp_path).config == decoder.config
    assert theirs(tmp_path).config.num_hidden_layers == 2


def changed(directory: Path, to: Path, change: dict[str, Any]) -> Path:
    """A copy with other keys in its config; None takes one out."""
    shutil.copytree(directory, to)
    raw = {**read(directory), **change}
    kept = {key: value for key, value in raw.items() if change.get(key, 0) is not None}
    (to / "config.json").write_text(json.dumps(kept))
    return to


def test_keys_of_transformers_4_are_read_and_kept(saved: Any, tmp_path: Path) -> None:
    scaling = {k: v for k, v in LLAMA3.items() if k != "rope_theta"}
    old = {"rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": scaling, "dtype": None}
    copy = changed(saved("llama3"), tmp_path / "copy", {**old, "torch_dtype": "float32"})
    decoder = hf.load(copy)
    assert decoder.config == hf.load(saved("llama3")).config
    hf.save(decoder.bfloat16(), tmp_path / "out")
    assert read(tmp_path / "out") == {**read(copy), "torch_dtype": "bfloat16"}


def test_old_gpt2_tensor_names_load(saved: Any, tmp_path: Path) -> None:
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


def test_tied_lm_head_in_the_file_must_equal_the_embedding(saved: Any, tmp_path: Path) -> None:
    copy = changed(saved("smollm2"), tmp_path / "copy", {})
    tensors = load_file(copy / SINGLE)
    head = tensors["model.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": head}, copy / SINGLE)
    hf.load(copy)
    head[0, 0] += 1
    save_file({**tensors, "lm_head.weight": head}, copy / SINGLE)
    with pytest.raises(WeightsError, match="tie_word_embeddings"):
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
def test_unsupported_values_raise(
    name: str, change: dict[str, Any], match: str, saved: Any, tmp_path: Path
) -> None:
    with pytest.raises((ConfigError, UnknownName, WeightsError), match=match):
        hf.load(changed(saved(name), tmp_path / "copy", change))


def test_model_larger_than_its_file_raises_before_allocation(saved: Any, tmp_path: Path) -> None:
    """The largest sizes that are allowed would take terabytes: refused before that."""
    huge = {"vocab_size": 2**22, "hidden_size": 2**17, "intermediate_size": 2**20, "head_dim": 4096}
    with pytest.raises(WeightsError, match="where the model has"):
        hf.load(changed(saved("llama2"), tmp_path / "copy", huge))


@pytest.mark.parametrize("text", ["", "null", "{", "[" * 100_000, '{"a": 1', "\xff"])
def test_malformed_config_raises(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin1")
    with pytest.raises(IngotError):
        hf.load(tmp_path)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder that transformers made and saved."""
    torch.manual_seed(0)
    model = transformers.BertModel(BERT)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.normal_(1.0 if "LayerNorm.weight" in key else 0.0, 0.2)
    directory = tmp_path_factory.mktemp("bert")
    model.save_pretrained(directory)
    return directory


@torch.inference_mode()
def hidden_states(directory: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """The hidden states by ingot and by transformers, with two token types."""
    tokens, types = prompt(50), torch.arange(50) // 25
    actual = hf.load_encoder(directory)(tokens, BatchLayout.packed([50]), types)
    model = transformers.BertModel.from_pretrained(directory).eval()
    expected = model(tokens[None], token_type_ids=types[None]).last_hidden_state[0]
    return actual, expected


def test_encoder_matches_transformers(bert: Path) -> None:
    actual, expected = hidden_states(bert)
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_encoder_files_of_other_tasks_and_ages_are_read(bert: Path, tmp_path: Path) -> None:
    """With the prefix, with the head of a task, with the names of the first files."""
    tensors = load_file(bert / SINGLE)
    renamed = {
        "bert." + name.replace("LayerNorm.weight", "LayerNorm.gamma"): tensor
        for name, tensor in tensors.items()
    }
    renamed["cls.predictions.bias"] = torch.zeros(3)
    renamed["bert.embeddings.position_ids"] = torch.arange(128)[None]
    shutil.copy(bert / "config.json", tmp_path)
    save_file(renamed, tmp_path / SINGLE)
    for one, other in zip(
        hf.load_encoder(tmp_path).parameters(), hf.load_encoder(bert).parameters(), strict=True
    ):
        assert torch.equal(one, other)


def test_encoder_is_saved_for_transformers(bert: Path, tmp_path: Path) -> None:
    encoder = hf.load_encoder(bert)
    hf.save_encoder(encoder, tmp_path / "loaded")
    encoder.source_config = None
    hf.save_encoder(encoder, tmp_path / "own")
    stored = load_file(bert / SINGLE)
    for directory in (tmp_path / "loaded", tmp_path / "own"):
        actual, expected = hidden_states(directory)
        assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()
        assert hf.load_encoder(directory).config == encoder.config
        for name, tensor in load_file(directory / SINGLE).items():
            assert torch.equal(tensor, stored[name])


def test_encoders_and_decoders_are_not_mixed_up(bert: Path, saved: Any) -> None:
    assert hf.is_encoder(bert)
    assert not hf.is_encoder(saved("smollm2"))
    with pytest.raises(ConfigError, match="generates no text"):
        hf.load(bert)
    with pytest.raises(UnknownName, match="llama"):
        hf.load_encoder(saved("smollm2"))


@pytest.mark.parametrize(
    "change",
    [
        {"position_embedding_type": "relative_key"},
        {"is_decoder": True},
        {"hidden_act": "silu"},
        {"quantization_config": {"quant_method": "gptq"}},
    ],
)
def test_unsupported_encoders_raise(change: dict[str, Any], bert: Path, tmp_path: Path) -> None:
    shutil.copy(bert / SINGLE, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(read(bert) | change))
    with pytest.raises(IngotError, match=next(iter(change))):
        hf.load_encoder(tmp_path)
