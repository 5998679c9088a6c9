"""What compressing a model costs and saves: the figures of both models, and `report.html`."""

from __future__ import annotations

import shlex
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ingot.compression import LayerSensitivity
from ingot.core.paths import write_atomic
from ingot.observe import page, plot
from ingot.observe.drift import DistributionDrift
from ingot.observe.history import Curve

FIGURE = "sensitivity"
COLUMNS = ("original", "quantized", "ratio")
_MAX_ROWS = 10  # of the table of sensitive layers


@dataclass(frozen=True, kw_only=True)
class ModelFigures:
    """Size, quality and speed of a model."""

    bytes: int
    """Size of the weights on disk."""
    bits_per_weight: float
    """Of the layers that are quantized, on disk, with scales and zero points."""
    perplexity: float | None
    """Of the validation text; None if it is too short."""
    tokens_per_s: dict[int, float]
    """Speed of decoding by batch size; empty if the model's context is too short."""


@dataclass(frozen=True, kw_only=True)
class CompressReport:
    """What was quantized, and how far the result is from the original."""

    format: str
    method: str
    original: ModelFigures
    quantized: ModelFigures
    drift: DistributionDrift
    """Of the quantized model from the original."""
    sensitivities: tuple[LayerSensitivity, ...]
    """Of all quantized layers, in the order of the forward pass."""

    def facts(self) -> dict[str, Any]:
        """Return all figures but those of single layers, for the lineage."""
        return {key: value for key, value in asdict(self).items() if key != "sensitivities"}

    def table(self) -> list[tuple[str, str, str, str]]:
        """Return the rows of the table: name, original, quantized and their ratio, formatted."""
        a, b, drift = self.original, self.quantized, self.drift
        rows = [
            _row("weights on disk, MB", a.bytes / 1e6, b.bytes / 1e6),
            _row("bits per weight, quantized", a.bits_per_weight, b.bits_per_weight, ".2f"),
        ]
        if a.perplexity is not None and b.perplexity is not None:
            rows.append(_row("perplexity", a.perplexity, b.perplexity, ".2f"))
        rows += [
            ("KL to the original, mean", "", f"{drift.kl_mean:.3g}", ""),
            ("KL to the original, p99", "", f"{drift.kl_p99:.3g}", ""),
            ("top-1 agreement", "", f"{drift.argmax_agreement:.1%}", ""),
        ]
        for batch_size, speed in a.tokens_per_s.items():
            rows.append(_row(f"tokens/s, batch {batch_size}", speed, b.tokens_per_s[batch_size]))
        return rows


def _row(
    name: str, original: float, quantized: float, form: str = ",.1f"
) -> tuple[str, str, str, str]:
    ratio = f"{quantized / original:.2f}x"
    return name, format(original, form), format(quantized, form), ratio


def write_page(report: CompressReport, out: Path, directory: Path) -> None:
    """Write `report.html` and its figure to `out`, for a model that will be in `directory`."""
    path = shlex.quote(str(directory.resolve()))
    largest = sorted(report.sensitivities, key=lambda one: -one.relative_error)[:_MAX_ROWS]
    sections = [
        page.Section(
            heading="Comparison",
            headings=("", *COLUMNS),
            rows=report.table(),
            numbers=True,
            note=f"KL in nats, over {report.drift.positions} positions of validation text.",
        ),
        page.figure(
            out,
            FIGURE,
            lambda files: _draw(report, files),
            alt="relative error of the output of each quantized layer",
            heading="Sensitivity of the layers",
        ),
        page.Section(
            heading="Most sensitive layers",
            headings=("layer", "relative error of the output"),
            rows=[
                (f"blocks.{one.layer}.{one.kind}", f"{one.relative_error:.4f}") for one in largest
            ],
            numbers=True,
        ),
        page.Section(
            heading="Next",
            text="\n".join(
                (
                    f"ingot generate {path} 'Once upon a time'",
                    f"ingot serve {path}",
                    f"ingot verify {path}",
                )
            ),
        ),
    ]
    status = f"{report.format} by {report.method}"
    text = page.render(*(directory.name, status, sections), path=directory, seconds=time.time())
    write_atomic(out / page.NAME, text)


def _draw(report: CompressReport, files: list[Path]) -> None:
    layers = report.sensitivities
    curves: dict[str, Curve] = {}
    for kind in dict.fromkeys(one.kind for one in layers):
        own = [one for one in layers if one.kind == kind]
        errors = np.array([one.relative_error for one in own])
        curves[kind] = Curve(np.array([one.layer for one in own]), errors)
    plot.draw_layers(curves, "relative error of the output", files)
