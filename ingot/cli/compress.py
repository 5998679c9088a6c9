"""`ingot compress`: quantize the weights of a model."""

from __future__ import annotations

import dataclasses
import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from ingot.cli import escape_markup
from ingot.cli.tables import new_table
from ingot.core.log import stdout

if TYPE_CHECKING:
    from ingot.compression import Method
    from ingot.workflows.compress_report import CompressReport


def compress(
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")],
    directory: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DST")],
    to: Literal["int8", "int4"] = "int8",
    group: int = 32,
    symmetric: tyro.conf.FlagCreatePairsOff[bool] = False,
    method: Literal["gptq", "rtn", "awq", "awq+gptq", "smoothquant"] = "gptq",
    bits_per_weight: float | None = None,
    embeddings: tyro.conf.FlagCreatePairsOff[bool] = False,
    text: str = "stdlib",
    device: str = "auto",
    json: tyro.conf.FlagCreatePairsOff[bool] = False,
) -> None:
    """Quantize the weights of a model's linear layers, and print what that costs.

    The result is a directory in the format of compressed-tensors, which transformers loads, too.
    Size, quality and speed of both models are printed and written to report.html in it.

    Examples: `ingot compress smollm2 smollm2-int8`,
    `ingot compress smollm2 smollm2-int4 --to int4 --group 32`.

    Args:
        model: The model, a directory or ORG/NAME.
        directory: The directory to write; it must be new or empty.
        to: Bits of a weight: int8 or int4.
        group: Channels that share a scale: 32, 64 or 128; for int8 also 0, a whole row.
        symmetric: For int4, no zero points: half a bit less per weight, with groups of 32.
        method: gptq, awq or smoothquant, which calibrate with text, or rtn, round to nearest.
        bits_per_weight: With int4, raise the layers that lose most to int8, up to this average.
        embeddings: Quantize embedding and LM head to int8, too: faster, but only for ingot.
        text: Text to calibrate with and to compare both models on: a file, a folder, or stdlib.
        device: Where to compute: auto, cpu, cuda, cuda:1.
        json: Print JSON instead of text.
    """
    from ingot.nn.formats import Int4, Int8
    from ingot.workflows.compress import compress as workflow

    format = (
        Int8(group=group or None) if to == "int8" else Int4(group=group, zero_point=not symmetric)
    )
    report = workflow(
        *(model, directory, format),
        method=_methods()[method],
        bits_per_weight=bits_per_weight,
        embeddings=embeddings,
        text=text,
        device=device,
    )
    if json:
        print(json_format.dumps(dataclasses.asdict(report), indent=2))  # noqa: T201
    else:
        _print_table(report, directory)


def _methods() -> dict[str, Method]:
    from ingot.compression import AWQ, GPTQ, RoundToNearest, SmoothQuant

    return {
        "gptq": GPTQ(),
        "rtn": RoundToNearest(),
        "awq": AWQ(),
        "awq+gptq": AWQ(rounding=GPTQ()),
        "smoothquant": SmoothQuant(),
    }


def _print_table(report: CompressReport, directory: Path) -> None:
    from ingot.observe.page import NAME
    from ingot.workflows.compress_report import COLUMNS

    console = stdout()
    table = new_table(("",), COLUMNS, show_edge=False)
    for row in report.table():
        table.add_row(*row)
    console.print(table)
    console.print(
        f"KL in nats, over {report.drift.positions} positions of validation text. The model is in "
        f"{escape_markup(str(directory))}, the sensitivity of its layers in {NAME} there.",
        highlight=False,
    )
