"""`ingot bench engine`: what guessed tokens and shared prefixes save."""

from __future__ import annotations

import dataclasses
import json as json_format
from pathlib import Path
from typing import Annotated

import tyro

import ingot
from ingot.core import log


def engine(
    directory: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")],
    rounds: int = 5,
    json: tyro.conf.FlagCreatePairsOff[bool] = False,
) -> None:
    """Time the engine's shortcuts on a model, each in turns with doing without it: tokens guessed
    from the text itself, and prefixes that another request has computed.

    Example: `ingot bench engine smollm2`.

    Args:
        directory: A model directory with a tokenizer.
        rounds: How often each has its turn.
        json: Print JSON instead of lines.
    """
    from ingot.bench.engine import measure
    from ingot.bench.results import Run

    run, model = Run.now(ingot.__version__), ingot.load(directory)
    with log.progress("rounds", 2 * rounds) as bar:
        gains = measure(model, rounds, bar.advance)
    if json:
        found = {"run": dataclasses.asdict(run), "gains": [dataclasses.asdict(g) for g in gains]}
        print(json_format.dumps(found, indent=2))  # noqa: T201
        return
    for gain in gains:
        same = "the same text" if gain.same else "ANOTHER TEXT"
        log.stdout().print(
            f"[bold]{gain.name}[/]   {gain.ratio:.2f}x, {same}\n         {gain.what}: "
            f"{gain.with_it:.3f}, {gain.without:.3f} without",
            highlight=False,
        )
    log.stdout().print(
        f"\n{run.date}, {run.cpu} ({run.isa}), torch {run.torch}, ingot {run.ingot}.",
        highlight=False,
    )
