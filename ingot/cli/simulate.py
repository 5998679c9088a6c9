"""`ingot simulate`: how a server would do under a load, without a model and in no time."""

from __future__ import annotations

import dataclasses
import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from ingot.core import log
from ingot.core.errors import ConfigError, IngotError
from ingot.serving.engine.scheduler import Limits
from ingot.serving.simulate import Costs, Goal, Outcome, Report, Trace
from ingot.serving.simulate import simulate as run

if TYPE_CHECKING:
    from rich.table import Table


def simulate(
    trace: Annotated[Trace, tyro.conf.OmitArgPrefixes] = Trace(),  # noqa: B008
    limits: Limits = Limits(blocks=2048),  # noqa: B008
    costs: Costs = Costs(),  # noqa: B008
    goal: Goal = Goal(),  # noqa: B008
    model: Path | None = None,
    measured: tyro.conf.FlagCreatePairsOff[bool] = False,
    real: tyro.conf.FlagCreatePairsOff[bool] = False,
    json: tyro.conf.FlagCreatePairsOff[bool] = False,
) -> None:
    """Serve a made-up load with the real scheduler, on a clock of its own: what latencies a rate
    of requests leads to, how much is answered in time, how much of it the cache saves.

    Examples: `ingot simulate` for 10,000 requests at 8 a second, `ingot simulate --rate 16
    --shared 0.9`, `ingot simulate --requests 1000000 --burst 20 --limits.budget 1024`,
    `ingot simulate --model smollm2 --measured` for a model on this machine.

    Args:
        trace: The requests.
        limits: The scheduler's.
        costs: What a step costs on the machine that is to serve.
        goal: What an answer has to keep to count as goodput.
        model: Take the costs of the model in this directory.
        measured: Measure what the engine's steps take with that model here, for a minute.
        real: Then serve the load in earnest, too, and say how near the simulation came.
        json: Print JSON instead of lines.
    """
    if (measured or real) and not model:
        raise ConfigError("--measured without a model", hint="give one: --model DIR")
    if model:
        costs = of_model(model, costs)
    if measured and model:
        costs = of_engine(model, limits, costs)
    with log.progress("simulating", trace.requests) as bar:
        report = run(limits, costs, trace, goal, bar.advance)
    found = in_earnest(model, limits, trace, goal) if real and model else None
    if json:
        settings = {"trace": trace, "limits": limits, "costs": costs, "goal": goal}
        given = {name: dataclasses.asdict(value) for name, value in settings.items()}
        given["report"] = dataclasses.asdict(report)
        if found:
            given["real"] = dataclasses.asdict(found)
        print(json_format.dumps(given, indent=2))  # noqa: T201
    else:
        log.stdout().print(_table(report, goal), highlight=False)
    if found and not json:
        share = report.output_tokens_per_s / found.output_tokens_per_s
        log.stdout().print(
            f"\nthe engine itself: {found.output_tokens_per_s:,.0f} tokens a second, first token "
            f"{latency(found.first_token)}; simulated over real: {share:.3f}",
            highlight=False,
        )


def of_model(directory: Path, costs: Costs) -> Costs:
    """The costs with what a step reads and computes for this model."""
    from ingot.interop import hf

    found = hf.describe(directory)
    config = found.config
    if config.moe:
        raise IngotError(
            f"{directory} is a mixture of experts: what a step reads depends on its tokens",
            hint="give --costs.weights and --costs.flops for your batches instead of --model",
        )
    return dataclasses.replace(
        costs,
        weights=float(found.bytes),
        flops=2.0 * found.parameters,
        kv=float(found.kv.bytes_per_token),
        attention=4.0 * config.layers * config.heads * config.head_dim,
    )


def of_engine(directory: Path, limits: Limits, costs: Costs) -> Costs:
    """The costs with what the engine's steps take on this machine."""
    from ingot.bench import calibrate
    from ingot.interop import hf

    with log.progress("measuring steps", calibrate.NUM_REQUESTS) as bar:
        return calibrate.fit_costs(hf.load(directory), limits, costs, bar.advance)


def in_earnest(directory: Path, limits: Limits, trace: Trace, goal: Goal) -> Outcome:
    """What came of the same load on the engine."""
    from ingot.bench import serve
    from ingot.interop import hf
    from ingot.serving.engine.engine import Engine

    engine = Engine(hf.load(directory), limits=limits)
    with log.progress("serving", trace.requests) as bar:
        return serve.summarize(
            [serve.run_on_engine(engine, serve.Load(trace=trace), bar.advance)], goal
        )


def _table(report: Report, goal: Goal) -> Table:
    return outcome_table(
        ("load", report),
        goal,
        ("prefix hits", f"{report.hit_rate:.1%} of the tokens"),
        ("preemptions", f"{report.preemptions:,}"),
        ("steps", f"{report.steps:,} of {report.tokens_per_step:.1f} tokens"),
        (
            "scheduler",
            f"{report.decisions_per_s:,} decisions a second, {report.steps_per_s:,} steps; "
            f"{report.wall_seconds:.1f} s in all",
        ),
    )


def outcome_table(named: tuple[str, Outcome], goal: Goal, *more: tuple[str, str]) -> Table:
    """What came of a load, a line for each figure, and more lines."""
    from rich.table import Table

    table = Table.grid(padding=(0, 3))
    name, outcome = named
    ends = ", ".join(f"{count:,} {end}" for end, count in outcome.ends.items())
    for line, value in (
        (name, f"{outcome.requests:,} requests in {outcome.seconds:,.1f} s: {ends}"),
        ("answered", f"{outcome.requests_per_s:.2f} a second"),
        (
            "goodput",
            f"{outcome.goodput_per_s:.2f} a second: first token within {goal.first:g} s, "
            f"then {goal.between:g} s each",
        ),
        ("output", f"{outcome.output_tokens_per_s:,.0f} tokens a second"),
        ("first token", latency(outcome.first_token)),
        ("between tokens", latency(outcome.between_tokens)),
        ("whole answer", latency(outcome.total)),
        *more,
    ):
        table.add_row(f"[bold]{line}[/]", value)
    return table


def latency(percentiles: dict[str, float]) -> str:
    """The percentiles in a line.

    >>> latency({"p50": 0.0388, "p99": 12.3456})
    'p50 0.039 s, p99 12.346 s'
    """
    found = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in percentiles.items())
    return found or "none was answered"
