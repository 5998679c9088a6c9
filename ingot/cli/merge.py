"""`ingot merge`: merge a LoRA adapter into its base model."""

from __future__ import annotations

import dataclasses
import json as json_format
from pathlib import Path
from typing import Annotated

import tyro

from ingot.core.log import stdout


def merge(
    adapter: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="ADAPTER")],
    directory: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DST")],
    base: str | None = None,
    text: str = "stdlib",
    device: str = "auto",
    json: tyro.conf.FlagCreatePairsOff[bool] = False,
) -> None:
    """Merge a LoRA adapter into the weights of its base model, and print what merging costs.

    The weights are rounded to the dtype of the model, so the merged model is not quite the one
    that was trained: the KL divergence between the two is printed. `ingot serve --adapter` serves
    the adapter as it was trained.

    Examples: `ingot merge runs/pirate pirate-merged --base smollm2`,
    `ingot merge runs/pirate pirate-merged --text questions.txt`.

    Args:
        adapter: The adapter, as PEFT saves it.
        directory: The directory to write; it must be new or empty.
        base: The base model, a directory or ORG/NAME; default: the one that the adapter names.
        text: Text to compare both models on: a file, a folder, or stdlib, Python's own library.
        device: Where to compute: auto, cpu, cuda, cuda:1.
        json: Print JSON instead of text.
    """
    from ingot.workflows.merge import merge as workflow

    report = workflow(adapter, directory, base=base, text=text, device=device)
    if json:
        print(json_format.dumps(dataclasses.asdict(report), indent=2))  # noqa: T201
        return
    console, drift = stdout(), report.drift
    console.print(
        f"merged rank {report.rank} in {report.layers} layers into {directory}", highlight=False
    )
    console.print(
        f"KL(adapter || merged) over {drift.positions} positions: mean {drift.kl_mean:.2e}, "
        f"max {drift.kl_max:.2e} nats; same most likely token at {drift.argmax_agreement:.1%}",
        highlight=False,
    )
