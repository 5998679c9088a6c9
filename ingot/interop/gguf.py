"""Convert GGUF files to Hugging Face directories.

    convert(Path("SmolLM2-135M-Instruct.Q4_1.gguf"), Path("smollm2"))

writes config.json, model*.safetensors, tokenizer.json, tokenizer_config.json,
generation_config.json and ingot.json: ingot's native format.

**Quantized tensors stay quantized** if `ingot.interop.gguf_blocks` has a format for their type, and
if layers that are computed together (q, k and v; gate and up) have the same one. All others become
bfloat16, including norms, as publishers write them: `from_pretrained` expects a directory of one
dtype. Without `keep_quantized`, every tensor becomes bfloat16, and transformers loads the result.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ingot.core import lineage, paths
from ingot.core.log import Progress
from ingot.interop import gguf_file, gguf_vocabulary
from ingot.interop.compressed_tensors import COMPRESSED_TENSORS, write_scheme
from ingot.interop.gguf_blocks import common_format
from ingot.interop.gguf_file import GgufError, GgufFile, GgufTensor, damaged_error
from ingot.interop.gguf_weights import TargetTensor, dequantize, read_rows, write_weights
from ingot.interop.quantization_scheme import KEY, describe_layers

Expected = dict[str, tuple[str, tuple[int, ...]]]

TYPES = frozenset(
    {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"}
    | {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"}
)
MAX_LAYERS = 1024
MAX_HEADS = 1 << 16
MAX_POSITIONS = 1 << 31

_EMBEDDING = "model.embed_tokens"
_STACKED = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Properties of a `general.architecture`."""

    model_type: str
    class_name: str
    interleaved: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False


ARCHITECTURES = {
    # Mistral uses this architecture, too.
    "llama": Architecture(model_type="llama", class_name="LlamaForCausalLM", interleaved=True),
    "qwen2": Architecture(model_type="qwen2", class_name="Qwen2ForCausalLM", qkv_bias=True),
    "qwen3": Architecture(model_type="qwen3", class_name="Qwen3ForCausalLM", qk_norm=True),
}


@dataclass(frozen=True, kw_only=True)
class Dimensions:
    """Sizes that determine the shapes of the tensors."""

    layers: int
    dim: int
    ffn_dim: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    tie_embeddings: bool


def convert(
    source: Path, directory: Path, progress: Progress | None = None, *, keep_quantized: bool = True
) -> None:
    """Write the model in the GGUF file `source` as a Hugging Face directory.

    The directory appears when it is complete. `progress` advances by twice the bytes of the
    file: once for its hash, once for its tensors.
    """
    file = gguf_file.read(source)
    name = file.require("general.architecture", str)
    if name not in ARCHITECTURES:
        raise GgufError(
            f"{source.name}: unsupported architecture '{name[:64]}'",
            hint=f"import a model with one of these architectures: {', '.join(ARCHITECTURES)}",
        )
    architecture = ARCHITECTURES[name]
    sizes = _dimensions(file, name)
    targets = _targets(file, architecture, sizes)
    if keep_quantized:
        targets = _with_formats(targets)
    documents = {
        "config.json": _config(file, name, architecture, sizes) | _quantization_config(targets),
        **gguf_vocabulary.documents(file, sizes.vocab_size),
    }
    needed = sum(target.num_bytes for target in targets)
    with paths.atomic_directory(directory, needed) as temporary:
        digest = _sha256(file, progress)
        write_weights(file, targets, temporary, progress)
        for document, content in documents.items():
            text = content if isinstance(content, str) else json.dumps(content, indent=2) + "\n"
            (temporary / document).write_text(text, encoding="utf-8")
        lineage.append(
            temporary,
            "import",
            source=source.name,
            sha256=digest,
            size=file.num_bytes,
            quantization=dict(Counter(target.source.type for target in targets).most_common()),
            kept=sum(target.format is not None for target in targets),
        )


def _dimensions(file: GgufFile, name: str) -> Dimensions:
    def count(key: str, limit: int, default: int | None = None) -> int:
        full = f"{name}.{key}"
        value = file.require(full, int) if default is None else file.get(full, int, default)
        if not 1 <= value <= limit:
            raise damaged_error(file.path, f"its key '{full}' is {value}")
        return value

    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise damaged_error(file.path, "it has no embedding 'token_embd.weight' of two dimensions")
    if file.get(f"{name}.expert_count", int, 0):
        raise GgufError(
            f"{file.path.name}: mixtures of experts are not supported",
            hint="import the model from its Hugging Face directory",
        )
    hidden = count("embedding_length", 1 << 20)
    heads = count("attention.head_count", MAX_HEADS)
    head = count("attention.key_length", 1 << 16, hidden // heads or 1)
    sizes = Dimensions(
        layers=count("block_count", MAX_LAYERS),
        dim=hidden,
        ffn_dim=count("feed_forward_length", 1 << 24),
        heads=heads,
        kv_heads=count("attention.head_count_kv", MAX_HEADS, heads),
        head_dim=head,
        vocab_size=embedding.shape[0],
        tie_embeddings="output.weight" not in file.tensors,
    )
    if heads % sizes.kv_heads or hidden % heads or head % 2:
        raise damaged_error(
            file.path,
            f"{heads} heads, {sizes.kv_heads} key-value heads and head dim {head} are inconsistent",
        )
    if count("attention.value_length", 1 << 16, head) != head:
        raise GgufError(
            f"{file.path.name}: key and value heads of different width are not supported",
            hint="import the model from its Hugging Face directory",
        )
    if count("rope.dimension_count", 1 << 16, head) != head:
        raise GgufError(
            f"{file.path.name}: partial rotary embeddings are not supported",
            hint="import the model from its Hugging Face directory",
        )
    return sizes


def _targets(file: GgufFile, architecture: Architecture, sizes: Dimensions) -> list[TargetTensor]:
    """Match the tensors of the file with those of the model; raise if any differ."""
    expected = _expected(architecture, sizes)
    targets: list[TargetTensor] = []
    for name, (theirs, shape) in expected.items():
        tensor = file.tensors.get(name)
        if tensor is None:
            raise damaged_error(file.path, f"its tensor '{name}' is missing")
        if tensor.shape != shape:
            raise damaged_error(
                file.path, f"its tensor '{name}' has the shape {tensor.shape}, expected {shape}"
            )
        _check_type(file, tensor)
        interleaved = architecture.interleaved and name.endswith(("attn_q.weight", "attn_k.weight"))
        head = sizes.head_dim if interleaved else None
        targets.append(TargetTensor(name=theirs, source=tensor, rope_head_dim=head))
    if unknown := sorted(set(file.tensors) - {"rope_freqs.weight"} - set(expected)):
        raise GgufError(
            f"{file.path.name} has tensors that are not supported: {', '.join(unknown[:4])}",
            hint="import the model from its Hugging Face directory",
        )
    return targets


def _with_formats(targets: list[TargetTensor]) -> list[TargetTensor]:
    """Add the formats of the weights that stay quantized."""
    types: dict[str, list[str]] = defaultdict(list)
    for target in targets:
        types[_together(target.name)].append(target.source.type)
    return [
        replace(target, format=common_format(types[_together(target.name)]))
        if len(target.source.shape) == 2
        else target
        for target in targets
    ]


def _together(name: str) -> str:
    """Return the same key for weights that are computed together."""
    return re.sub(r"(q|k|v|gate|up)_proj.weight$", lambda m: _STACKED[m[1]], name)


def _quantization_config(targets: list[TargetTensor]) -> dict[str, Any]:
    layers = {t.name.removesuffix(".weight"): t.format for t in targets if len(t.source.shape) == 2}
    embeddings = {_EMBEDDING: layers.pop(_EMBEDDING)}
    # Without a layer of this name, the embedding is the LM head.
    scheme = describe_layers({"lm_head": None, **layers}, embeddings, COMPRESSED_TENSORS)
    return {KEY: write_scheme(scheme)} if scheme else {}


def _check_type(file: GgufFile, tensor: GgufTensor) -> None:
    if tensor.type not in TYPES:
        raise GgufError(
            f"{file.path.name}: '{tensor.name}' has the unsupported type {tensor.type}",
            hint=f"import a variant of the model with these types: {', '.join(sorted(TYPES))}",
        )


def _expected(architecture: Architecture, sizes: Dimensions) -> Expected:
    """Return the tensors the model has: GGUF's name to Hugging Face's name and the shape."""
    hidden, ffn = sizes.dim, sizes.ffn_dim
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    block: Expected = {
        "attn_norm.weight": ("input_layernorm.weight", (hidden,)),
        "attn_q.weight": ("self_attn.q_proj.weight", (queries, hidden)),
        "attn_k.weight": ("self_attn.k_proj.weight", (keys, hidden)),
        "attn_v.weight": ("self_attn.v_proj.weight", (keys, hidden)),
        "attn_output.weight": ("self_attn.o_proj.weight", (hidden, queries)),
        "ffn_norm.weight": ("post_attention_layernorm.weight", (hidden,)),
        "ffn_gate.weight": ("mlp.gate_proj.weight", (ffn, hidden)),
        "ffn_up.weight": ("mlp.up_proj.weight", (ffn, hidden)),
        "ffn_down.weight": ("mlp.down_proj.weight", (hidden, ffn)),
    }
    if architecture.qkv_bias:
        block["attn_q.bias"] = ("self_attn.q_proj.bias", (queries,))
        block["attn_k.bias"] = ("self_attn.k_proj.bias", (keys,))
        block["attn_v.bias"] = ("self_attn.v_proj.bias", (keys,))
    if architecture.qk_norm:
        block["attn_q_norm.weight"] = ("self_attn.q_norm.weight", (sizes.head_dim,))
        block["attn_k_norm.weight"] = ("self_attn.k_norm.weight", (sizes.head_dim,))
    vocabulary = (sizes.vocab_size, hidden)
    expected: Expected = {"token_embd.weight": ("model.embed_tokens.weight", vocabulary)}
    for layer in range(sizes.layers):
        for ours, (theirs, shape) in block.items():
            expected[f"blk.{layer}.{ours}"] = (f"model.layers.{layer}.{theirs}", shape)
    expected["output_norm.weight"] = ("model.norm.weight", (hidden,))
    if not sizes.tie_embeddings:
        expected["output.weight"] = ("lm_head.weight", vocabulary)
    return expected


def _config(
    file: GgufFile, name: str, architecture: Architecture, sizes: Dimensions
) -> dict[str, Any]:
    positions = file.get(f"{name}.context_length", int, 2048)
    if not 1 <= positions <= MAX_POSITIONS:
        raise damaged_error(file.path, f"its context_length is {positions}")
    if file.get(f"{name}.attention.sliding_window", int, 0):
        raise GgufError(
            f"{file.path.name}: sliding-window attention is not supported in GGUF files",
            hint="import the model from its Hugging Face directory",
        )
    theta = _real(file, f"{name}.rope.freq_base", 10000.0)
    return {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.dim,
        "intermediate_size": sizes.ffn_dim,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": positions,
        "rms_norm_eps": _real(file, f"{name}.attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(file, name, theta, sizes.head_dim),
        "tie_word_embeddings": sizes.tie_embeddings,
        "torch_dtype": "bfloat16",
        **gguf_vocabulary.special_ids(file, sizes.vocab_size),
    }


def _real(file: GgufFile, key: str, default: float | None = None) -> float:
    value = file.require(key, float) if default is None else file.get(key, float, default)
    if not math.isfinite(value) or value <= 0:
        raise damaged_error(file.path, f"its key '{key}' is {value}")
    # Stored in 32 bits: 9.999999747378752e-06 was 1e-05 originally.
    return float(str(np.float32(value)))


def _rope_scaling(file: GgufFile, name: str, theta: float, head: int) -> dict[str, Any] | None:
    kind = file.get(f"{name}.rope.scaling.type", str, "none")
    if "rope_freqs.weight" in file.tensors:
        return _llama3_scaling(file, theta, head)
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": _real(file, f"{name}.rope.scaling.factor")}
    if kind == "linear":
        return scaling
    original = file.get(f"{name}.rope.scaling.original_context_length", int, 0)
    if kind == "yarn" and 1 <= original <= MAX_POSITIONS:
        return {**scaling, "original_max_position_embeddings": original}
    raise GgufError(
        f"{file.path.name}: unsupported RoPE scaling '{kind[:64]}'",
        hint="import the model from its Hugging Face directory",
    )


def _llama3_scaling(file: GgufFile, theta: float, head: int) -> dict[str, Any]:
    """Recover the RoPE scaling from the frequency factors of a file.

    llama.cpp's converter stores the factors and drops the parameters they were computed from. All
    Llama 3 models share these parameters except `factor`, the largest factor; that is checked.
    """
    tensor = file.tensors["rope_freqs.weight"]
    if tensor.shape != (head // 2,) or tensor.type != "F32":
        raise damaged_error(file.path, "'rope_freqs.weight' does not match the head dim")
    with file.path.open("rb") as stream:
        factors = dequantize(read_rows(file, stream, tensor, 0, 1), tensor)[0]
    factor, low, high, original = float(factors.max()), 1.0, 4.0, 8192
    frequency = 1.0 / theta ** (np.arange(0, head, 2) / head)
    rotations = original * frequency / (2 * math.pi)
    smooth = np.clip((rotations - low) / (high - low), 0, 1)
    if not np.allclose(factors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-3):
        raise GgufError(
            f"{file.path.name}: RoPE frequency factors differ from those of Llama 3",
            hint="import the model from its Hugging Face directory",
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _sha256(file: GgufFile, progress: Progress | None) -> str:
    digest = hashlib.sha256()
    if progress:
        progress.describe("hashing")
    with file.path.open("rb") as stream:
        while chunk := stream.read(1 << 22):
            digest.update(chunk)
            if progress:
                progress.advance(len(chunk))
    return digest.hexdigest()
