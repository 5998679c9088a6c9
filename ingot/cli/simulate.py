"""`ingot simulate`: predict latency and throughput of a server under load, without a model."""

from __future__ import annotations

import dataclasses
import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from ingot.cli.tables import new_grid
from ingot.core import log
from ingot.core.errors import ConfigError
from ingot.serving.costs import CostModel
from ingot.serving.engine.scheduler import SchedulerConfig
from ingot.serving.machine import MachineConfig
from ingot.serving.simulate import SLO, FleetConfig, LoadReport, SimulationReport
from ingot.serving.simulate import simulate as run
from ingot.serving.workload import RequestWorkload

if TYPE_CHECKING:
    from rich.table import Table


def simulate(
    workload: Annotated[RequestWorkload, tyro.conf.OmitArgPrefixes] = RequestWorkload(),  # noqa: B008
    fleet: Annotated[FleetConfig, tyro.conf.OmitArgPrefixes] = FleetConfig(),  # noqa: B008
    scheduler: SchedulerConfig = SchedulerConfig(num_blocks=2048),  # noqa: B008
    costs: CostModel = CostModel(),  # noqa: B008
    machine: MachineConfig = MachineConfig(),  # noqa: B008
    slo: SLO = SLO(),  # noqa: B008
    model: Path | None = None,
    calibrate: tyro.conf.FlagCreatePairsOff[bool] = False,
    compare: tyro.conf.FlagCreatePairsOff[bool] = False,
    json: tyro.conf.FlagCreatePairsOff[bool] = False,
) -> None:
    """Serve a synthetic workload with the real scheduler in simulated time: latency, throughput,
    goodput and prefix-cache hits at a given request rate.

    Examples: `ingot simulate` for 10,000 requests at 8 per second, `ingot simulate --request-rate
    16 --shared-prefix-ratio 0.9`, `ingot simulate --num-requests 1000000 --burst-size 20
    --scheduler.max-num-batched-tokens 1024`, `ingot simulate --model smollm2 --calibrate` for a
    model on this machine, `ingot simulate --replicas 10 --request-rate 80 --fail-at 60` for several
    replicas, one of which fails.

    Args:
        workload: The requests.
        fleet: The replicas, and how requests are distributed to them.
        scheduler: Limits of the scheduler.
        costs: Cost of a step on the simulated machine.
        machine: Cores that the replicas share, and costs of the HTTP process in front of them.
        slo: Latency objectives; requests that meet them count as goodput.
        model: Take sizes and FLOPs from the model in this directory.
        calibrate: Fit the cost model to that model on this machine (takes a minute).
        compare: Then run the same workload on the real engine and report the error.
        json: Print JSON instead of a table.
    """
    if compare and (fleet.replicas > 1 or fleet.fail_at is not None):
        raise ConfigError("--compare runs one engine", hint="leave out --replicas and --fail-at")
    if (calibrate or compare) and not model:
        raise ConfigError("--calibrate and --compare need a model", hint="add --model DIR")
    if model:
        costs = _model_costs(model, scheduler, costs, calibrate)
    with log.progress("simulating", workload.num_requests) as bar:
        report = run(scheduler, costs, workload, slo, bar.advance, fleet, machine)
    measured = run_on_engine(model, scheduler, workload, slo) if compare and model else None
    if json:
        settings = {"workload": workload, "fleet": fleet, "scheduler": scheduler}
        settings |= {"costs": costs, "machine": machine, "slo": slo}
        fields = {name: dataclasses.asdict(value) for name, value in settings.items()}
        fields["report"] = dataclasses.asdict(report)
        if measured:
            fields["measured"] = dataclasses.asdict(measured)
        print(json_format.dumps(fields, indent=2))  # noqa: T201
    else:
        log.stdout().print(_table(report, slo), highlight=False)
    if measured and not json:
        ratio = report.output_tokens_per_s / measured.output_tokens_per_s
        log.stdout().print(
            f"\nmeasured on the engine: {measured.output_tokens_per_s:,.0f} tokens/s, TTFT "
            f"{format_latency(measured.ttft)}; simulated/measured throughput: {ratio:.3f}",
            highlight=False,
        )


def _model_costs(
    directory: Path, scheduler: SchedulerConfig, costs: CostModel, measure: bool
) -> CostModel:
    from ingot.bench.calibrate import NUM_REQUESTS, fit_costs, model_costs
    from ingot.interop import hf

    costs = model_costs(directory, costs)
    if not measure:
        return costs
    with log.progress("measuring steps", NUM_REQUESTS) as bar:
        return fit_costs(hf.load(directory), scheduler, costs, bar.advance)


def run_on_engine(
    directory: Path, scheduler: SchedulerConfig, workload: RequestWorkload, slo: SLO
) -> LoadReport:
    """Serve the workload with the engine, in real time."""
    from ingot.bench import serve
    from ingot.interop import hf
    from ingot.serving.engine.engine import Engine

    engine, load = (
        Engine(hf.load(directory), scheduler_config=scheduler),
        serve.Load(workload=workload),
    )
    with log.progress("serving", workload.num_requests) as bar:
        return serve.summarize([serve.run_on_engine(engine, load, bar.advance)], slo)


def _table(report: SimulationReport, slo: SLO) -> Table:
    return report_table(
        ("workload", report),
        slo,
        ("prefix hits", f"{report.hit_rate:.1%} of tokens"),
        *_fleet_lines(report),
        ("preemptions", f"{report.preemptions:,}"),
        ("steps", f"{report.steps:,}, {report.tokens_per_step:.1f} tokens on average"),
        (
            "scheduler",
            f"{report.decisions_per_s:,} decisions/s, {report.steps_per_s:,} steps/s; "
            f"{report.wall_seconds:.1f} s in total",
        ),
    )


def _fleet_lines(report: SimulationReport) -> list[tuple[str, str]]:
    lines: list[tuple[str, str]] = []
    if len(report.replicas) > 1:
        busy = [replica.busy_s / report.duration_s for replica in report.replicas]
        counts = [replica.requests for replica in report.replicas]
        lines.append(
            ("replicas", f"{len(counts)}, {min(counts):,} to {max(counts):,} requests each")
        )
        mean = sum(busy) / len(busy)
        lines.append(("busy", f"{min(busy):.0%} to {max(busy):.0%} of the time, mean {mean:.0%}"))
    if failover := report.failover:
        for name, count, metric, latency in (
            ("retried", failover.retried, "TTFT", failover.ttft),
            ("continued", failover.continued, "pause", failover.pause),
        ):
            lines.append((name, f"{count}: {metric} {format_latency(latency)}" if count else "0"))
    return lines


def report_table(named: tuple[str, LoadReport], slo: SLO, *more: tuple[str, str]) -> Table:
    """Return a table of the results, one line for each metric, followed by `more` lines."""
    name, report = named
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in report.finish_reasons.items())
    lines = (
        (name, f"{report.num_requests:,} requests in {report.duration_s:,.1f} s: {reasons}"),
        ("completed", f"{report.requests_per_s:.2f} requests/s"),
        (
            "goodput",
            f"{report.goodput_per_s:.2f} requests/s with TTFT <= {slo.ttft:g} s and "
            f"TPOT <= {slo.tpot:g} s",
        ),
        ("output", f"{report.output_tokens_per_s:,.0f} tokens/s"),
        ("TTFT", format_latency(report.ttft)),
        ("inter-token latency", format_latency(report.itl)),
        ("end-to-end latency", format_latency(report.e2e)),
        *more,
    )
    return new_grid(lines)


def format_latency(percentiles: dict[str, float]) -> str:
    """Return the percentiles in one line.

    >>> format_latency({"p50": 0.0388, "p99": 12.3456})
    'p50 0.039 s, p99 12.346 s'
    """
    parts = [f"{name} {seconds:.3f} s" for name, seconds in percentiles.items()]
    return ", ".join(parts) or "no request completed"
