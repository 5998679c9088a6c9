"""Fit the constants of `ingot plan` to the published runs, and write its tables of errors.

    python -m tools.plan_tables            # fit: ingot/planning/constants.json, docs/plan.md
    python -m tools.plan_tables --blind    # only predict the blind runs with the kept constants
    python -m tools.plan_tables --nested   # also choose the structure without each source (8 min)

reads `benchmarks/plan/` and replaces what is between the markers in docs/plan.md. A test fails when
the page or the constants do not match the data.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ingot.core.paths import write_atomic
from ingot.planning.accuracy import (
    Fixed,
    OwnRunErrors,
    after_one_own_run,
    constant_mfu,
    coverage,
    fit_model,
    leave_one_out,
    memory_errors,
    nested_leave_one_out,
    rankings,
    resample,
    summarize,
)
from ingot.planning.cost import Constants
from ingot.planning.fit import (
    CONSTANTS_FILE,
    FITTED,
    FittedModel,
    Floats,
    dump_fitted,
    fit,
    load_fitted,
    log_errors,
)
from ingot.planning.published import MeasuredRun, read_activation_memory, read_runs

ROOT = Path(__file__).parent.parent
DATA, PAGE = ROOT / "benchmarks/plan", ROOT / "docs/plan.md"
RUNS, BLIND = DATA / "published_runs.csv", DATA / "blind_runs.csv"
STRUCTURES: dict[str, Fixed] = {
    "all constants fitted": {},
    "no operand bytes": {"operands": 0.0},
    "no slowdown at scale": {"scale": 0.0},
    "no cost of hidden communication": {"overlap": 0.0},
    "no all-to-all": {"all_to_all": 0.0},
    "bandwidths of data sheets": {"nvlink": 0.7, "network": 0.8},
    "attention rates of papers": {"attention": 0.76},
    "fp8 as efficient as bf16": {"fp8": 1.0},
    "no launch time of experts": {"moe_launch": 1e-6},
    "eager as fast as fused": {"eager": 1.0},
}
"""Structures to choose from: constants that are fixed instead of fitted."""
ONE_FRAMEWORK = {"A", "E", "F", "G1", "G2", "L4"}
"""Sources whose runs used releases of the same framework, Megatron-Core and NeMo."""
_MIN_ROWS = 8


@cache
def published() -> tuple[list[MeasuredRun], Floats, FittedModel]:
    """Return the runs, their log errors when their source is left out, and the fitted model."""
    runs = read_runs(RUNS)
    logs = leave_one_out(runs)
    return runs, logs, fit_model(runs, fit(runs), logs)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def error_table() -> str:
    """Return the errors by kind of run: of the fit, of unseen sources, after one own run."""
    runs, logs, fitted = published()
    inside, after = log_errors(runs, fitted.constants), after_one_own_run(runs, logs)
    kinds: dict[str, list[bool]] = {
        "**dense**": [not run.is_moe for run in runs],
        "**mixture of experts**": [run.is_moe for run in runs],
        "dense, bf16": [not run.is_moe and _is_bf16(run) for run in runs],
        "dense, fp8 and fp4": [not run.is_moe and not _is_bf16(run) for run in runs],
    }
    for low, high in ((1, 16), (17, 128), (129, 1024), (1025, 10**6)):
        name = f"{low:,} to {high:,} GPUs" if high < 10**6 else f"more than {low - 1:,} GPUs"
        kinds[f"dense, {name}"] = [not run.is_moe and low <= run.plan.gpus <= high for run in runs]
    for gpu in dict.fromkeys(run.gpu for run in runs):
        kinds[f"dense, {gpu}"] = [not run.is_moe and run.gpu == gpu for run in runs]
    rows = [
        _error_row(name, np.array(mask), after, logs, inside)
        for name, mask in kinds.items()
        if sum(mask) >= _MIN_ROWS
    ]
    return _table(("runs", "number", "fitted", "source left out", "and one own run"), rows)


def _is_bf16(run: MeasuredRun) -> bool:
    return run.workload.precision == "bf16"


def _error_row(
    name: str, mask: npt.NDArray[np.bool_], after: OwnRunErrors, logs: Floats, inside: Floats
) -> list[str]:
    cells = (summarize(inside[mask]), summarize(logs[mask]), summarize(*after.of(mask)))
    return [name, str(mask.sum()), *map(str, cells)]


def source_table() -> str:
    """Return the errors of each source, predicted without it."""
    runs, logs, _ = published()
    rows: list[list[str]] = []
    for source in dict.fromkeys(run.source for run in runs):
        own = np.array([run.source == source for run in runs])
        bias = 100 * (np.exp(np.median(logs[own])) - 1)
        rows.append([source, str(own.sum()), str(summarize(logs[own])), f"{bias:+.0f}"])
    return _table(("source", "number", "source left out", "bias, %"), rows)


def ranking_table(path: Path) -> str:
    """Return how the alternatives in each group were ordered."""
    if path == RUNS:
        runs, logs, _ = published()
    else:
        runs = read_runs(path)
        logs = log_errors(runs, load_fitted().constants)
    groups = rankings(runs, logs)
    rows = [
        [
            group.name,
            str(group.plans),
            f"{group.tau:.2f}",
            f"{group.regret:.1%}",
            f"{group.rule_regret:.1%}",
        ]
        for group in groups
    ]
    means = [np.mean([getattr(g, k) for g in groups]) for k in ("tau", "regret", "rule_regret")]
    total = str(sum(group.plans for group in groups))
    rows.append(["**mean**", total, f"{means[0]:.2f}", f"{means[1]:.1%}", f"{means[2]:.1%}"])
    headings = ("group", "plans", "tau", "lost by the first choice", "lost by the rule")
    return _table(headings, rows)


def memory_table() -> str:
    """Return the errors of predicted memory."""
    runs, _, _ = published()
    ratios = memory_errors(runs, read_activation_memory(DATA / "published_memory.csv", runs))
    names = {
        "peak": "peak of a run (torchtitan, nanotron)",
        "states": "weights, gradients and optimizer (Megatron)",
        "activations": "activations (Megatron)",
    }
    rows = [
        [
            text,
            str(len(ratios[key])),
            f"{100 * np.median(np.abs(ratios[key] - 1)):.1f}",
            f"{ratios[key].min():.2f} to {ratios[key].max():.2f}",
        ]
        for key, text in names.items()
    ]
    return _table(("memory", "number", "median error, %", "predicted / measured"), rows)


def interval_table() -> str:
    """Return the intervals, and the share of runs inside: of unseen sources, and of blind runs."""
    runs, logs, fitted = published()
    blind = read_runs(BLIND)
    ratios = np.exp(-log_errors(blind, load_fitted().constants))
    rows: list[list[str]] = []
    for kind, is_moe in (("dense", False), ("mixture of experts", True)):
        mask = np.array([run.is_moe is is_moe for run in runs])
        some = [run for run in runs if run.is_moe is is_moe]
        low, high = fitted.interval(is_moe=is_moe, is_calibrated=False)
        own = ratios[[run.is_moe is is_moe for run in blind]]
        shares = (*coverage(some, logs[mask]), np.mean((low <= own) & (own <= high)))
        rows.append([kind, _range(low, high), *(f"{share:.0%}" for share in shares)])
        low, high = fitted.interval(is_moe=is_moe, is_calibrated=True)
        rows.append([f"{kind}, after one own run", _range(low, high), "", "", ""])
    headings = (
        "interval of 80 %",
        "measured over predicted",
        "runs",
        "mean of sources",
        "blind runs",
    )
    return _table(headings, rows)


def _range(low: float, high: float) -> str:
    return f"{low - 1:+.0%} to {high - 1:+.0%}"


def resampling_table() -> str:
    """Return how far the errors depend on which sources were published."""
    runs, logs, _ = published()
    rows: list[list[str]] = []
    for kind, is_moe in (("dense", False), ("mixture of experts", True)):
        mask = np.array([run.is_moe is is_moe for run in runs])
        ranges = resample([run for run in runs if run.is_moe is is_moe], logs[mask])
        rows.append([kind, *(f"{100 * low:.1f} to {100 * high:.1f}" for low, high in ranges)])
    return _table(("runs", "median", "90th percentile"), rows)


def constants_table() -> str:
    """Return the fitted constants, and their range when each source is left out."""
    runs, _, fitted = published()
    sources = dict.fromkeys(run.source for run in runs)
    folds = [asdict(fit([run for run in runs if run.source != name])) for name in sources]
    rows = [
        [
            f"`{name}`",
            f"{getattr(Constants(), name):.3g}",
            f"{getattr(fitted.constants, name):.3g}",
            f"{min(f[name] for f in folds):.3g} to {max(f[name] for f in folds):.3g}",
        ]
        for name in FITTED
    ]
    return _table(("constant", "prior", "fitted", "with a source left out"), rows)


def ablation_table() -> str:
    """Return the errors of models without one of the terms, each source left out."""
    runs, _, _ = published()
    dense = np.array([not run.is_moe for run in runs])
    rows: list[list[str]] = []
    found = {name: leave_one_out(runs, fixed) for name, fixed in STRUCTURES.items()}
    for width in (3, 10):
        found[f"priors {width} times as wide"] = leave_one_out(runs, prior_width=float(width))
    groups = ["vendor" if run.source in ONE_FRAMEWORK else run.source for run in runs]
    found["A, E, F, G1, G2, L4 left out together"] = leave_one_out(runs, groups=groups)
    found["constant MFU instead of the model"] = constant_mfu(runs)
    for name, logs in found.items():
        rows.append([name, str(summarize(logs[dense])), str(summarize(logs[~dense]))])
    return _table(("structure", "dense", "mixture of experts"), rows)


def blind_table() -> str:
    """Return the errors of the kept constants on runs that were collected after the others."""
    runs = read_runs(BLIND)
    logs = log_errors(runs, load_fitted().constants)
    groups = {"**dense**": [not run.is_moe for run in runs]}
    groups["**mixture of experts**"] = [run.is_moe for run in runs]
    for source in dict.fromkeys(run.source for run in runs):
        groups[source] = [run.source == source for run in runs]
    rows: list[list[str]] = []
    for name, mask in groups.items():
        own = logs[np.array(mask)]
        bias = 100 * (np.exp(np.median(own)) - 1)
        rows.append([name, str(len(own)), str(summarize(own)), f"{bias:+.0f}"])
    return _table(("runs", "number", "error", "bias, %"), rows)


def nested_table() -> str:
    """Return the errors when the structure is chosen without each source, and the choices."""
    runs, _, _ = published()
    logs, chosen = nested_leave_one_out(runs, STRUCTURES)
    dense = np.array([not run.is_moe for run in runs])
    lines = [f"dense {summarize(logs[dense])}, experts {summarize(logs[~dense])}"]
    return "\n".join(lines + [f"{source}: {name}" for source, name in chosen.items()])


TABLES = {
    "errors": error_table,
    "resampling": resampling_table,
    "sources": source_table,
    "rankings": lambda: ranking_table(RUNS),
    "memory": memory_table,
    "intervals": interval_table,
    "constants": constants_table,
    "ablation": ablation_table,
    "blind": blind_table,
    "blind rankings": lambda: ranking_table(BLIND),
}
"""The tables of the page by the name in their marker."""


def fill(page: str, names: Sequence[str]) -> str:
    """Replace the tables of a page between their markers.

    >>> fill("<!-- unknown -->", [])
    '<!-- unknown -->'
    """
    for name in names:
        begin, end = f"<!-- plan {name} -->", f"<!-- /plan {name} -->"
        head, _, rest = page.partition(begin)
        _, _, tail = rest.partition(end)
        page = f"{head}{begin}\n{TABLES[name]()}\n{end}{tail}"
    return page


def main(options: Sequence[str]) -> None:
    """Write the constants and the tables."""
    blind = [name for name in TABLES if name.startswith("blind")]
    if "--blind" not in options:
        write_atomic(CONSTANTS_FILE, dump_fitted(published()[2]))
        load_fitted.cache_clear()
    names = blind if "--blind" in options else [name for name in TABLES if name not in blind]
    if PAGE.exists():
        write_atomic(PAGE, fill(PAGE.read_text(), names))
    if "--nested" in options:
        sys.stdout.write(nested_table() + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
