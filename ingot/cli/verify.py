"""`ingot verify`: does serving this model compute what training computes, bit for bit?"""

from __future__ import annotations

import dataclasses
import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from ingot.cli import escape_markup
from ingot.core import lineage, log
from ingot.core.device import DeviceType, detect, resolve

if TYPE_CHECKING:
    from ingot.serving.verify import Certificate


def verify(
    directory: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")],
    schedules: int = 1000,
    seed: int = 0,
    device: DeviceType = "cpu",
    json: tyro.conf.FlagCreatePairsOff[bool] = False,
) -> None:
    """Serve a model under many random schedules, and compare every bit of every log-probability
    with that of a plain packed forward, which is what training runs.

    The certificate is written into the directory's ingot.json. A difference is an exit code of 1.

    Examples: `ingot verify smollm2`, `ingot verify smollm2 --schedules 50` for a first look,
    `ingot verify smollm2 --json` for machines.

    Args:
        directory: A model directory, as `ingot import` makes.
        schedules: How many to try.
        seed: Draws the texts and the schedules.
        device: Where to compute; the certificate holds for that kind of processor.
        json: Print JSON instead of lines.
    """
    from ingot.cli.generate import load
    from ingot.serving import verify as serving

    resolve(device)
    decoder = load(directory, device).decoder
    with log.progress("verifying", schedules) as bar:
        certificate = serving.verify(
            decoder, schedules=schedules, seed=seed, progress=lambda: bar.advance()
        )
    facts = as_facts(certificate, device)
    lineage.append(directory, "verify", **facts)
    if json:
        print(json_format.dumps(facts, indent=2))  # noqa: T201
    else:
        _print_lines(certificate)
    if not certificate.bitwise_equal:
        raise SystemExit(1)


def as_facts(certificate: Certificate, device: DeviceType = "cpu") -> dict[str, Any]:
    """The certificate, as it is kept: with the processor and versions it holds for."""
    import torch

    return {
        "schedules": certificate.schedules,
        "mismatches": certificate.mismatches,
        "bitwise_equal": certificate.bitwise_equal,
        **{
            name: value
            for name, value in dataclasses.asdict(certificate).items()
            if name not in ("schedules", "mismatches")
        },
        **_processor(device),
        "torch": str(torch.__version__),
    }


def _processor(device: DeviceType) -> dict[str, str | None]:
    """What computed: the bits are another processor's otherwise."""
    if device == "cpu":
        cpu = detect().cpu
        return {"cpu": cpu.name, "isa": cpu.isa[0]}
    gpu = detect().gpus[0]
    return {"gpu": gpu.name, "capability": gpu.capability}


def _print_lines(certificate: Certificate) -> None:
    console, found = log.stdout(), certificate
    console.print(
        f"{found.logprobs:,} log-probabilities in {found.schedules:,} schedules: "
        + ("every bit equal" if found.bitwise_equal else f"{found.mismatches:,} schedules differ"),
        highlight=False,
    )
    console.print(
        f"{found.steps:,} steps, {found.preemptions:,} preemptions, {found.cached_tokens:,} tokens "
        f"found in the cache, {found.accepted_tokens:,} of {found.draft_tokens:,} drafts right; "
        f"{found.dtype}, {' and '.join(map(str, found.threads))} threads",
        highlight=False,
    )
    if found.difference:
        console.print(f"[bold red]first difference:[/] {escape_markup(found.difference[:2000])}")
