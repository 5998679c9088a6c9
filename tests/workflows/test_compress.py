from __future__ import annotations

import json
import logging
import signal
import struct
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ingot.compression import RoundToNearest
from ingot.core import lineage
from ingot.core.errors import IngotError
from ingot.interop import hf
from ingot.nn import Decoder
from ingot.nn.formats import Int4, Int8
from ingot.nn.quantized import QuantizedEmbedding, QuantizedLinear
from ingot.workflows.compress import compress
from ingot.workflows.llm import LLM
from tests import models


def test_the_directory_is_smaller_and_close(tmp_path: Path) -> None:
    small = models.small(tmp_path / "small")
    report = compress(small, tmp_path / "int8", Int8())
    assert report.quantized.bytes < 0.6 * report.original.bytes
    assert report.drift.kl_mean
    assert report.drift.kl_mean < 1e-3
    assert [step["step"] for step in lineage.read(tmp_path / "int8").steps] == ["compress"]
    decoder = hf.load(tmp_path / "int8")
    kinds = [type(module) for module in decoder.modules()]
    assert kinds.count(QuantizedLinear) == 4 * decoder.config.layers


def test_embedding_and_head_can_be_quantized_too(tmp_path: Path) -> None:
    small, format = models.small(tmp_path / "small"), Int4(group=32)
    reports = [
        compress(small, tmp_path / name, format, method=RoundToNearest(), embeddings=embeddings)
        for name, embeddings in (("layers", False), ("all", True))
    ]
    decoder = hf.load(tmp_path / "all")
    assert isinstance(decoder.tok_embed, QuantizedEmbedding)
    assert decoder.tok_embed.format == Int8(group=32)
    assert reports[1].quantized.bytes < reports[0].quantized.bytes
    # The heads differ, so that the same hidden states would not give the same distribution.
    assert reports[1].drift.kl_mean != reports[0].drift.kl_mean
    assert reports[1].original.perplexity == reports[0].original.perplexity


def test_sizes_are_those_of_the_files(tmp_path: Path) -> None:
    small = models.small(tmp_path / "small")
    report = compress(small, tmp_path / "int4", Int4(group=32), method=RoundToNearest())
    for path, figures in ((small, report.original), (tmp_path / "int4", report.quantized)):
        file = path / "model.safetensors"
        (header,) = struct.unpack("<Q", file.read_bytes()[:8])
        assert figures.bytes == file.stat().st_size - 8 - header
    assert report.original.bits_per_weight == 32
    # 4 bits, and a scale of 16 for each 32; the shapes of the weights are stored, too.
    assert 4.5 <= report.quantized.bits_per_weight < 4.55


def test_the_report_is_in_the_directory_and_in_its_lineage(tmp_path: Path) -> None:
    small = models.small(tmp_path / "small")
    report = compress(small, tmp_path / "int4", Int4(group=32))
    (step,) = lineage.read(tmp_path / "int4").steps
    facts = json.loads(json.dumps(asdict(report)))
    sensitivities = facts.pop("sensitivities")
    assert {key: step[key] for key in facts} == facts
    assert "sensitivities" not in step
    assert len(sensitivities) == 4 * hf.describe(small).config.layers
    names = {path.name for path in (tmp_path / "int4").iterdir()}
    assert {"report.html", "sensitivity.png", "sensitivity.svg"} <= names
    text = (tmp_path / "int4" / "report.html").read_text()
    assert all(cell in text for row in report.table() for cell in row)
    assert str(tmp_path / "int4") in text


def test_speeds_are_those_of_each_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def count_modules(decoders: list[Decoder]) -> list[dict[int, float]]:
        return [{1: 1 + sum(isinstance(m, QuantizedLinear) for m in d.modules())} for d in decoders]

    monkeypatch.setattr("ingot.workflows.compress.measure_decode_speeds", count_modules)
    small, out = models.small(tmp_path / "small"), tmp_path / "int8"
    report = compress(small, out, Int8(), method=RoundToNearest())
    assert report.original.tokens_per_s == {1: 1}
    assert report.quantized.tokens_per_s == {1: 1 + 4 * hf.describe(small).config.layers}


def test_a_failing_report_does_not_lose_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no fonts")

    monkeypatch.setattr("ingot.workflows.compress.write_page", fail)
    compress(models.small(tmp_path / "small"), tmp_path / "int8", Int8(), method=RoundToNearest())
    assert "no report: no fonts" in caplog.text
    assert lineage.read(tmp_path / "int8").steps[0]["original"]["bytes"] > 0


def test_perplexity_is_that_of_each_model(tmp_path: Path) -> None:
    small = models.small(tmp_path / "small")
    (tmp_path / "text.txt").write_text("Some text to compare two models on, which is not long.")
    options: Any = {"method": RoundToNearest(), "text": str(tmp_path / "text.txt")}
    report = compress(small, tmp_path / "int4", Int4(group=32), **options)
    for path, figures in ((small, report.original), (tmp_path / "int4", report.quantized)):
        expected = LLM(path).score((tmp_path / "text.txt").read_text()).perplexity
        assert figures.perplexity == pytest.approx(expected, rel=1e-5)
    assert report.original.perplexity != report.quantized.perplexity


def test_fewer_bits_cost_more(tmp_path: Path) -> None:
    small = models.small(tmp_path / "small")
    eight = compress(small, tmp_path / "int8", Int8())
    four = compress(small, tmp_path / "int4", Int4(group=32))
    assert four.quantized.bytes < eight.quantized.bytes
    assert four.drift.kl_mean
    assert eight.drift.kl_mean
    assert four.drift.kl_mean > 3 * eight.drift.kl_mean
    for coarse, fine in zip(four.sensitivities, eight.sensitivities, strict=True):
        assert coarse.relative_error > 3 * fine.relative_error > 0


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


@pytest.mark.parametrize("bits", [4.6, 5.5, 7.0])
def test_the_budget_is_never_exceeded(tmp_path: Path, bits: float) -> None:
    small, out = models.small(tmp_path / "small"), tmp_path / "mixed"
    options: Any = {"method": RoundToNearest(), "bits_per_weight": bits}
    report = compress(small, out, Int4(group=32), **options)
    # One of the 8 layers, of 8 % to 25 % of the weights, might not fit any more.
    assert bits - 1.2 < report.quantized.bits_per_weight <= bits
    formats = [m.format for m in hf.load(out).modules() if isinstance(m, QuantizedLinear)]
    assert len(formats) == 4 * hf.describe(small).config.layers
    assert set(formats) <= {Int4(group=32), Int8()}
    assert formats.count(Int8()) >= (1 if bits > 5 else 0)
    if bits > 5:
        assert f"{formats.count(Int8())} layers Int8" in report.format


@pytest.mark.parametrize(("format", "bits"), [(Int4(), 4.4), (Int8(), 9.0)])
def test_a_budget_without_a_choice_is_an_error(
    tmp_path: Path, format: Int4 | Int8, bits: float
) -> None:
    small = models.small(tmp_path / "small")
    with pytest.raises(IngotError, match="bits_per_weight"):
        compress(small, tmp_path / "out", format, bits_per_weight=bits)


def test_more_bits_cost_less(tmp_path: Path) -> None:
    small = models.small(tmp_path / "small")
    reports = [
        compress(small, tmp_path / str(bits), Int4(group=32), bits_per_weight=bits)
        for bits in (4.6, 6.5)
    ]
    assert reports[1].drift.kl_mean
    assert reports[0].drift.kl_mean
    assert reports[1].drift.kl_mean < reports[0].drift.kl_mean


_KILLED = """
import os, signal, sys
from pathlib import Path
from ingot.compression import resume
from ingot.nn.formats import Int4
from ingot.workflows.compress import compress

def kill_after(write):
    def write_and_die(path, content):
        write(path, content)
        if path.name == sys.argv[3]:
            os.kill(os.getpid(), signal.SIGKILL)
    return write_and_die

resume.write_file = kill_after(resume.write_file)
resume.write_atomic = kill_after(resume.write_atomic)
compress(sys.argv[1], sys.argv[2], Int4(group=32))
"""


@pytest.mark.parametrize("last_file", ["hidden-0.safetensors", "state.json", "block-1.safetensors"])
def test_a_killed_run_continues_with_the_same_result(
    tmp_path: Path, last_file: str, caplog: pytest.LogCaptureFixture
) -> None:
    small, out, whole = models.small(tmp_path / "small"), tmp_path / "out", tmp_path / "whole"
    command = [sys.executable, "-c", _KILLED, str(small), str(out), last_file]
    assert subprocess.run(command).returncode == -signal.SIGKILL
    assert not out.exists()
    assert (tmp_path / ".out.partial" / last_file).exists()
    caplog.set_level(logging.INFO)
    reports = [compress(small, directory, Int4(group=32)) for directory in (out, whole)]
    continued = caplog.text.count("continuing after block 1")
    assert continued == (0 if last_file == "hidden-0.safetensors" else 1)
    for name in ("model.safetensors", "config.json"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    # In float32, by as many threads as the process has.
    for one, other in zip(reports[0].sensitivities, reports[1].sensitivities, strict=True):
        assert (one.layer, one.kind) == (other.layer, other.kind)
        assert one.relative_error == pytest.approx(other.relative_error, rel=1e-4)
    assert not (tmp_path / ".out.partial").exists()
