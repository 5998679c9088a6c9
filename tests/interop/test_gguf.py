from __future__ import annotations

import json
import math
import resource
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import gguf as package
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from ingot.core import lineage
from ingot.core.errors import IngotError
from ingot.interop import gguf, gguf_weights, hf
from ingot.interop.gguf_blocks import FORMATS
from ingot.interop.gguf_file import GgufError
from ingot.nn import BatchLayout
from tests import models
from tests.interop import conftest
from tests.interop.conftest import Small, random_blocks

QUANTIZED = package.GGMLQuantizationType


def load(directory: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(directory, **options).eval()


def logits(model: Any) -> torch.Tensor:
    tokens = torch.arange(1, 40).remainder(len(conftest.TOKENS))[None]
    with torch.no_grad():
        return model(tokens).logits


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("llama", {}),
        ("llama", {"num_key_value_heads": 6, "num_hidden_layers": 1}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 10}),
    ],
)
def test_imported_model_computes_the_same_in_transformers(
    small: Small, tmp_path: Path, family: str, shape: dict[str, Any], tied: bool
) -> None:
    shape = {**shape, "tie_word_embeddings": tied}
    gguf.convert(small(family, **shape), tmp_path / "out")
    original, imported = conftest.model(family, **shape), load(tmp_path / "out", dtype="float32")
    assert type(imported) is type(original)
    found = imported.state_dict()
    for name, value in original.state_dict().items():
        assert torch.equal(found[name], value), name
    assert torch.equal(logits(imported), logits(original))
    kept = ("rms_norm_eps", "rope_parameters", "tie_word_embeddings", "eos_token_id", "vocab_size")
    for name in (*kept, "max_position_embeddings", "num_key_value_heads"):
        assert getattr(imported.config, name) == getattr(original.config, name), name


def test_imported_model_loads_as_bfloat16_by_default(small: Small, tmp_path: Path) -> None:
    gguf.convert(small(), tmp_path / "out")
    assert load(tmp_path / "out").dtype == torch.bfloat16
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}


def raw_blocks(kind: QUANTIZED, rows: int, columns: int, generator: np.random.Generator) -> Any:
    """Bytes as this type is stored; below 0x7C, so that no scale in float16 is infinite."""
    elements, size = package.GGML_QUANT_SIZES[kind]
    return generator.integers(0, 0x7C, (rows, columns // elements * size), dtype=np.uint8)


@pytest.mark.parametrize("name", sorted(gguf.TYPES))
def test_every_type_dequantizes_as_in_the_gguf_package(
    small: Small, tmp_path: Path, name: str
) -> None:
    kind, generator = QUANTIZED[name], np.random.default_rng(3)
    rows = {"blk.0.ffn_up.weight": 3, "blk.0.attn_v.weight": 128, "blk.0.attn_q.weight": 256}
    raw = {key: raw_blocks(kind, count, 256, generator) for key, count in rows.items()}
    shape = {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 3}
    plain = {"F32": np.float32, "F16": np.float16}.get(name)
    weights = {key: value.view(plain) if plain else value for key, value in raw.items()}
    types = None if plain else dict.fromkeys(raw, kind)
    path = small(weights=weights, types=types, num_hidden_layers=1, **shape)
    gguf.convert(path, tmp_path / "out", keep_quantized=False)
    found = load_file(tmp_path / "out" / "model.safetensors")
    for key, ours in (("ffn_up", "mlp.up_proj"), ("attn_v", "self_attn.v_proj")):
        expected = package.quants.dequantize(raw[f"blk.0.{key}.weight"], kind)
        expected = torch.from_numpy(expected.astype(np.float32)).bfloat16()
        assert torch.equal(found[f"model.layers.0.{ours}.weight"], expected)
    queries = package.quants.dequantize(raw["blk.0.attn_q.weight"], kind).astype(np.float32)
    back = conftest.interleaved(found["model.layers.0.self_attn.q_proj.weight"].float().numpy(), 4)
    assert np.array_equal(back, torch.from_numpy(queries).bfloat16().float().numpy())
    counted = lineage.read(tmp_path / "out").steps[0]["quantization"]
    assert counted[name] == (12 if name == "F32" else 3)


def quantized_file(small: Small, types: dict[str, str]) -> Path:
    """Write a file whose matrices have these types by the end of their name, else `""`'s."""
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    model = conftest.model("llama", **shape)
    weights: dict[str, Any] = {}
    kinds: dict[str, QUANTIZED] = {}
    for theirs, value in model.state_dict().items():
        name = conftest.gguf_name(theirs)
        if value.dim() == 2:
            chosen = next(types[end] for end in types if name.endswith(end))
            kinds[name] = QUANTIZED[chosen]
            weights[name] = random_blocks(chosen, *value.shape, seed=len(name))
    return small("llama", weights=weights, types=kinds, **shape)


@pytest.mark.parametrize("name", FORMATS)
def test_quantized_weights_stay_as_they_are(small: Small, tmp_path: Path, name: str) -> None:
    path = quantized_file(small, {"": name})
    gguf.convert(path, tmp_path / "kept")
    gguf.convert(path, tmp_path / "dequantized", keep_quantized=False)
    kept, dequantized = hf.load(tmp_path / "kept"), hf.load(tmp_path / "dequantized", torch.float32)
    head: Any = kept.get_submodule("tok_embed" if kept.lm_head is None else "lm_head")
    assert head.format == FORMATS[name]
    tokens, layout = torch.arange(40), BatchLayout.packed([40])
    with torch.inference_mode():
        found = kept.float().logits(kept(tokens, layout))
        expected = dequantized.logits(dequantized(tokens, layout))
    # Activations are rounded to int8, weights of the other one to bfloat16.
    assert (found - expected).norm() < 0.03 * expected.norm()
    memory = sum(t.nbytes for t in (*kept.parameters(), *kept.buffers()))
    assert memory < {"Q6_K": 1.45}.get(name, 1.15) * path.stat().st_size


def test_layers_of_other_types_become_bfloat16(small: Small, tmp_path: Path) -> None:
    """A file such as Q4_K_M: v has more bits than q and k, which are computed with it."""
    path = quantized_file(
        small, {"0.attn_v.weight": "Q6_K", "1.ffn_down.weight": "Q6_K", "": "Q4_K"}
    )
    gguf.convert(path, tmp_path / "out")
    decoder = hf.load(tmp_path / "out")
    formats = {
        name: getattr(decoder.get_submodule(name), "format", None)
        for name in ("blocks.0.attention.qkv", "blocks.1.attention.qkv", "blocks.1.mlp.down")
    }
    assert list(formats.values()) == [None, FORMATS["Q4_K"], FORMATS["Q6_K"]]


def test_large_models_are_written_in_shards_and_chunks(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = small()
    gguf.convert(path, tmp_path / "one")
    monkeypatch.setattr(gguf_weights, "SHARD_BYTES", 4000)
    monkeypatch.setattr(gguf_weights, "CHUNK_ELEMENTS", 100)
    gguf.convert(path, tmp_path / "many")
    shards = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(shards) > 3
    assert shards[0].name == f"model-00001-of-{len(shards):05}.safetensors"
    whole = load_file(tmp_path / "one" / "model.safetensors")
    pieces = {name: value for shard in shards for name, value in load_file(shard).items()}
    assert whole.keys() == pieces.keys()
    assert all(torch.equal(whole[name], pieces[name]) for name in whole)
    assert torch.equal(logits(load(tmp_path / "one")), logits(load(tmp_path / "many")))


def test_llama3_frequency_factors_are_recognized(small: Small, tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    shape = {"head_dim": 64, "rope_theta": None, "rope_parameters": scaling}
    original = conftest.model("llama", **shape)
    plain = 1.0 / 500000.0 ** (np.arange(0, 64, 2) / 64)
    factors = (plain / original.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert factors.min() == pytest.approx(1)
    assert factors.max() == pytest.approx(32)
    path = small(weights={"rope_freqs.weight": factors}, **shape)
    gguf.convert(path, tmp_path / "out")
    imported = load(tmp_path / "out", dtype="float32")
    found = imported.config.rope_parameters
    assert {name: pytest.approx(value) for name, value in found.items() if name in scaling} | {
        "rope_type": "llama3"
    } == scaling
    torch.testing.assert_close(logits(imported), logits(original), rtol=1e-4, atol=1e-4)
    other = small(weights={"rope_freqs.weight": factors**1.1}, **shape)
    with pytest.raises(GgufError, match="differ from those of Llama 3"):
        gguf.convert(other, tmp_path / "other")


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 2.5, "original_max_position_embeddings": 48},
    ],
)
def test_rope_scaling_is_converted(small: Small, tmp_path: Path, scaling: dict[str, Any]) -> None:
    change = {
        "llama.rope.scaling.type": scaling["rope_type"],
        "llama.rope.scaling.factor": scaling["factor"],
        "llama.rope.scaling.original_context_length": scaling.get(
            "original_max_position_embeddings"
        ),
    }
    gguf.convert(small(change=change), tmp_path / "out")
    original = conftest.model("llama", rope_scaling=dict(scaling))
    imported = load(tmp_path / "out", dtype="float32")
    assert imported.config.rope_parameters == original.config.rope_parameters
    assert torch.equal(logits(imported), logits(original))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "mamba"}, "unsupported architecture 'mamba'"),
        ({"change": {"llama.expert_count": 8}}, "mixtures of experts are not supported"),
        ({"change": {"llama.attention.value_length": 2}}, "of different width"),
        ({"change": {"llama.rope.dimension_count": 2}}, "partial rotary embeddings"),
        ({"change": {"llama.rope.scaling.type": "longrope"}}, "factor' is missing"),
        ({"change": {"llama.attention.sliding_window": 16}}, "sliding-window"),
        ({"change": {"llama.block_count": 3}}, "'blk.2.attn_norm.weight' is missing"),
        ({"change": {"llama.block_count": 1}}, "tensors that are not supported"),
        ({"change": {"llama.block_count": 2**31}}, "'llama.block_count' is 2147483648"),
        ({"change": {"llama.block_count": "2"}}, "not of type int"),
        ({"change": {"llama.feed_forward_length": 41}}, r"shape \(40, 24\), expected \(41, 24\)"),
        ({"change": {"llama.attention.head_count": 0}}, "head_count' is 0"),
        ({"change": {"llama.attention.head_count_kv": 4}}, "are inconsistent"),
        ({"change": {"llama.attention.layer_norm_rms_epsilon": math.nan}}, "epsilon' is nan"),
        ({"change": {"llama.embedding_length": None}}, "embedding_length' is missing"),
        ({"weights": {"token_embd.weight": None}}, "no embedding"),
        ({"weights": {"blk.0.ffn_up.weight": np.ones((40, 24), np.int32)}}, "unsupported type I32"),
        ({"weights": {"blk.1.attn_q.bias": np.ones(24, np.float32)}}, "blk.1.attn_q.bias"),
        (
            {"weights": {"output_norm.weight": np.full(24, np.inf, np.float32)}},
            "'output_norm.weight' has non-finite values",
        ),
        (
            {"weights": {"output_norm.weight": np.full(24, np.nan, np.float32)}},
            "'output_norm.weight' has non-finite values",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_files_raise(
    small: Small, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    path = small(**options)
    with pytest.raises(GgufError, match=message) as raised:
        gguf.convert(path, tmp_path / "out")
    assert raised.value.hint
    assert [entry.name for entry in tmp_path.iterdir()] == ["small.gguf"]


def test_existing_directory_is_not_modified(small: Small, tmp_path: Path) -> None:
    path = small()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    (tmp_path / "empty").mkdir()
    with pytest.raises(IngotError, match="exists already"):
        gguf.convert(path, tmp_path / "full")
    assert [entry.name for entry in (tmp_path / "full").iterdir()] == ["mine"]
    gguf.convert(path, tmp_path / "empty")
    assert (tmp_path / "empty" / "config.json").exists()


def test_full_disk_leaves_no_files(small: Small, tmp_path: Path) -> None:
    path = small()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))
    try:
        with pytest.raises(IngotError, match="cannot write") as raised:
            gguf.convert(path, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "make room" in raised.value.hint
    assert [entry.name for entry in tmp_path.iterdir()] == ["small.gguf"]


def test_insufficient_disk_space_raises_before_writing(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = small()
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(IngotError, match="not enough free space"):
        gguf.convert(path, tmp_path / "out")
    assert [entry.name for entry in tmp_path.iterdir()] == ["small.gguf"]


def test_progress_advances_by_twice_the_file_size(small: Small, tmp_path: Path) -> None:
    class Count:
        total = 0.0

        def advance(self, n: float = 1) -> None:
            self.total += n

        def describe(self, text: str) -> None:
            pass

    path, count = small(), Count()
    gguf.convert(path, tmp_path / "out", count)
    assert count.total == 2 * path.stat().st_size


def test_memory_does_not_depend_on_the_model_size(smollm2_gguf: Path, tmp_path: Path) -> None:
    """The largest tensor has 28 million elements: in float32 alone it would take 113 MB."""
    tracemalloc.start()
    gguf.convert(smollm2_gguf, tmp_path / "out")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 80e6


def test_smollm2_has_a_lineage(smollm2: Path, smollm2_gguf: Path) -> None:
    step = lineage.read(smollm2).steps[0]
    assert step["step"] == "import"
    assert step["source"] == smollm2_gguf.name
    assert step["sha256"] == models.SHA256
    assert step["size"] == smollm2_gguf.stat().st_size
    assert step["quantization"] == {"Q4_1": 210, "F32": 61, "Q8_0": 1}


def test_smollm2_has_the_config_of_its_publisher(smollm2: Path) -> None:
    config = json.loads((smollm2 / "config.json").read_text())
    assert (
        config
        | {
            "num_hidden_layers": 30,
            "hidden_size": 576,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "intermediate_size": 1536,
            "vocab_size": 49152,
            "rope_theta": 100000.0,
            "rms_norm_eps": 1e-05,
            "tie_word_embeddings": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        == config
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_smollm2_knows_the_capital_of_france(smollm2: Path, dtype: str) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    model = load(smollm2, dtype=dtype)
    with torch.no_grad():
        answer = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    text = tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :])
    assert text == "The capital of France is Paris.<|im_end|>"
