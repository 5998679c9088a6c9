"""`explain` names planted faults first, and writes a page."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from ingot.core.errors import ConfigError
from ingot.workflows.explain import Machine, explain, load_target, write_page
from tests.fuse import slow_models

MACHINE = Machine(bandwidth=20.0, gflops={"float32": 100.0, "bfloat16": 300.0})
FILE = str(Path(slow_models.__file__))


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("float64", "arithmetic in float64; it begins at `mul` (slow_models.py:"),
        ("dense", "attention with a dense mask (slow_models.py:"),
        ("strided", "linear layers whose weight is not contiguous (slow_models.py:"),
    ],
)
def test_the_planted_cause_is_named_first(name: str, cause: str, tmp_path: Path) -> None:
    model, inputs = load_target(f"{FILE}:{name}", 1, 1)
    result = explain(model, inputs, MACHINE, name)
    assert cause in result.advice[0].text
    assert {group.name.split()[0] for group in result.groups} >= {"linear", "sdpa"}
    assert sum(group.share for group in result.groups) <= 1.0
    html = write_page(result, tmp_path / "page").read_text()
    assert result.advice[0].text.split(";")[0] in html
    assert "data:image/svg+xml" in html
    assert (tmp_path / "page" / "roofline.png").stat().st_size > 10_000


def test_a_healthy_model_has_no_fault() -> None:
    model, inputs = load_target(f"{FILE}:healthy", 1, 1)
    result = explain(model, inputs, MACHINE)
    assert not any(advice.is_fault for advice in result.advice)
    assert len(result.reports) == 1


def test_a_directory_of_transformers(tmp_path: Path) -> None:
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64, n_positions=32)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    model, (tokens,) = load_target(str(tmp_path), 2, 9)
    assert tokens.shape == (2, 9)
    with torch.no_grad():
        assert model(tokens)[0].shape == (2, 9, 64)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("absent.py:build", "absent.py is not a file"),
        (f"{FILE}:absent", "has no function absent"),
        (f"{FILE}:nothing", "returned int, not a model and its inputs"),
        ("absent", "neither a model directory nor file.py:function"),
    ],
)
def test_what_cannot_be_loaded_is_named(target: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_target(target, 1, 1)
