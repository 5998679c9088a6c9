"""`ingot bench engine`: a step beside its limit; what guessed tokens and shared prefixes save."""

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
    """Time the engine on a model: steps of 1, 8 and 32 requests in turns with reading memory, which
    is their limit, and its shortcuts in turns with doing without them: tokens guessed from the text
    itself, and prefixes that another request has computed.

    Example: `ingot bench engine smollm2`.

    Args:
        directory: A model directory with a tokenizer.
        rounds: How often each shortcut has its turn.
        json: Print JSON instead of lines.
    """
    from ingot.bench.engine import BATCHES, STEPS, decode, shortcuts
    from ingot.bench.results import Run

    run, model = Run.now(ingot.__version__), ingot.load(directory)
    with log.progress("turns", len(BATCHES) * STEPS + 2 * rounds) as bar:
        gains = shortcuts(model, rounds, bar.advance)
        steps = decode(model, STEPS, bar.advance)
    if json:
        found = {
            "run": dataclasses.asdict(run),
            "decode": [dataclasses.asdict(step) for step in steps],
            "gains": [dataclasses.asdict(gain) for gain in gains],
        }
        print(json_format.dumps(found, indent=2))  # noqa: T201
        return
    for step in steps:
        log.stdout().print(
            f"[bold]decode[/]   batch {step.batch:2}: {step.tokens_per_s:.0f} tokens/s, "
            f"{step.step * 1e3:.2f} ms a step; {step.share_of_limit:.2f} of what reading allows",
            highlight=False,
        )
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
