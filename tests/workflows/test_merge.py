"""Merging: the weights, the files, the lineage, and what it costs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ingot.core import lineage
from ingot.core.errors import ConfigError, IngotError
from ingot.interop import hf, peft
from ingot.workflows.derive import POSITIONS
from ingot.workflows.llm import LLM
from ingot.workflows.merge import merge
from tests import adapters, models


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return models.small(tmp_path / "small")


def save_adapter(base: Path, directory: Path, named: str | None = None) -> peft.Adapter:
    adapter = adapters.adapter(hf.load(base), seed=1)
    adapter.config["base_model_name_or_path"] = named
    peft.save(adapter, directory)
    return adapter


def in_bfloat16(base: Path, directory: Path) -> Path:
    hf.save(hf.load(base, torch.bfloat16), directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((base / name).read_bytes())
    return directory


def test_the_merged_model_is_a_model_directory(base: Path, tmp_path: Path) -> None:
    adapter = save_adapter(base, tmp_path / "adapter")
    lineage.append(base, "import", source="x")
    report = merge(tmp_path / "adapter", tmp_path / "merged", base=base)
    merged, adapted = LLM(tmp_path / "merged"), LLM(base, adapters={"a": tmp_path / "adapter"})
    ours = merged.generate("Hello", max_tokens=20)
    assert ours.token_ids == adapted.generate("Hello", max_tokens=20, adapter="a").token_ids
    assert ours.token_ids != adapted.generate("Hello", max_tokens=20).token_ids
    expected = hf.load(base)
    peft.merge_(expected, adapter)
    for name, parameter in hf.load(tmp_path / "merged").named_parameters():
        assert torch.equal(parameter, expected.get_parameter(name))
    steps = lineage.read(tmp_path / "merged").steps
    assert [step["step"] for step in steps] == ["import", "merge"]
    assert steps[1]["adapter"] == adapter.digest == report.adapter
    assert steps[1]["base"] == "small"
    assert steps[1]["drift"]["kl_mean"] == report.drift.kl_mean


def test_the_cost_of_merging_is_that_of_rounding(base: Path, tmp_path: Path) -> None:
    """In float32 it is none; in bfloat16 it is there, and small."""
    save_adapter(base, tmp_path / "adapter")
    reports = [
        merge(tmp_path / "adapter", tmp_path / f"merged-{one.name}", base=one)
        for one in (base, in_bfloat16(base, tmp_path / "rounded"))
    ]
    for report in reports:
        assert report.drift.positions == POSITIONS
        assert (report.rank, report.layers) == (4, 14)
    exact, rounded = (report.drift for report in reports)
    assert exact.kl_max is not None
    assert rounded.kl_mean is not None
    assert exact.kl_max < 1e-9
    assert 1e-8 < rounded.kl_mean < 1e-2
    assert exact.argmax_agreement == 1.0


def test_the_base_is_named_by_the_adapter_or_given(base: Path, tmp_path: Path) -> None:
    save_adapter(base, tmp_path / "named", named=str(base))
    merge(tmp_path / "named", tmp_path / "merged")
    save_adapter(base, tmp_path / "nameless")
    with pytest.raises(ConfigError, match="does not name its base"):
        merge(tmp_path / "nameless", tmp_path / "other")
    with pytest.raises(IngotError, match="exists already"):
        merge(tmp_path / "named", tmp_path / "merged")


def test_text_may_be_a_file(base: Path, tmp_path: Path) -> None:
    save_adapter(base, tmp_path / "adapter")
    (tmp_path / "text.txt").write_text("A short text.")
    report = merge(
        tmp_path / "adapter", tmp_path / "merged", base=base, text=str(tmp_path / "text.txt")
    )
    assert report.drift.positions == len("A short text.")
