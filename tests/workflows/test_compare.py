"""A model against itself, a changed copy, transformers, its own server and vLLM."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ingot
from ingot.core.errors import ConfigError, IngotError
from ingot.interop import hf, hf_probe
from ingot.interop.completions import PromptLogprobs
from ingot.interop.tokenizer import Tokenizer
from ingot.nn import Decoder, preset
from ingot.observe.drift import Comparison
from ingot.workflows.compare import (
    MAX_POSITIONS,
    DecoderSide,
    TransformersSide,
    compare_reported,
    compare_sides,
)
from tests import models
from tests.serving.conftest import serving

LAYERS = 4
Copy = Callable[..., Path]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in bfloat16 with a token for each byte."""
    path = models.small(tmp_path_factory.mktemp("model") / "small")
    (path / "model.safetensors").unlink()
    config = replace(preset("tiny"), layers=LAYERS, max_seq_len=256)
    hf.save(Decoder.from_config(config, seed=0, dtype=torch.bfloat16), path)
    return path


@pytest.fixture
def copy(directory: Path, tmp_path: Path) -> Copy:
    """Copy the model; a tensor may get another value in one row."""

    def make(tensor: str | None = None, row: int = 0, add: float = 0.0) -> Path:
        path = tmp_path / "copy"
        shutil.copytree(directory, path)
        if tensor is not None:
            tensors = load_file(path / "model.safetensors")
            tensors[tensor][row] += add
            save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return path

    return make


def outliers(comparison: Comparison) -> list[str]:
    return [op.name for op, _ in comparison.outliers]


def test_an_identical_copy_is_bitwise_equal(directory: Path, copy: Copy) -> None:
    found = ingot.compare(directory, copy(), tokens=100)
    assert found.bitwise_equal
    assert found.same_kernels
    assert len(found.ops) == LAYERS * 11 + 3
    assert all(op.error == op.isolated_error == op.channel_error == 0.0 for op in found.ops)
    drift = found.distribution
    assert (drift.positions, drift.kl_max, drift.tv_max, drift.logprob_max) == (100, 0.0, 0.0, 0.0)
    assert found.first_difference is None
    assert outliers(found) == []


PLANTED = {
    "model.embed_tokens.weight": ("embedding", "lm_head"),  # tied
    "model.layers.1.input_layernorm.weight": ("blocks.1.attention_norm",),
    "model.layers.0.self_attn.k_proj.weight": ("blocks.0.attention.k",),
    "model.layers.3.self_attn.o_proj.weight": ("blocks.3.attention.out",),
    "model.layers.2.mlp.up_proj.weight": ("blocks.2.mlp.hidden",),
    "model.layers.2.mlp.down_proj.weight": ("blocks.2.mlp.down",),
    "model.norm.weight": ("norm",),
}


@pytest.mark.parametrize("tensor", PLANTED)
def test_a_changed_weight_is_located_to_the_op(tensor: str, directory: Path, copy: Copy) -> None:
    row = ord("e") - ord("!") if "embed" in tensor else 7  # a byte that the text has
    found = ingot.compare(directory, copy(tensor, row=row, add=0.5), tokens=64)
    expected = PLANTED[tensor]
    assert [op.name for op in found.ops if not op.isolated_bitwise_equal] == list(expected)
    assert sorted(outliers(found)) == sorted(expected)
    assert found.first_difference is not None
    assert found.first_difference.name == expected[0]
    if expected == ("blocks.2.mlp.down",):
        assert found.first_difference.channel == 7
        errors = {op.name: op.error for op in found.ops}
        assert errors["blocks.2.mlp.hidden"] == 0.0
        assert errors["blocks.3.mlp.down"] > 0.0  # it spreads
    assert not found.bitwise_equal
    assert found.distribution.kl_mean


def test_a_changed_epsilon_of_one_norm_is_located(directory: Path) -> None:
    first, second = (hf.load(directory) for _ in range(2))
    second.blocks[2].mlp_norm.eps = 1e-2  # pyright: ignore
    ids = list(range(40))
    found = compare_sides(DecoderSide(first, "a"), DecoderSide(second, "b"), ids)
    assert outliers(found) == ["blocks.2.mlp_norm"]


def test_transformers_differs_by_rounding(directory: Path) -> None:
    found = ingot.compare(directory, "transformers", tokens=100)
    assert not found.bitwise_equal
    assert not found.same_kernels
    assert "transformers" in found.other
    assert "bfloat16" in found.other
    eps = torch.finfo(torch.bfloat16).eps
    assert all(op.isolated_error < eps for op in found.ops)
    assert outliers(found) == []
    wide = ingot.compare(directory, "transformers", tokens=100, dtype="float32")
    assert wide.dtype == "float32"
    assert wide.distribution.kl_mean is not None
    assert found.distribution.kl_mean is not None
    assert wide.distribution.kl_mean < found.distribution.kl_mean / 100


def test_a_changed_weight_of_transformers_is_located(directory: Path, copy: Copy) -> None:
    changed = copy("model.layers.2.mlp.down_proj.weight", row=7, add=0.5)
    theirs = hf_probe.load(changed, torch.bfloat16, "cpu")
    ours = DecoderSide(hf.load(directory), "ours")
    found = compare_sides(ours, TransformersSide(theirs), list(range(100)))
    assert outliers(found) == ["blocks.2.mlp.down"]
    assert found.outliers[0][0].channel == 7


def test_its_own_server_reports_the_same_bits(directory: Path, tmp_path: Path) -> None:
    with serving(directory, tmp_path) as served:
        same = ingot.compare(directory, served.url, tokens=100)
    assert same.bitwise_equal
    assert (same.distribution.logprob_max, same.distribution.kl_max) == (0.0, 0.0)
    assert same.distribution.argmax_agreement == 1.0
    assert same.distribution.is_lower_bound
    assert same.ops == ()
    assert same.note


def test_reported_logprobs_of_another_model_differ(directory: Path) -> None:
    decoder, tokenizer = hf.load(directory), Tokenizer.load(directory)
    ids = tokenizer.encode("Hello world")
    count = len(ids) - 1
    half = PromptLogprobs(
        model="x",
        logprobs=(math.log(0.5),) * count,
        top=({"H": math.log(0.5), "no such token": -5.0},) * count,
    )
    found = compare_reported(DecoderSide(decoder, "ours"), half, tokenizer, ids, "http://x")
    assert not found.bitwise_equal
    assert found.distribution.positions == count
    assert (found.distribution.kl_mean or 0) > 0.1
    assert found.distribution.within_5_percent == 0.0


def test_other_architectures_are_compared_by_distribution(directory: Path, tmp_path: Path) -> None:
    other = models.small(tmp_path / "other")  # fewer layers, float32
    found = ingot.compare(directory, other, tokens=30)
    assert found.ops == ()
    assert "architectures" in (found.note or "")
    assert found.distribution.kl_mean


def test_another_vocabulary_is_an_error(directory: Path, tmp_path: Path) -> None:
    other = models.gpt2(tmp_path / "gpt2")
    with pytest.raises(IngotError, match="vocabularies of 256 and 211"):
        ingot.compare(directory, other, tokens=30)


def test_text_and_length_are_bounded(directory: Path, copy: Copy) -> None:
    other = copy()
    found = ingot.compare(directory, other, text="abcdef", tokens=100)
    assert len(found.token_ids) == 6
    assert found.distribution.positions == 5
    full = ingot.compare(directory, other, text="long " * 100, tokens=MAX_POSITIONS)
    assert len(full.token_ids) == 255, "the context of the model"
    with pytest.raises(ConfigError, match="at least 2 tokens"):
        ingot.compare(directory, other, text="a")
    for tokens in (0, MAX_POSITIONS + 1):
        with pytest.raises(ConfigError, match="tokens"):
            ingot.compare(directory, other, tokens=tokens)


def test_missing_models_and_engines_are_errors(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(IngotError, match="not found"):
        ingot.compare(directory, tmp_path / "missing")
    with pytest.raises(IngotError, match="vLLM is not installed") as error:
        ingot.compare(directory, "vllm")
    assert "--python" in error.value.hint
    with pytest.raises(IngotError, match="vLLM did not run"):
        ingot.compare(directory, "vllm", python=tmp_path / "python")
    with pytest.raises(IngotError, match="No module named 'vllm'"):
        ingot.compare(directory, "vllm", python=sys.executable)


@pytest.mark.slow
def test_the_real_model_is_close_to_transformers(smollm2: Path) -> None:
    """Figures of docs/compare.md, with room for another ISA tier."""
    found = ingot.compare(smollm2, "transformers", tokens=64)
    drift = found.distribution
    assert drift.kl_mean is not None
    assert 1e-5 < drift.kl_mean < 1e-2
    assert drift.argmax_agreement is not None
    assert drift.argmax_agreement > 0.9
    assert len(found.ops) == 30 * 11 + 3
    assert outliers(found) == []
