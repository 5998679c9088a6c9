"""`ingot ops`: the catalogue, or one op of it."""

from __future__ import annotations

import json as json_format
from typing import Annotated, Any

import tyro

from ingot.core.errors import UnknownName
from ingot.core.log import stdout


def ops(
    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[NAME]")] = None,
    json: tyro.conf.FlagCreatePairsOff[bool] = False,
) -> None:
    """Show every op: the providers that can run here, whether they are exact, how far a result
    may be off, and what a call must move and compute.

    Examples: `ingot ops` for all, `ingot ops norm` for a family, `ingot ops rms_norm` for one
    with its reference, `ingot ops --json` for machines.

    Args:
        name: Show this op with its reference, or this family.
        json: Print JSON instead of a table.
    """
    from ingot.ops.description import page, row, rows
    from ingot.ops.op import registry

    name = name and name.lower()
    shown = [row for row in rows() if name in (None, row["op"], row["family"])]
    if name and not shown:
        raise UnknownName("op", name, {*registry(), *(row["family"] for row in rows())})
    if json:
        found = row(registry()[name]) if name in registry() else shown
        print(json_format.dumps(found, indent=2))  # noqa: T201
    elif name in registry():
        _print_markdown(page(registry()[name], with_family=True))
    else:
        _print_table(shown)


def _print_table(catalogue_rows: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("op", "here", "error"):
        table.add_column(heading, no_wrap=True)
    for heading in ("bytes", "FLOPs"):
        table.add_column(heading, overflow="fold")
    family = None
    for row in catalogue_rows:
        if family not in (None, row["family"]):
            table.add_section()
        family = row["family"]
        costs = (short(formula) for formula in row["cost"].values())
        table.add_row(f"[bold]{row['op']}[/]", providers(row), bound(row), *costs)
    stdout().print(table)
    stdout().print(
        f"{len(catalogue_rows)} ops. here: providers besides the reference; = marks an exact one, "
        "where the bits of a row do not depend on the batch, ^ one that comes first on a GPU for "
        "some calls unless exactness is asked for. error: of a result and of a gradient, "
        "at most so many times plain PyTorch's. In a cost a tensor stands for its bytes or "
        "elements.",
        highlight=False,
    )


def providers(row: dict[str, Any]) -> str:
    """The providers besides the reference in order of preference, exact ones marked."""
    marked = [
        f"{p['name']}{'=' if p['batch_invariant'] else ''}{'^' if p['preferred_for'] else ''}"
        for p in row["providers"]
    ]
    return " ".join(name for name in marked if name != "reference") or "-"


def short(formula: str) -> str:
    """A cost without what can be guessed.

    >>> short("2 * x.nbytes + weight.nbytes")
    '2 x + weight'
    """
    return formula.replace(".nbytes", "").replace(".numel()", "").replace(" * ", " ")


def bound(row: dict[str, Any]) -> str:
    """Forward and backward tolerance."""
    tolerance = row["tolerance"]
    backward = f"{tolerance['backward']:g}x" if row["differentiable"] else "-"
    return f"{tolerance['forward']:g}x {backward}"


def _print_markdown(text: str) -> None:
    from rich.markdown import Markdown

    stdout().print(Markdown(text))
