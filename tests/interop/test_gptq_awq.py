from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file

from ingot.core.errors import ConfigError
from ingot.interop import hf
from ingot.interop.gptq_awq import AWQ, GPTQ_V1, GPTQ_V2, read_awq, read_gptq
from ingot.interop.quantization_scheme import Layout
from ingot.nn import BatchLayout, Decoder, preset
from ingot.nn.formats import Int4
from ingot.nn.weights import SINGLE

Ints = npt.NDArray[np.int64]
GROUP, ROWS, CHANNELS = 32, 16, 64
NATURAL, AWQ_ORDER = range(8), (0, 2, 4, 6, 1, 3, 5, 7)


def pack_columns(values: Ints, order: Any = NATURAL) -> torch.Tensor:
    """Pack 8 columns into a word, as AutoGPTQ and AutoAWQ do: `order[i]` is in the i-th 4 bits."""
    words = np.zeros((values.shape[0], values.shape[1] // 8), np.uint32)
    for word in range(words.shape[1]):
        for i, column in enumerate(order):
            words[:, word] |= values[:, 8 * word + column].astype(np.uint32) << np.uint32(4 * i)
    return torch.from_numpy(words.view(np.int32))


def stored(method: str, q_ND: Ints, zero_NG: Ints, scale_NG: torch.Tensor) -> dict[str, Any]:
    """Return the tensors of a layer in a checkpoint."""
    tensors = {"scales": scale_NG.T.contiguous()}
    if method == "awq":
        tensors["qweight"] = pack_columns(q_ND.T, AWQ_ORDER)
        tensors["qzeros"] = pack_columns(zero_NG.T, AWQ_ORDER)
        return tensors
    tensors["qweight"] = pack_columns(q_ND).T.contiguous()
    tensors["qzeros"] = pack_columns(zero_NG.T - (1 if method == "gptq" else 0))
    tensors["g_idx"] = (torch.arange(q_ND.shape[1]) // GROUP).int()
    return tensors


LAYOUTS = {"gptq": GPTQ_V1, "gptq_v2": GPTQ_V2, "awq": AWQ}
each_layout = pytest.mark.parametrize(("method", "layout"), LAYOUTS.items(), ids=LAYOUTS)


@each_layout
def test_a_layer_decodes_to_scale_times_integer_minus_zero_point(
    method: str, layout: Layout
) -> None:
    rng = np.random.default_rng(0)
    q, zero = rng.integers(0, 16, (ROWS, CHANNELS)), rng.integers(1, 16, (ROWS, CHANNELS // GROUP))
    scale = torch.rand(ROWS, CHANNELS // GROUP).half()
    format = Int4(group=GROUP, zero_point=True, scale_dtype=torch.float16)
    tensors = stored(method, q, zero, scale)
    for name, (shape, dtype) in layout.tensor_shapes(format, ROWS, CHANNELS).items():
        assert tuple(tensors[name].shape) == shape
        assert dtype in (None, tensors[name].dtype)
    expected = scale.float().numpy().repeat(GROUP, 1) * (q - zero.repeat(GROUP, 1))
    found = format.decode(layout.unpack(format, tensors, "layer"))
    assert np.array_equal(found.numpy(), expected.astype(np.float32))


CONFIGS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False},
    "gptq_v2": {
        **{"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False},
        "checkpoint_format": "gptq_v2",
    },
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True},
}


def write_checkpoint(method: str, directory: Path) -> dict[str, torch.Tensor]:
    """Save a tiny model as a checkpoint of a method; return the values of its layers."""
    decoder = Decoder.from_config(preset("tiny"), seed=0, dtype=torch.bfloat16)
    hf.save(decoder, directory)
    tensors = load_file(directory / SINGLE)
    values: dict[str, torch.Tensor] = {}
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        weight = tensors.pop(name).float()
        grid = Int4(group=GROUP, zero_point=True, scale_dtype=torch.float16).grid(weight)
        q, zero = grid.round(weight), grid.zero_NG.clamp(min=1)
        layer = name.removesuffix(".weight")
        values[layer] = grid._replace(zero_NG=zero).decode(q)
        parts = stored(
            method, q.numpy().astype(np.int64), zero.numpy().astype(np.int64), grid.scale_NG.half()
        )
        tensors |= {f"{layer}.{suffix}": tensor for suffix, tensor in parts.items()}
    save_file(tensors, directory / SINGLE, metadata={"format": "pt"})
    config = directory / "config.json"
    raw = json.loads(config.read_text()) | {"quantization_config": CONFIGS[method]}
    config.write_text(json.dumps(raw))
    return values


@pytest.mark.parametrize("method", CONFIGS)
def test_a_checkpoint_loads_and_is_saved_in_our_layout(method: str, tmp_path: Path) -> None:
    values = write_checkpoint(method, tmp_path / "theirs")
    decoder = hf.load(tmp_path / "theirs")
    down: Any = decoder.get_submodule("blocks.1.mlp.down")
    assert torch.equal(down.format.decode(down.get()), values["model.layers.1.mlp.down_proj"])
    qkv: Any = decoder.get_submodule("blocks.0.attention.qkv")
    parts = [values[f"model.layers.0.self_attn.{name}_proj"] for name in "qkv"]
    assert torch.equal(qkv.format.decode(qkv.get()), torch.cat(parts))
    hf.save(decoder, tmp_path / "ours")
    loaded, (tokens, layout) = (
        hf.load(tmp_path / "ours"),
        (torch.arange(9), BatchLayout.packed([9])),
    )
    with torch.inference_mode():
        assert torch.equal(loaded(tokens, layout), decoder(tokens, layout))


def test_groups_out_of_order_raise(tmp_path: Path) -> None:
    write_checkpoint("gptq", tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    tensors["model.layers.0.mlp.down_proj.g_idx"] = tensors[
        "model.layers.0.mlp.down_proj.g_idx"
    ].flip(0)
    save_file(tensors, tmp_path / SINGLE, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="desc_act"):
        hf.load(tmp_path)


def test_zero_points_of_a_symmetric_checkpoint_must_be_8() -> None:
    scheme = read_gptq({"bits": 4, "group_size": GROUP, "sym": True})
    assert scheme.format_of("model.layers.0.mlp.down_proj") == Int4(group=GROUP)
    format = Int4(group=GROUP, scale_dtype=torch.float16)
    q, eights = np.full((ROWS, CHANNELS), 3), np.full((ROWS, CHANNELS // GROUP), 8)
    scale = torch.ones(ROWS, CHANNELS // GROUP).half()
    unpacked = GPTQ_V1.unpack(format, stored("gptq", q, eights, scale), "layer")
    assert bool((format.decode(unpacked) == -5).all())
    eights[3, 1] = 9
    with pytest.raises(ConfigError, match="sym is true"):
        GPTQ_V1.unpack(format, stored("gptq", q, eights, scale), "layer")


@pytest.mark.parametrize(
    ("read", "changes"),
    [
        (read_gptq, {"bits": 3}),
        (read_gptq, {"bits": None}),
        (read_gptq, {"group_size": -1}),
        (read_gptq, {"group_size": 0}),
        (read_gptq, {"checkpoint_format": "marlin"}),
        (read_awq, {"bits": 8}),
        (read_awq, {"version": "gemv"}),
        (read_awq, {"zero_point": False}),
        (read_awq, {"group_size": "128"}),
        (read_awq, {"modules_to_not_convert": ["model.layers.0"]}),
    ],
)
def test_unsupported_checkpoints_raise(read: Any, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        read({"bits": 4, "group_size": GROUP, **changes})


@each_layout
def test_scales_that_are_not_finite_raise(method: str, layout: Layout) -> None:
    q, zero = np.full((ROWS, CHANNELS), 3), np.full((ROWS, CHANNELS // GROUP), 8)
    scale = torch.full((ROWS, CHANNELS // GROUP), float("inf")).half()
    with pytest.raises(ConfigError, match="not finite"):
        layout.unpack(Int4(group=GROUP), stored(method, q, zero, scale), "layer")
