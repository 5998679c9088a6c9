"""`ingot compare`: compare a model with another engine or with another copy of itself."""

from __future__ import annotations

import json as json_format
import math
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from ingot.cli import escape_markup
from ingot.cli.tables import new_table
from ingot.core import log
from ingot.core.errors import IngotError
from ingot.core.paths import write_atomic

if TYPE_CHECKING:
    from rich.table import Table

    from ingot.observe.drift import Comparison, DistributionDrift, OpDrift

_MAX_OUTLIERS = 5


def compare(
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")],
    *,
    other: Annotated[str, tyro.conf.arg(name="with", metavar="ENGINE|URL|DIR")],
    text: Path | None = None,
    tokens: int = 256,
    dtype: Literal["bfloat16", "float16", "float32"] | None = None,
    device: str = "auto",
    python: Path | None = None,
    output: Path | None = None,
    json: tyro.conf.FlagCreatePairsOff[bool] = False,
) -> None:
    """Compare the next-token distributions of a model with those of another engine, a server or
    another copy of the model, on the same token ids; and op by op where that is possible.

    Examples: `ingot compare smollm2 --with transformers --output drift` for figures and a plot,
    `ingot compare smollm2 --with smollm2-copy` for another model directory,
    `ingot compare smollm2 --with http://localhost:8000` for a server of OpenAI's API,
    `ingot compare smollm2 --with vllm --python venv/bin/python` for vLLM in its own environment.

    Args:
        model: A model directory, or ORG/NAME on the Hugging Face hub.
        other: transformers, vllm, the address of a server, or a model directory.
        text: A file with the text to compare on; by default prose, code and numbers.
        tokens: Number of positions.
        dtype: Dtype on both sides; that of the files by default. Rounding mostly disappears in
            float32, other errors do not.
        device: Where to compute: auto, cpu, cuda, cuda:1.
        python: The interpreter of the environment that has vLLM.
        output: Write compare.json, compare.png and compare.svg to this directory.
        json: Print JSON instead of tables.
    """
    from ingot.observe import drift_plot, plot
    from ingot.workflows import compare as workflow

    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        plot.check(output / "compare.png")
    content = None if text is None else _read(text)
    with log.progress("loading", None) as bar:
        comparison = workflow.compare(
            model,
            other,
            text=content,
            tokens=tokens,
            dtype=dtype,
            device=device,
            python=python,
            on_status=bar.describe,
        )
    if output is not None:
        write_atomic(output / "compare.json", _as_json(comparison))
        drift_plot.draw(comparison, [output / f"compare{suffix}" for suffix in plot.SUFFIXES])
    if json:
        print(_as_json(comparison))  # noqa: T201
    else:
        _print(comparison)


def _read(path: Path) -> str:
    from ingot.workflows.compare import MAX_TEXT_BYTES

    try:
        with path.open("rb") as file:
            return file.read(MAX_TEXT_BYTES).decode("utf-8", "replace")
    except OSError as error:
        raise IngotError(
            f"cannot read {path}: {error.strerror or error}", hint="name a text file"
        ) from error


def _as_json(comparison: Comparison) -> str:
    return json_format.dumps(comparison.as_dict(), indent=2)


def _print(comparison: Comparison) -> None:
    console = log.stdout()
    drift = comparison.distribution
    console.print(
        f"[bold]{escape_markup(comparison.model)}[/] compared with "
        f"[bold]{escape_markup(comparison.other)}[/]: {drift.positions:,} positions, "
        f"{comparison.dtype}",
        highlight=False,
    )
    console.print(_distribution_table(drift, comparison.lm_head))
    if comparison.ops and not comparison.bitwise_equal:
        console.print(_layer_table(comparison))
    for line in _conclusions(comparison):
        console.print(line, highlight=False)


def _distribution_table(drift: DistributionDrift, head: DistributionDrift | None) -> Table:
    bound = "at least " if drift.is_lower_bound else ""
    table = new_table(("",), ("mean", "p99", "max"), show_edge=False)
    table.add_row(f"KL(first || second) {bound}".strip(), _e(drift.kl_mean), "", _e(drift.kl_max))
    table.add_row(f"total variation {bound}".strip(), _e(drift.tv_mean), "", _e(drift.tv_max))
    table.add_row(
        "difference of the next token's log-probability",
        _e(drift.logprob_mean),
        _e(drift.logprob_p99),
        _e(drift.logprob_max),
    )
    if head is not None:
        table.add_row("LM head alone: KL", _e(head.kl_mean), "", _e(head.kl_max))
    table.add_row("most likely token is the same", _percent(drift.argmax_agreement), "", "")
    table.add_row("next token's ratio within 1 %", _percent(drift.within_1_percent), "", "")
    table.add_row("next token's ratio within 5 %", _percent(drift.within_5_percent), "", "")
    return table


def _layer_table(comparison: Comparison) -> Table:
    """Build the table of the layers: errors of the sublayers, and the op that adds most."""
    headings = ("attention norm", "attention", "MLP norm", "MLP")
    table = new_table(("layer",), (*headings, "largest isolated", "op"), show_edge=False)
    for layer, group in groupby(comparison.ops, key=lambda op: op.layer):
        ops = list(group)
        if layer is None:
            for op in ops:
                equal = "-" if op.isolated_bitwise_equal else op.name
                table.add_row(op.name, "", "", "", _e(op.error), _e(op.isolated_error), equal)
            continue
        by_kind = {op.kind: op for op in ops}
        largest = max(ops, key=lambda op: op.isolated_error)
        attention = by_kind.get("attention_residual", by_kind["attention.out"])
        table.add_row(
            str(layer),
            _e(by_kind["attention_norm"].error),
            _e(attention.error),
            _e(by_kind["mlp_norm"].error),
            _e(ops[-1].error),
            _e(largest.isolated_error),
            "-" if largest.isolated_bitwise_equal else largest.kind,
        )
    return table


def _conclusions(comparison: Comparison) -> list[str]:
    lines: list[str] = []
    if comparison.ops and not comparison.bitwise_equal:
        lines.append(
            "Relative errors of the results of each sublayer, with those of all ops before; "
            "isolated: of an op that gets the first model's inputs."
        )
    if comparison.bitwise_equal:
        count = f"{len(comparison.ops):,} ops and {comparison.distribution.positions:,} positions"
        what = f"all results of {count}" if comparison.ops else "all reported log-probabilities"
        lines.append(f"[bold]bitwise equal[/]: {what}")
    first = comparison.first_difference
    if first is not None:
        differing = sum(not op.isolated_bitwise_equal for op in comparison.ops)
        lines.append(
            f"first op that computes other bits from the same inputs: [bold]{first.name}[/]; "
            f"{differing:,} of {len(comparison.ops):,} ops do"
        )
    outliers = comparison.outliers
    lines += [_describe(op, ratio) for op, ratio in outliers[:_MAX_OUTLIERS]]
    if len(outliers) > _MAX_OUTLIERS:
        lines.append(f"and {len(outliers) - _MAX_OUTLIERS:,} more outliers: see --json")
    if comparison.ops and comparison.dtype != "float32" and not comparison.same_kernels:
        lines.append(
            f"isolated errors up to {_e(comparison.rounding_error)} are rounding in "
            f"{comparison.dtype}; --dtype float32 shows smaller ones"
        )
    if comparison.note:
        lines.append(escape_markup(comparison.note))
    return lines


def _describe(op: OpDrift, ratio: float) -> str:
    how = "where other layers have none" if math.isinf(ratio) else f"{ratio:.0f}x the median"
    if op.layer is None and math.isinf(ratio):
        how = "more than rounding"
    return (
        f"[bold red]outlier:[/] [bold]{op.name}[/]: isolated error {_e(op.isolated_error)}, "
        f"channel {op.channel:,} {_e(op.channel_error)}; {how}"
    )


def _e(value: float | None) -> str:
    """Format an error.

    >>> _e(0.000123), _e(0.0), _e(None)
    ('1.2e-04', '0', '-')
    """
    return "-" if value is None else "0" if value == 0 else f"{value:.1e}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
