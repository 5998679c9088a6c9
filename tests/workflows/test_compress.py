from __future__ import annotations

from pathlib import Path

import pytest

from ingot.core import lineage
from ingot.core.errors import IngotError
from ingot.interop import hf
from ingot.nn.formats import Int4, Int8
from ingot.nn.quantized import QuantizedLinear
from ingot.workflows.compress import compress
from ingot.workflows.llm import LLM
from tests import models


def test_the_directory_is_smaller_and_close(tmp_path: Path) -> None:
    small = models.small(tmp_path / "small")
    report = compress(small, tmp_path / "int8", Int8())
    assert report.bytes_after < 0.6 * report.bytes_before
    assert report.drift.kl_mean
    assert report.drift.kl_mean < 1e-3
    assert [step["step"] for step in lineage.read(tmp_path / "int8").steps] == ["compress"]
    decoder = hf.load(tmp_path / "int8")
    kinds = [type(module) for module in decoder.modules()]
    assert kinds.count(QuantizedLinear) == 4 * decoder.config.layers


def test_fewer_bits_cost_more(tmp_path: Path) -> None:
    small = models.small(tmp_path / "small")
    eight = compress(small, tmp_path / "int8", Int8())
    four = compress(small, tmp_path / "int4", Int4(group=32))
    assert four.bytes_after < eight.bytes_after
    assert four.drift.kl_mean
    assert eight.drift.kl_mean
    assert four.drift.kl_mean > 3 * eight.drift.kl_mean


def test_what_is_generated_does_not_depend_on_the_batch(tmp_path: Path) -> None:
    small = models.small(tmp_path / "small")
    compress(small, tmp_path / "int4", Int4(group=32, zero_point=True))
    llm = LLM(tmp_path / "int4")
    prompts = ["one", "two words", "three of them"]
    together = [out.text for out in llm.generate(prompts, max_tokens=12)]
    assert together == [llm.generate([prompt], max_tokens=12)[0].text for prompt in prompts]


def test_a_quantized_model_is_not_quantized_again(tmp_path: Path) -> None:
    small = models.small(tmp_path / "small")
    compress(small, tmp_path / "int8", Int8())
    with pytest.raises(IngotError, match="already"):
        compress(tmp_path / "int8", tmp_path / "int4", Int4())
    assert not (tmp_path / "int4").exists()
