"""`ingot profile`: what takes the time of a training run, and what would help."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from ingot.cli import escape_markup
from ingot.core import config
from ingot.core.log import stdout

if TYPE_CHECKING:
    from ingot.workflows.profile import Profile

_MAX_OPS = 10


def profile(
    recipe: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE")],
    overrides: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[KEY=VALUE ...]")
    ] = (),
    steps: int = 10,
    ranks: int = 1,
    out: Path = Path("profile"),
) -> None:
    """Profile steps of a training run: compute, communication, waiting for data, and Python.

    Names the bottleneck, tries what might help, and suggests what was faster. The run is a
    temporary one: no run directory or checkpoint is written. A page and a trace for Perfetto are
    written to `--out`.

    Examples: `ingot profile recipes/digits.toml`, `ingot profile recipes/stdlib-10m.toml
    grad_accum_steps=4 --ranks 2`.

    Args:
        recipe: A TOML file.
        overrides: Values that replace those of the recipe: dotted.key=value.
        steps: Number of steps that are recorded, after a few to warm up.
        ranks: Number of processes on this machine that train together.
        out: Directory of the page and the trace.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # which torch reads when it is imported
    from ingot.training.recipe import Recipe
    from ingot.workflows import profile as workflow
    from ingot.workflows.profile_report import write_page

    parsed = config.load(Recipe, recipe, overrides)
    if ranks != 1 and "WORLD_SIZE" not in os.environ:
        from ingot.workflows.launch import launch

        parsed.check_ranks(ranks)
        arguments = [str(recipe), *overrides, "--steps", str(steps), "--out", str(out)]
        launch(ranks, ["profile", *arguments], out)
        return
    found = workflow.profile_training(parsed, out, steps=steps)
    if found is not None:
        path = write_page(found, out)
        _print(found)
        stdout().print(f"\n{escape_markup(str(path))}\n{escape_markup(str(found.trace))}")


def _print(found: Profile) -> None:
    from ingot.cli.tables import new_grid, new_table
    from ingot.workflows import profile_report as report

    console = stdout()
    console.print(new_grid((name, value) for name, value in report.tiles(found)))
    for headings, rows in (
        (report.KIND_HEADINGS, report.kind_rows(found.window)),
        (report.OP_HEADINGS, report.op_rows(found.window, _MAX_OPS)),
    ):
        table = new_table(headings[:1], headings[1:])
        for row in rows:
            table.add_row(*(escape_markup(cell) for cell in row))
        console.print(table)
    console.print(escape_markup(found.sentence))
    for number, text in enumerate(found.suggestions, start=1):
        console.print(f"{number}. {escape_markup(text)}")
    if not found.suggestions:
        console.print("nothing that was tried made it faster")
