"""transformers is observed at the ops of our decoder, in every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ingot.core.errors import IngotError
from ingot.interop import hf, hf_probe
from ingot.workflows.compare import DecoderSide, TransformersSide, compare_sides

from .hf_models import MODELS, VOCABULARY

IDS = torch.randint(VOCABULARY, (60,), generator=torch.Generator().manual_seed(3)).tolist()


def save(name: str, directory: Path) -> Path:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(MODELS[name]())
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            is_norm = parameter.dim() == 1 and "bias" not in key
            parameter.normal_(1.0 if is_norm else 0.0, 0.2)
    model.save_pretrained(directory)
    return directory


def sides(directory: Path) -> tuple[DecoderSide, TransformersSide]:
    theirs = hf_probe.load(directory, torch.float32, "cpu")
    return DecoderSide(hf.load(directory), "ours"), TransformersSide(theirs)


@pytest.mark.parametrize("name", MODELS)
def test_every_op_of_every_family_is_compared(name: str, tmp_path: Path) -> None:
    ours, theirs = sides(save(name, tmp_path / name))
    seen: list[str] = []

    def visit(name: str, value: Tensor) -> None:
        seen.append(name)

    theirs.run(torch.tensor(IDS), visit)
    comparison = compare_sides(ours, theirs, IDS)
    assert sorted([*seen, "lm_head"]) == sorted(op.name for op in comparison.ops)
    # A wrong pair of results differs by about 1; float32 rounds at 1e-7.
    assert max(op.isolated_error for op in comparison.ops) < 2e-6  # see `rounding_error`
    assert max(op.error for op in comparison.ops) < 1e-4
    assert comparison.distribution.kl_mean is not None
    assert comparison.distribution.kl_mean < 1e-8
    assert comparison.first_difference is not None
    assert not comparison.outliers


PLANTED = {
    "norm": ("model.layers.1.input_layernorm", "blocks.1.attention_norm"),
    "q": ("model.layers.2.self_attn.q_proj", "blocks.2.attention.q"),
    "out": ("model.layers.0.self_attn.o_proj", "blocks.0.attention.out"),
    "gate": ("model.layers.1.mlp.gate_proj", "blocks.1.mlp.hidden"),
    "down": ("model.layers.2.mlp.down_proj", "blocks.2.mlp.down"),
}


@pytest.mark.parametrize("place", PLANTED)
def test_one_changed_weight_is_located(place: str, tmp_path: Path) -> None:
    ours, theirs = sides(save("smollm2", tmp_path / "model"))
    module, expected = PLANTED[place]
    with torch.no_grad():
        theirs.model.module.get_submodule(module).weight[5] += 0.01
    comparison = compare_sides(ours, theirs, IDS)
    assert [op.name for op, _ in comparison.outliers] == [expected]
    op = comparison.outliers[0][0]
    assert op.channel == 5


def test_a_changed_epsilon_is_located(tmp_path: Path) -> None:
    ours, theirs = sides(save("smollm2", tmp_path / "model"))
    theirs.model.module.model.layers[2].post_attention_layernorm.variance_epsilon = 1e-3
    comparison = compare_sides(ours, theirs, IDS)
    assert [op.name for op, _ in comparison.outliers] == ["blocks.2.mlp_norm"]


def test_a_changed_rope_is_located_to_the_rotation(tmp_path: Path) -> None:
    ours, theirs = sides(save("smollm2", tmp_path / "model"))
    theirs.model.module.model.rotary_emb.inv_freq *= 1.01
    comparison = compare_sides(ours, theirs, IDS)
    large = {op.kind for op in comparison.ops if op.isolated_error > 1e-4}
    assert large == {"attention.q_rope", "attention.k_rope"}


def test_attention_function_is_restored(tmp_path: Path) -> None:
    _, theirs = sides(save("smollm2", tmp_path / "model"))
    before = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def fail(name: str, value: Tensor) -> None:
        raise ArithmeticError(name)

    with pytest.raises(ArithmeticError):
        theirs.run(torch.tensor(IDS), fail)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is before
    theirs.run(torch.tensor(IDS), None)  # no hook is left


def test_missing_package_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_probe.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(IngotError, match=r"ingot\[transformers\]"):
        hf_probe.load(tmp_path, torch.float32, "cpu")
