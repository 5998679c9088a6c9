"""`ingot verify`: check that serving a model computes what training computes, bit for bit."""

from __future__ import annotations

import dataclasses
import json as json_format
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from ingot.cli import escape_markup
from ingot.core import lineage, log
from ingot.core.device import detect, resolve
from ingot.core.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from ingot.serving.verify import Certificate


def verify(
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL|RECIPE")],
    overrides: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[KEY=VALUE ...]")
    ] = (),
    schedules: int = 1000,
    seed: int = 0,
    adapter: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
    device: str = "auto",
    kv_cache_dtype: Literal["auto", "int8"] = "auto",
    tp: int = 1,
    ranks: str | None = None,
    steps: int = 10,
    json: tyro.conf.FlagCreatePairsOff[bool] = False,
) -> None:
    """Serve a model under random schedules and compare every bit of every log-probability with
    the packed forward pass that training runs.

    The certificate is added to the model's ingot.json. The exit status is 1 if a bit differs.

    With adapters, requests of the base model and of all adapters are mixed in one batch, and each
    is compared with the training path of its own adapter.

    With `--ranks`, a recipe is trained for a few steps on each number of ranks, and every bit of
    losses, gradient norms, weights and optimizer state is compared.

    Examples: `ingot verify smollm2`, `ingot verify smollm2 --schedules 50` for a quick check,
    `ingot verify smollm2 --adapter pirate=runs/pirate --adapter formal=runs/formal`,
    `ingot verify smollm2 --json` for scripts,
    `ingot verify recipes/stdlib-10m.toml grad_accum_steps=4 --ranks 1,2,4`.

    Args:
        model: A model directory, ORG/NAME on the Hugging Face hub, or with `--ranks` a recipe.
        overrides: Values that replace those of the recipe: dotted.key=value.
        schedules: Number of random schedules.
        seed: Seed of the texts and the schedules.
        adapter: NAME=DIRECTORY of a LoRA adapter as PEFT saves it; may be repeated.
        device: Where to compute: auto, cpu, cuda, cuda:1. The certificate is valid for this kind of
            processor.
        kv_cache_dtype: Dtype of cached keys and values; int8 also rounds them in the reference.
        tp: Number of ranks that the engine's layers are divided among (tensor parallelism).
        ranks: Numbers of ranks to train a recipe on, separated by commas.
        steps: Number of training steps with `--ranks`.
        json: Print JSON instead of text.
    """
    if ranks is not None:
        _verify_ranks(model, overrides, ranks, steps, json)
        return
    if overrides:
        raise ConfigError("overrides: apply to a recipe only", hint="give --ranks, or remove them")
    place = resolve(device)  # before a model is downloaded
    if tp > 1 and adapter:
        raise ConfigError("tp: adapters are not supported", hint="remove --adapter or --tp")
    _verify_model(model, adapter, place, kv_cache_dtype, tp, schedules, seed, json)


def _verify_model(
    model: str,
    adapter: tuple[str, ...],
    place: torch.device,
    kv_cache_dtype: Literal["auto", "int8"],
    tp: int,
    schedules: int,
    seed: int,
    json: bool,
) -> None:
    from ingot.cli.generate import load
    from ingot.interop import hub, peft
    from ingot.serving import verify as serving
    from ingot.serving.engine.adapters import parse_adapters
    from ingot.serving.engine.ranks import TensorParallel

    named = parse_adapters(adapter)
    directory = hub.model_path(model)
    decoder = load(directory, str(place), kv_cache_dtype=kv_cache_dtype).decoder
    adapters = {name: peft.load(path, decoder) for name, path in named.items()}
    divided = None
    if tp != 1:
        divided = TensorParallel.start(
            directory, tp, device=str(place), kv_cache_dtype=kv_cache_dtype
        )
    with divided or nullcontext(), log.progress("verifying", schedules) as bar:
        certificate = serving.verify(
            decoder,
            adapters=adapters,
            ranks=divided,
            schedules=schedules,
            seed=seed,
            progress=lambda: bar.advance(),
        )
    facts = as_facts(certificate, place)
    if adapters:
        facts["adapters"] = {name: adapter.digest for name, adapter in adapters.items()}
    lineage.append(directory, "verify", **facts)
    if json:
        print(json_format.dumps(facts, indent=2))  # noqa: T201
    else:
        _print_lines(certificate)
    if not certificate.bitwise_equal:
        raise SystemExit(1)


def _verify_ranks(
    recipe: str, overrides: tuple[str, ...], ranks: str, steps: int, json: bool
) -> None:
    from ingot.workflows.verify_ranks import verify_ranks

    try:
        sizes = [int(size) for size in ranks.split(",")]
    except ValueError:
        raise ConfigError(
            f"ranks: must be numbers separated by commas, got '{ranks}'", hint="give --ranks 1,2,4"
        ) from None
    certificate = verify_ranks(recipe, overrides, ranks=sizes, steps=steps)
    equal = certificate.difference is None
    if json:
        print(json_format.dumps(dataclasses.asdict(certificate), indent=2))  # noqa: T201
    else:
        log.stdout().print(
            f"{len(certificate.losses)} steps and {certificate.tensors} tensors on {ranks} ranks: "
            + ("bitwise equal" if equal else f"different, first {certificate.difference}"),
            highlight=False,
        )
    if not equal:
        raise SystemExit(1)


def as_facts(certificate: Certificate, device: torch.device) -> dict[str, Any]:
    """Return the certificate as it is stored: with the processor and versions it is valid for."""
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


def _processor(device: torch.device) -> dict[str, str | None]:
    """Return the names of the processor: on another one the bits may differ."""
    if device.type == "cpu":
        cpu = detect().cpu
        return {"cpu": cpu.name, "isa": cpu.isa[0]}
    gpus, index = detect().gpus, device.index or 0
    if index >= len(gpus):  # an accelerator that torch runs on and `detect` does not know
        return {"device": str(device)}
    return {"gpu": gpus[index].name, "capability": gpus[index].capability}


def _describe_models(certificate: Certificate) -> str:
    if not certificate.adapters:
        return ""
    most = certificate.max_models_per_step
    return f"{certificate.adapters} adapters and the base, up to {most} of them in one step; "


def _print_lines(certificate: Certificate) -> None:
    console = log.stdout()
    console.print(
        f"{certificate.logprobs:,} log-probabilities and {certificate.distributions:,} "
        f"distributions in {certificate.schedules:,} schedules: "
        + (
            "bitwise equal"
            if certificate.bitwise_equal
            else f"{certificate.mismatches:,} schedules differ"
        ),
        highlight=False,
    )
    console.print(
        f"{certificate.steps:,} steps, {certificate.preemptions:,} preemptions, "
        f"{certificate.cached_tokens:,} cached tokens, {certificate.accepted_tokens:,} of "
        f"{certificate.draft_tokens:,} draft tokens accepted; "
        f"{_describe_models(certificate)}"
        + ("" if certificate.tp == 1 else f"{certificate.tp} ranks; ")
        + f"{certificate.dtype}, {' and '.join(map(str, certificate.threads))} threads",
        highlight=False,
    )
    if certificate.difference:
        console.print(
            f"[bold red]first difference:[/] {escape_markup(certificate.difference[:2000])}"
        )
