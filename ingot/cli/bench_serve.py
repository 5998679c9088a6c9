"""`ingot bench serve`: send load to a server and measure latency and throughput."""

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
from ingot.serving.simulate import SLO
from ingot.serving.workload import RequestWorkload

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
    """Send load to a server and measure what its clients see: TTFT, inter-token latency,
    throughput, and goodput under an SLO.

    Examples: `ingot bench serve smollm2` starts a server for the model, `ingot bench serve smollm2
    --clients 32` has 32 concurrent clients, `ingot bench serve smollm2 --clients 32 --engine
    --rounds 5` compares with the engine without HTTP, `ingot bench serve http://127.0.0.1:8000
    --request-rate 8 --plot latency.png` uses a running server.

    Args:
        target: A model directory, or the address of a running server.
        clients: Number of concurrent clients (closed loop); without it, requests are sent at
            --request-rate (open loop).
        workload: The requests, with the options of `ingot simulate`.
        slo: Latency objectives; requests that meet them count as goodput.
        rounds: Number of times the whole load is sent.
        engine: Also run the load on the engine without HTTP, interleaved.
        key: The API key, if the server requires one.
        plot: Draw latencies and throughput of the last round into this file, .png or .svg.
        json: Print JSON instead of text.
    """
    from ingot.bench import latency as plots
    from ingot.bench.results import RunInfo
    from ingot.bench.serve import Load, summarize
    from ingot.observe.plot import check

    load, run = Load(workload=workload, clients=clients), RunInfo.now(ingot.__version__)
    if engine and _is_url(target):
        raise ConfigError(
            "--engine: needs a model directory, got an address",
            hint="give the directory of a model",
        )
    if plot:
        check(plot)
    records, start = _run(target, load, rounds, engine, key)
    if plot:
        plots.draw(records["server"][-1], slo, run, plot)
    reports = {system: summarize(of, slo) for system, of in records.items()}
    if json:
        settings = {"run": run, "load": load, "slo": slo, **reports}
        content = {name: dataclasses.asdict(value) for name, value in settings.items()}
        content |= {"start_s": start, **_throughput_ratio(records)}
        print(json_format.dumps(content, indent=2))  # noqa: T201
    else:
        for system, report in reports.items():
            log.stdout().print(report_table((system, report), slo), "", highlight=False)
        if start is not None:
            log.stdout().print(f"first token {start:.1f} s after starting the server")
        for ratio in _throughput_ratio(records).values():
            log.stdout().print(f"throughput of the server / of the engine: {ratio:.3f}")


def _is_url(target: str) -> bool:
    return target.startswith(("http://", "https://"))


def _run(
    target: str, load: Load, rounds: int, engine: bool, key: str | None
) -> tuple[dict[str, list[list[RequestRecord]]], float | None]:
    from ingot.bench.serve import run_on_engine, send_over_http, start_server

    local = _load_engine(Path(target)) if engine else None
    records: dict[str, list[list[RequestRecord]]] = (
        {"server": [], "engine": []} if local else {"server": []}
    )
    server = nullcontext((target, None)) if _is_url(target) else start_server(Path(target))
    total = load.workload.num_requests * rounds * len(records)
    with server as (address, start), log.progress("requests", total) as bar:
        for _ in range(rounds):
            records["server"].append(send_over_http(address, load, key, bar.advance))
            if local:
                records["engine"].append(run_on_engine(local, load, bar.advance))
    return records, start


def _load_engine(directory: Path) -> Engine:
    from ingot.interop import hf
    from ingot.serving.engine.engine import Engine

    return Engine(hf.load(directory))


def _throughput_ratio(records: dict[str, list[list[RequestRecord]]]) -> dict[str, float]:
    """Return the server's throughput over the engine's: median of the rounds."""
    from ingot.bench.serve import output_rate

    if "engine" not in records:
        return {}
    pairs = zip(records["server"], records["engine"], strict=True)
    return {"throughput_ratio": round(median(output_rate(a) / output_rate(b) for a, b in pairs), 4)}
