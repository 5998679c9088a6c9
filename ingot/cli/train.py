"""`ingot train`: train a model from a recipe."""

from __future__ import annotations

import json as json_format
import signal
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from ingot.cli import escape_markup
from ingot.core import config, log

if TYPE_CHECKING:
    from ingot.training.recipe import Recipe
    from ingot.workflows.train import TrainingRun, TrainResult

_LOG = log.logger(__name__)


def train(
    recipe: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE")],
    overrides: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[KEY=VALUE ...]")
    ] = (),
    run: Path | None = None,
    resume: tyro.conf.FlagCreatePairsOff[bool] = False,
    export: Path | None = None,
    ranks: int = 1,
    max_restarts: int = 0,
    json: tyro.conf.FlagCreatePairsOff[bool] = False,
) -> None:
    """Train the model of a recipe. A run killed at any point resumes bit for bit with `--resume`.

    Ctrl-C or SIGTERM finishes the current step, writes a checkpoint and stops; a second one stops
    at once. The model is exported as a model directory at the end, for `ingot serve`; `--export`
    writes that of a run which is still training or was stopped, at its newest checkpoint.

    Examples: `ingot train recipes/xor.toml`, `ingot train recipes/digits.toml steps=100
    optimizer.lr=3e-3`, `ingot train recipes/digits.toml --resume` for its newest run,
    `ingot train recipes/stdlib-10m.toml --export model`,
    `ingot train recipes/stdlib-10m.toml grad_accum_steps=4 --ranks 4`.

    Args:
        recipe: A TOML file.
        overrides: Values that replace those of the recipe: dotted.key=value.
        run: The directory of the run; by default a new one in ingot's data directory.
        resume: Continue the run in `--run`, or the newest one of this name.
        export: Do not train; write the model of that run to this directory.
        ranks: Number of processes on this machine that train together; torchrun starts them on
            several machines.
        max_restarts: How often ranks are started again after one has failed, from the newest
            checkpoint.
        json: Print the result as JSON.
    """
    from ingot.training.recipe import Recipe
    from ingot.workflows import train as workflow

    parsed = config.load(Recipe, recipe, overrides)
    if export is not None:
        _print(workflow.export(parsed, export, run_dir=run), json)
        return
    if ranks != 1:
        from ingot.workflows.launch import launch
        from ingot.workflows.train import choose_directory

        parsed.check_ranks(ranks)
        place = choose_directory(parsed.name, run, resume)
        flags = [*(["--resume"] if resume else []), *(["--json"] if json else [])]
        arguments = ["train", str(recipe), *overrides, "--run", str(place), *flags]
        launch(ranks, arguments, place, max_restarts=max_restarts)
        return
    peak_flops = _peak_flops(parsed)
    training = workflow.TrainingRun(parsed, run_dir=run, resume=resume, peak_flops=peak_flops)
    with _stop_on_signals(training):
        result = training.train()
    if not result.finished:
        raise KeyboardInterrupt  # the checkpoint is written; the exit status says "interrupted"
    if training.ranks.is_main:
        _print(result, json)


def _peak_flops(recipe: Recipe) -> float | None:
    """Return the machine's FLOP/s in matmuls if `ingot doctor` has measured them: it takes 12 s."""
    from ingot.bench.machine import cached_peaks

    peaks, dtype = cached_peaks(), "bf16" if recipe.precision.value == "bf16" else "fp32"
    peak = peaks.matmul[dtype] if peaks else None
    return peak.value * 1e9 if peak else None


@contextmanager
def _stop_on_signals(training: TrainingRun) -> Generator[None]:
    """Stop the run after its step at the first Ctrl-C or SIGTERM, and at once at the second."""

    def stop(number: int, frame: object) -> None:
        _LOG.info("stopping after the current step")
        training.stop()
        for signum, handler in before.items():
            signal.signal(signum, handler)

    before: dict[signal.Signals, Any] = {
        signum: signal.signal(signum, stop) for signum in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _print(result: TrainResult, json: bool) -> None:
    row: dict[str, Any] = {"run": str(result.run_dir), "steps": result.steps, **result.metrics}
    if result.model_dir is not None:
        row["model"] = str(result.model_dir)
    if json:
        print(json_format.dumps(row, indent=2))  # noqa: T201
        return
    for name, value in row.items():
        shown = f"{value:.4g}" if isinstance(value, float) else escape_markup(str(value))
        log.stdout().print(f"{name.replace('_', ' '):16} {shown}", highlight=False, soft_wrap=True)
