"""`ingot ops`: list the ops, or describe one of them."""

from __future__ import annotations

import json as json_format
from typing import Annotated, Any

import tyro

from ingot.cli.tables import new_table
from ingot.core.errors import UnknownName
from ingot.core.log import stdout


def ops(
    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[NAME]")] = None,
    json: tyro.conf.FlagCreatePairsOff[bool] = False,
) -> None:
    """List every op: the providers that can run here, whether they are batch-invariant, the
    tolerance of a result, and the bytes and FLOPs of a call.

    Examples: `ingot ops` for all, `ingot ops norm` for a family, `ingot ops rms_norm` for one
    with its reference, `ingot ops --json` for scripts.

    Args:
        name: Show this op with its reference, or this family.
        json: Print JSON instead of a table.
    """
    from ingot.ops.description import page, row, rows
    from ingot.ops.record import registry

    name = name and name.lower()
    shown = [row for row in rows() if name in (None, row["op"], row["family"])]
    if name and not shown:
        raise UnknownName("op", name, {*registry(), *(row["family"] for row in rows())})
    if json:
        content = row(registry()[name]) if name in registry() else shown
        print(json_format.dumps(content, indent=2))  # noqa: T201
    elif name in registry():
        _print_markdown(page(registry()[name], with_family=True))
    else:
        _print_table(shown)


def _print_table(rows: list[dict[str, Any]]) -> None:
    table = new_table(("op", "here", "tolerance"))
    for heading in ("bytes", "FLOPs"):
        table.add_column(heading, overflow="fold")
    family = None
    for row in rows:
        if family not in (None, row["family"]):
            table.add_section()
        family = row["family"]
        costs = (shorten_cost(formula) for formula in row["cost"].values())
        table.add_row(f"[bold]{row['op']}[/]", providers(row), format_tolerance(row), *costs)
    stdout().print(table)
    stdout().print(
        f"{len(rows)} ops. here: providers other than the reference, by priority; = is "
        "batch-invariant (the bits of a row do not depend on the rest of the batch), ^ is "
        "preferred on a GPU for some calls unless batch invariance is requested. tolerance: "
        "maximum error of a result and of a gradient, as a multiple of eager PyTorch's. In a "
        "cost, a tensor's name is its bytes or elements.",
        highlight=False,
    )


def providers(row: dict[str, Any]) -> str:
    """List the providers other than the reference by priority, with their marks."""
    marked = [
        f"{p['name']}{'=' if p['batch_invariant'] else ''}{'^' if p['preferred_for'] else ''}"
        for p in row["providers"]
    ]
    return " ".join(name for name in marked if name != "reference") or "-"


def shorten_cost(formula: str) -> str:
    """Shorten the formula of a cost.

    >>> shorten_cost("2 * x.nbytes + weight.nbytes")
    '2 x + weight'
    """
    return formula.replace(".nbytes", "").replace(".numel()", "").replace(" * ", " ")


def format_tolerance(row: dict[str, Any]) -> str:
    """Format the tolerance of the result and of the gradient."""
    tolerance = row["tolerance"]
    backward = f"{tolerance['backward']:g}x" if row["differentiable"] else "-"
    return f"{tolerance['forward']:g}x {backward}"


def _print_markdown(text: str) -> None:
    from rich.markdown import Markdown

    stdout().print(Markdown(text))
