"""`ingot build`: the CPU kernels, ahead of their first use."""

from __future__ import annotations

import json as json_format
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import tyro

from ingot.core import paths
from ingot.core.device import detect
from ingot.core.errors import UnknownName
from ingot.core.log import progress, stdout

if TYPE_CHECKING:
    from ingot.kernels.cpu.build import Built


def build(
    families: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[FAMILY ...]")
    ] = (),
    json: tyro.conf.FlagCreatePairsOff[bool] = False,
) -> None:
    """Compile the CPU kernels for this machine now, so that no first call waits for it.

    Nothing is compiled twice: what is there already is kept. In a container, run it while the
    image is made. INGOT_ISA names another tier than the best of this CPU.

    Examples: `ingot build` for all, `ingot build norm linear` for two families of ops,
    `ingot build --json` for machines.

    Args:
        families: Build these families of ops; all of them if none is named.
        json: Print JSON instead of lines.
    """
    from ingot.kernels.cpu import build as kernels

    for family in families:
        if family not in kernels.FAMILIES:
            raise UnknownName("family of CPU kernels", family, kernels.FAMILIES)
    wanted = families or kernels.FAMILIES
    start = time.monotonic()
    with progress("building", len(wanted)) as bar:
        found = kernels.build(wanted, done=lambda family: bar.advance())
    if json:
        print(json_format.dumps(report(found), indent=2))  # noqa: T201
    else:
        _print_lines(found, time.monotonic() - start)


def report(found: Sequence[Built]) -> dict[str, object]:
    """All of it, as `--json` prints it."""
    libraries = [
        {"family": one.family, "path": str(one.path), "seconds": one.seconds} for one in found
    ]
    return {"tier": detect().cpu.isa[0], "libraries": libraries}


def _print_lines(found: Sequence[Built], seconds: float) -> None:
    from rich.table import Table

    table = Table.grid(padding=(0, 3))
    for one in found:
        how = "there already" if one.seconds is None else f"built in {one.seconds:.1f} s"
        table.add_row(f"[bold]{one.family}[/]", how)
    console, built = stdout(), sum(one.seconds is not None for one in found)
    console.print(table, highlight=False)
    console.print(
        f"\n{built} built, {len(found) - built} there already, in {seconds:.1f} s, for the tier "
        f"{detect().cpu.isa[0]}",
        highlight=False,
    )
    console.print(f"in {paths.cache('kernels')}", highlight=False, soft_wrap=True)
