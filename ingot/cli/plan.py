"""`ingot plan`: rank the parallel layouts of a training run on a GPU cluster, without a GPU."""

from __future__ import annotations

import dataclasses
import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from ingot.cli import escape_markup
from ingot.cli.tables import new_grid, new_table
from ingot.core import log
from ingot.core.errors import ConfigError

if TYPE_CHECKING:
    from ingot.planning.search import PlanEstimate
    from ingot.workflows.plan import PlanReport

_MAX_ROWS = 10


def plan(
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")],
    gpu: str,
    gpus: int,
    seq_len: int,
    global_batch_size: int,
    per_node: int | None = None,
    tokens: float = 1e12,
    price: float | None = None,
    precision: Literal["bf16", "fp8", "mxfp8", "fp4"] = "bf16",
    calibrate: Path | None = None,
    json: tyro.conf.FlagCreatePairsOff[bool] = False,
    html: Path | None = None,
    apply: Path | None = None,
) -> None:
    """Predict step time and memory of all parallel layouts of a training run, and rank them.

    The prediction is a formula whose constants were fitted to published runs; docs/plan.md says
    how far it is off. Nothing runs on a GPU.

    Examples: `ingot plan llama3-8b --gpu h100 --gpus 64 --seq-len 8192 --global-batch-size 512`,
    `ingot plan recipe.toml --gpu a100 --gpus 8 --seq-len 1024 --global-batch-size 64 --apply
    recipe.toml`.

    Args:
        model: A model's name, a Hugging Face directory or config.json, or a recipe.
        gpu: a100, a100-40gb, h100, h200, b200, b300, gb200, gb300, or a TOML file with its data.
        gpus: Number of GPUs.
        seq_len: Tokens of a sequence.
        global_batch_size: Sequences of a step, over all GPUs.
        per_node: GPUs of a node; by default as in the vendor's systems.
        tokens: Tokens of the whole run, for its GPU-hours.
        price: Price of a GPU-hour, for the cost of the run.
        precision: Precision of the matmuls.
        calibrate: Measured runs of your system: a CSV file, or a directory of training runs.
        json: Print JSON instead of a table.
        html: Write a page with plots of a step's time and of scaling to this file.
        apply: Write the first plan that `ingot train` can run into this recipe.
    """
    from ingot.workflows.plan import plan as workflow

    if not 0 < tokens < 1e20:
        raise ConfigError(f"--tokens: must be above 0, got {tokens:g}", hint="give a number")
    asked = {"gpu": gpu, "gpus": gpus, "per_node": per_node, "seq_len": seq_len}
    batch = {"global_batch_size": global_batch_size, "precision": precision}
    report = workflow(model, **asked, **batch, runs=calibrate)  # pyright: ignore[reportArgumentType]
    if json:
        print(json_format.dumps(_content(report, tokens), indent=2))  # noqa: T201
    else:
        _print(report, tokens, price)
    if apply:
        _apply(report, apply)
    if html:
        from ingot.workflows.plan_report import write_page

        write_page(report, html)


def _apply(report: PlanReport, recipe: Path) -> None:
    from ingot.workflows.plan import apply

    keys = apply(report, recipe)
    log.logger(__name__).info("wrote %s to %s", json_format.dumps(keys), recipe)


def _content(report: PlanReport, tokens: float) -> dict[str, Any]:
    result = report.result
    return {
        "model": report.model,
        "params": report.workload.model.params,
        "own_runs": report.own_runs,
        "considered": result.considered,
        "too_large": result.too_large,
        "plans": [_plan_content(one, tokens) for one in result.estimates[:_MAX_ROWS]],
    }


def _plan_content(estimate: PlanEstimate, tokens: float) -> dict[str, Any]:
    chosen = dataclasses.asdict(estimate.plan)
    del chosen["software"]
    return {
        **chosen,
        "step_s": estimate.step_s,
        "interval_s": [estimate.low, estimate.high],
        "mfu": estimate.mfu,
        "tokens_per_gpu_s": estimate.tokens_per_gpu_s,
        "gpu_hours": estimate.gpu_hours(tokens),
        "seconds_by_part": dataclasses.asdict(estimate.time),
        "bytes_by_part": dataclasses.asdict(estimate.memory),
    }


def _print(report: PlanReport, tokens: float, price: float | None) -> None:
    from ingot.workflows.plan_report import COLUMNS, row

    console = log.stdout()
    table = new_table(COLUMNS[:1], COLUMNS[1:], wrap=True, show_edge=False)
    for one in report.result.estimates[:_MAX_ROWS]:
        table.add_row(*row(one))
    console.print(table)
    console.print(new_grid(_lines(report, tokens, price)), highlight=False)


def _lines(report: PlanReport, tokens: float, price: float | None) -> list[tuple[str, str]]:
    from ingot.planning.memory import GIB, MEMORY_PARTS
    from ingot.workflows.plan_report import NAMES

    first, result = report.first, report.result
    seconds = sorted(vars(first.time).items(), key=lambda item: -item[1])
    parts = [
        f"{NAMES.get(name, name)} {value / first.step_s:.0%}"
        for name, value in seconds
        if value >= 0.005 * first.step_s
    ]
    memory = [f"{name} {getattr(first.memory, name) / GIB:.1f}" for name in MEMORY_PARTS]
    hours = first.gpu_hours(tokens)
    cost = f", cost {hours * price:,.0f}" if price else ""
    days = hours / report.cluster.gpus / 24
    lines = [
        ("first plan", escape_markup(first.plan.describe())),
        ("time", ", ".join(parts)),
        ("memory, GiB", ", ".join(memory)),
        ("run", f"{hours:,.0f} GPU-hours for {tokens:.3g} tokens, {days:,.1f} days{cost}"),
        ("left out", f"{result.too_large:,} of {result.considered:,} plans need too much memory"),
    ]
    if result.simplest:
        left, use = result.simplest
        lines.append(("for example", f"{left.describe()}: {use.total / GIB:.0f} GiB"))
    if report.own_runs:
        change = report.fitted.constants.speed
        runs = "own run" if report.own_runs == 1 else "own runs"
        basis = f"{report.own_runs} {runs}: predicted step times are multiplied by {change:.2f}"
    else:
        basis = "published runs; --calibrate with a run of your own narrows the range"
    return [*lines, ("based on", basis)]
