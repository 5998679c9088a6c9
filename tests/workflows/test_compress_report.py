from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ingot.compression import LayerSensitivity
from ingot.observe import plot
from ingot.observe.drift import DistributionMeter
from ingot.workflows.compress_report import CompressReport, ModelFigures, write_page
from tests.observe.parsed_html import ParsedHtml

KINDS = ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")


def report() -> CompressReport:
    meter = DistributionMeter()
    logits_TV = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    meter.add(logits_TV, 1.5 * logits_TV.flip(0), torch.zeros(50, dtype=torch.long))
    speeds = ({1: 10.0, 8: 1234.5}, {1: 25.0, 8: 2469.0})
    return CompressReport(
        format="Int4",
        method="<GPTQ>",
        original=ModelFigures(
            bytes=2_000_000, bits_per_weight=16.0, perplexity=8.0, tokens_per_s=speeds[0]
        ),
        quantized=ModelFigures(
            bytes=500_000, bits_per_weight=4.625, perplexity=10.0, tokens_per_s=speeds[1]
        ),
        drift=meter.result(),
        sensitivities=tuple(
            LayerSensitivity(layer=layer, kind=kind, relative_error=0.01 * (4 * layer + n + 1))
            for layer in range(3)
            for n, kind in enumerate(KINDS)
        ),
    )


def test_the_table_has_both_models_and_their_ratio() -> None:
    made = report()
    drift = made.drift
    assert made.table() == [
        ("weights on disk, MB", "2.0", "0.5", "0.25x"),
        ("bits per weight, quantized", "16.00", "4.62", "0.29x"),
        ("perplexity", "8.00", "10.00", "1.25x"),
        ("KL to the original, mean", "", f"{drift.kl_mean:.3g}", ""),
        ("KL to the original, p99", "", f"{drift.kl_p99:.3g}", ""),
        ("top-1 agreement", "", f"{drift.argmax_agreement:.1%}", ""),
        ("tokens/s, batch 1", "10.0", "25.0", "2.50x"),
        ("tokens/s, batch 8", "1,234.5", "2,469.0", "2.00x"),
    ]


def test_figures_that_were_not_measured_have_no_row() -> None:
    made = report()
    original, quantized = (
        replace(figures, perplexity=None, tokens_per_s={})
        for figures in (made.original, made.quantized)
    )
    names = [row[0] for row in replace(made, original=original, quantized=quantized).table()]
    assert not any("perplexity" in name or "tokens/s" in name for name in names)


def test_the_page_has_the_table_and_the_figure(tmp_path: Path) -> None:
    made = report()
    write_page(made, tmp_path, tmp_path / "model")
    found = ParsedHtml((tmp_path / "report.html").read_text())
    for cell in {cell for row in made.table() for cell in row if cell}:
        assert cell in found.text, cell
    assert "Int4 by <GPTQ>" in found.text
    assert found.text.index("blocks.2.mlp.down") < found.text.index("blocks.2.mlp.gate_up")
    assert f"ingot verify {tmp_path}/model" in found.text
    (image,) = [attributes["src"] for tag, attributes in found.tags if tag == "img"]
    drawing = base64.b64decode(str(image).partition(",")[2])
    assert drawing == (tmp_path / "sensitivity.svg").read_bytes()
    assert all(f"<!-- {kind} -->".encode() in drawing for kind in KINDS)


def test_without_matplotlib_the_page_has_the_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plot, "available", lambda: False)
    write_page(report(), tmp_path, tmp_path)
    text = (tmp_path / "report.html").read_text()
    assert "<img" not in text
    assert "matplotlib is not installed" in text
    assert "blocks.2.mlp.down" in text
