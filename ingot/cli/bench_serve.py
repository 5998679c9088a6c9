"""`ingot bench serve`: a load on a server, and what its clients see."""

from __future__ import annotations

import dataclasses
import json as json_format
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import tyro

import ingot
from ingot.cli.simulate import report_table
from ingot.core import log
from ingot.core.errors import ConfigError
from ingot.serving.simulate import SLO, RequestWorkload

if TYPE_CHECKING:
    from ingot.bench.serve import Load, RequestRecord
    from ingot.serving.engine.engine import Engine

_WORKLOAD = RequestWorkload(
    num_requests=256, request_rate=4.0, output_len=128, shared_prefix_ratio=0.0, length_sigma=0.0
)


def serve(
    target: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DIR|URL")],
    clients: int | None = None,
    workload: Annotated[RequestWorkload, tyro.conf.OmitArgPrefixes] = _WORKLOAD,
    slo: SLO = SLO(),  # noqa: B008
    rounds: int = 1,
    engine: tyro.conf.FlagCreatePairsOff[bool] = False,
    key: str | None = None,
    plot: Path | None = None,
    json: tyro.conf.FlagCreatePairsOff[bool] = False,
) -> None:
    """Send a load to a server and tell what its clients see: first tokens, gaps, throughput, and
    how many answers meet the SLO.

    Examples: `ingot bench serve smollm2` starts a server for it, `ingot bench serve smollm2
    --clients 32` has 32 clients at once who ask again and again, `ingot bench serve smollm2
    --clients 32 --engine --rounds 5` says what HTTP costs, `ingot bench serve
    http://127.0.0.1:8000 --rate 8 --plot latency.png` takes a server that runs.

    Args:
        target: A model directory, or the address of a server that runs.
        clients: Closed loop: so many at once. Without it requests come at --rate.
        workload: The requests, as of `ingot simulate`.
        slo: What an answer has to keep to count as goodput.
        rounds: How often the whole load is sent.
        engine: In turns with it, give the load to the engine without HTTP.
        key: The API key, if the server wants one.
        plot: Draw latencies and throughput of the last round into this file, .png or .svg.
        json: Print JSON instead of lines.
    """
    from ingot.bench import latency as plots
    from ingot.bench.results import RunInfo
    from ingot.bench.serve import Load, summarize
    from ingot.observe.plot import check

    load, run = Load(workload=workload, clients=clients), RunInfo.now(ingot.__version__)
    if engine and _is_url(target):
        raise ConfigError("--engine of an address", hint="give the directory of a model")
    if plot:
        check(plot)
    answers, start = _answers(target, load, rounds, engine, key)
    if plot:
        plots.draw(answers["server"][-1], slo, run, plot)
    reports = {system: summarize(of, slo) for system, of in answers.items()}
    if json:
        settings = {"run": run, "load": load, "slo": slo, **reports}
        found = {name: dataclasses.asdict(value) for name, value in settings.items()}
        print(json_format.dumps({**found, "start_s": start, **_share(answers)}, indent=2))  # noqa: T201
    else:
        for system, outcome in reports.items():
            log.stdout().print(report_table((system, outcome), slo), "", highlight=False)
        if start is not None:
            log.stdout().print(f"{start:.1f} s from the command to the first token")
        for share in _share(answers).values():
            log.stdout().print(f"the server has {share:.3f} of the engine's throughput")


def _is_url(target: str) -> bool:
    return target.startswith(("http://", "https://"))


def _answers(
    target: str, load: Load, rounds: int, engine: bool, key: str | None
) -> tuple[dict[str, list[list[RequestRecord]]], float | None]:
    from ingot.bench.serve import run_on_engine, send_over_http, start_server

    here = _engine(Path(target)) if engine else None
    found: dict[str, list[list[RequestRecord]]] = (
        {"server": [], "engine": []} if here else {"server": []}
    )
    server = nullcontext((target, None)) if _is_url(target) else start_server(Path(target))
    total = load.workload.num_requests * rounds * len(found)
    with server as (address, start), log.progress("requests", total) as bar:
        for _ in range(rounds):
            found["server"].append(send_over_http(address, load, key, bar.advance))
            if here:
                found["engine"].append(run_on_engine(here, load, bar.advance))
    return found, start


def _engine(directory: Path) -> Engine:
    from ingot.interop import hf
    from ingot.serving.engine.engine import Engine

    return Engine(hf.load(directory))


def _share(answers: dict[str, list[list[RequestRecord]]]) -> dict[str, float]:
    """What the server has of the engine's throughput, as the median of the rounds."""
    from ingot.bench.serve import output_rate

    if "engine" not in answers:
        return {}
    pairs = zip(answers["server"], answers["engine"], strict=True)
    return {"share_of_engine": round(median(output_rate(a) / output_rate(b) for a, b in pairs), 4)}
