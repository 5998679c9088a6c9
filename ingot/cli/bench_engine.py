"""`ingot bench engine`: decode steps against the memory bandwidth; what speculation and prefix
caching save."""

from __future__ import annotations

import dataclasses
import json as json_format
from typing import Annotated

import tyro

import ingot
from ingot.core import log


def engine(
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")],
    rounds: int = 5,
    json: tyro.conf.FlagCreatePairsOff[bool] = False,
) -> None:
    """Time the engine on a model: decode steps of 1, 8 and 32 requests, interleaved with reading
    the same bytes from memory, which bounds them; what log-probabilities and LoRA adapters cost;
    what an int8 KV cache saves; and speculation and prefix caching, each interleaved with running
    without it.

    Example: `ingot bench engine smollm2`.

    Args:
        model: A model directory with a tokenizer, or ORG/NAME on the Hugging Face hub.
        rounds: Number of measured rounds of each optimization.
        json: Print JSON instead of text.
    """
    from ingot.bench import engine as bench
    from ingot.bench.results import RunInfo

    run, llm = RunInfo.now(ingot.__version__), ingot.LLM(model)
    with log.progress("rounds", (len(bench.BATCHES) + 2) * bench.STEPS + 3 * rounds) as bar:
        speedups = bench.measure_speedups(llm, rounds, bar.advance)
        steps = bench.decode(llm, bench.STEPS, bar.advance)
        options = bench.measure_options(llm, bench.STEPS, bar.advance)
        options.append(bench.measure_int8_cache(llm, bench.STEPS, bar.advance))
    if json:
        report = {
            "run": dataclasses.asdict(run),
            "decode": [dataclasses.asdict(step) for step in steps],
            "options": [dataclasses.asdict(option) for option in options],
            "speedups": [dataclasses.asdict(speedup) for speedup in speedups],
        }
        print(json_format.dumps(report, indent=2))  # noqa: T201
        return
    for step in steps:
        log.stdout().print(
            f"[bold]decode[/]   batch {step.batch_size:2}: {step.tokens_per_s:.0f} tokens/s, "
            f"{step.step_s * 1e3:.2f} ms per step, {step.roofline_fraction:.0%} of the memory "
            "bandwidth",
            highlight=False,
        )
    for option in options:
        log.stdout().print(
            f"[bold]options[/]  {option.name}: {option.speed_ratio:.3f}x the speed of batch "
            f"{bench.BATCHES[-1]} without; {option.step_s * 1e3:.2f} ms per step, "
            f"{option.baseline_s * 1e3:.2f} without",
            highlight=False,
        )
    for speedup in speedups:
        same = "same tokens" if speedup.same_tokens else "DIFFERENT TOKENS"
        log.stdout().print(
            f"[bold]{speedup.name}[/]   {speedup.ratio:.2f}x, {same}\n         "
            f"{speedup.description}: {speedup.optimized_s:.3f}, {speedup.baseline_s:.3f} without",
            highlight=False,
        )
    log.stdout().print(f"\n{run}.", highlight=False)
