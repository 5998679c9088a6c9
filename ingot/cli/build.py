"""`ingot build`: compile the CPU kernels ahead of time."""

from __future__ import annotations

import json as json_format
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import tyro

from ingot.cli.tables import new_grid
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
    """Compile the CPU kernels for this machine now instead of at their first use.

    Kernels that are compiled already are kept. For a container, run this while the image is built.
    INGOT_ISA selects another instruction-set tier than the best one of this CPU.

    Examples: `ingot build` for all, `ingot build norm linear` for two families of ops,
    `ingot build --json` for scripts.

    Args:
        families: Only these families of ops.
        json: Print JSON instead of text.
    """
    from ingot.kernels.cpu import build as kernels

    for family in families:
        if family not in kernels.FAMILIES:
            raise UnknownName("family of CPU kernels", family, kernels.FAMILIES)
    wanted = families or kernels.FAMILIES
    start = time.monotonic()
    with progress("building", len(wanted)) as bar:
        built = kernels.build(wanted, done=lambda family: bar.advance())
    if json:
        print(json_format.dumps(report(built), indent=2))  # noqa: T201
    else:
        _print_lines(built, time.monotonic() - start)


def report(built: Sequence[Built]) -> dict[str, object]:
    """Return everything that `--json` prints."""
    libraries = [
        {"family": one.family, "path": str(one.path), "seconds": one.seconds} for one in built
    ]
    return {"tier": detect().cpu.isa[0], "libraries": libraries}


def _print_lines(built: Sequence[Built], seconds: float) -> None:
    lines = [
        (one.family, "up to date" if one.seconds is None else f"built in {one.seconds:.1f} s")
        for one in built
    ]
    console, new = stdout(), sum(one.seconds is not None for one in built)
    console.print(new_grid(lines), highlight=False)
    console.print(
        f"\n{new} built, {len(built) - new} up to date, in {seconds:.1f} s, for the tier "
        f"{detect().cpu.isa[0]}",
        highlight=False,
    )
    console.print(f"in {paths.cache('kernels')}", highlight=False, soft_wrap=True)
