"""Profile a window of a training run: where the time goes, and what would help.

    profile = profile_training(recipe, Path("profile"), steps=10)
    profile.window.share(Kind.PYTHON), profile.sentence, profile.suggestions

The run is a new one in a temporary directory, so nothing of the user's runs changes. After a few
steps to warm up, steps are timed without the profiler and then recorded by torch.profiler. What
might help follows from what takes the time. It is tried with the same data: a suggestion is a
change of the recipe that was faster here.
"""

# pyright: basic
from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function

from ingot.core import log, spans
from ingot.core.errors import ConfigError, IngotError
from ingot.observe.trace import (
    LIMITS,
    SHORT_US,
    Kind,
    WindowProfile,
    profile_window,
    read_trace,
)
from ingot.parallel.ranks import Ranks, connect
from ingot.training.precision import Precision
from ingot.training.recipe import Datasets, Recipe
from ingot.training.trainer import Trainer
from ingot.workflows.train import build_trainer

TRACE = "trace.json.gz"
WARMUP_STEPS = 3
MIN_SPEEDUP = 1.1
"""A change of the recipe that gains less is not suggested: times vary by a few percent."""
_MIN_SHARE = 0.15
"""What takes less than this share of the time is not worth a trial."""
_REPEATED_S = 5.0
"""Steps that take less time together are timed three times."""
_LARGER_BATCH, _LOCAL_STEPS = 8, 8
_KEEPS, _CHANGES = "the updates are the same up to rounding", "it changes what is trained"
_SLOW_DATA = (
    "prepare less in each batch: one thread makes them, more slowly than the model trains. Decode, "
    "tokenize and augment once, ahead of training, and keep the result in memory or on a fast disk"
)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A change of the recipe, and how much faster it was."""

    text: str
    recipe: Recipe
    speedup: float = 1.0
    """Samples or tokens per second, relative to those of the recipe."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What took the time in a window, and what would help."""

    name: str
    window: WindowProfile
    trace: Path
    """Opens in Perfetto."""
    trials: list[Trial]
    """Changes of the recipe that were tried, the fastest first."""
    step_seconds: float | None = None
    """Time of a step without the profiler; None for a server."""
    rows_per_second: float | None = None
    """Tokens, or samples of another kind; None for a server."""
    shares: list[list[float]]
    """Of each rank, in the order of `Kind`."""

    @property
    def sentence(self) -> str:
        """The bottleneck, in words."""
        return name_bottleneck(self.window)

    @property
    def suggestions(self) -> list[str]:
        """What to do, the largest gain first."""
        measured = [
            f"{trial.text}: {trial.speedup:.2f}x as fast here"
            for trial in self.trials
            if trial.speedup >= MIN_SPEEDUP
        ]
        return [*([_SLOW_DATA] if self.window.bottleneck == "data" else []), *measured]


def name_bottleneck(window: WindowProfile) -> str:
    """Return a sentence about what takes most of the time."""
    limit = window.bottleneck
    share = f"{window.share_of(limit):.0%} of the time"
    top = next((op for op in window.ops if op.kind in LIMITS["compute"]), None)
    found = {
        "communication": f"communication is the bottleneck: {share} is collectives",
        "data": f"the data is the bottleneck: the model waits for it {share}",
        "requests": f"the engine waits for requests {share}",
        "python": f"Python is the bottleneck: {share} no op runs, or a call that takes less than "
        f"{SHORT_US:.0f} us",
    }
    if limit in found or top is None:
        return found.get(limit, "nothing ran")
    of_top = f"{top.seconds / window.seconds:.0%}"
    return f"compute is the bottleneck, {share}; the slowest op is `{top.name}` with {of_top}"


def profile_training(
    recipe: Recipe, out: Path, *, steps: int = 10, datasets: Datasets | None = None
) -> Profile | None:
    """Profile steps of a new run of a recipe, and try what might make it faster.

    Writes the trace to `out`. With several ranks, each has to call this; the main rank gets the
    result, others None. `datasets` is the data of the run, by default that of the recipe.
    """
    if steps < 1:
        raise IngotError(f"steps: must be at least 1, got {steps}", hint="give --steps 10")
    ranks = connect(recipe.parallel.timeout_s, recipe.device)
    out.mkdir(parents=True, exist_ok=True)
    path = out / (TRACE if ranks.is_main else f"rank-{ranks.rank}-{TRACE}")
    with tempfile.TemporaryDirectory() as directory:
        trainer = build_trainer(recipe, Path(directory), None, ranks, datasets)
        datasets = trainer.datasets
        rows, seconds = _time_steps(trainer, steps)
        window = _record(trainer, steps, path)
        del trainer
        shares = ranks.gather([window.share(kind) for kind in Kind])
        limits = ranks.gather([window.share_of(limit) for limit in LIMITS])[0]
        trials: list[Trial] = []
        for trial in _candidates(recipe, dict(zip(LIMITS, limits, strict=True)), ranks.size):
            speed = _try(trial, Path(directory), steps, ranks, datasets)
            if speed:
                trials.append(replace(trial, speedup=speed / rows))
    if not ranks.is_main:
        return None
    return Profile(
        name=recipe.name,
        window=window,
        trace=path,
        trials=sorted(trials, key=lambda trial: -trial.speedup),
        step_seconds=seconds,
        rows_per_second=rows,
        shares=shares,
    )


def _time_steps(trainer: Trainer, steps: int) -> tuple[float, float]:
    """Return rows per second and seconds per step, the fastest of a few times."""
    for _ in range(WARMUP_STEPS - 1):
        trainer.run_step()
    (first,) = zip(*trainer.ranks.gather([trainer.run_step()["seconds"]]), strict=True)
    repeats = 3 if max(first) * steps < _REPEATED_S else 1
    best = 0.0, 0.0
    for _ in range(repeats):
        metrics = [trainer.run_step() for _ in range(steps)]
        seconds = sum(one["seconds"] for one in metrics)
        best = max(best, (sum(one["num_rows"] for one in metrics) / seconds, seconds / steps))
    return best


def _record(trainer: Trainer, steps: int, path: Path) -> WindowProfile:
    """Record steps with torch.profiler."""
    profiler = start_profiler()
    with record_function(spans.WINDOW):
        for _ in range(steps):
            with record_function(spans.STEP):
                trainer.run_step()
    profiler.stop()
    profiler.export_chrome_trace(str(path))
    return profile_window(read_trace(path))


def start_profiler() -> torch.profiler.profile:
    """Record the ops of this thread and their memory, and the kernels of a GPU, if there is one."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    profiler = torch.profiler.profile(
        activities=activities, record_shapes=True, profile_memory=True
    )
    profiler.start()
    return profiler


def _try(
    trial: Trial, directory: Path, steps: int, ranks: Ranks, datasets: Datasets
) -> float | None:
    """Return the rows per second with a change of the recipe; None if it cannot be trained."""
    steps = -(-steps // _LOCAL_STEPS) * _LOCAL_STEPS
    try:
        trainer = build_trainer(trial.recipe, directory, None, ranks, datasets)
    except IngotError as error:
        log.logger(__name__).debug("not tried: %s (%s)", trial.text, error.message)
        return None
    return _time_steps(trainer, steps)[0]


def _candidates(recipe: Recipe, shares: Mapping[str, float], num_ranks: int) -> Iterator[Trial]:
    """Yield the changes of a recipe that might help, by the shares of `LIMITS`."""
    limits = {limit for limit, share in shares.items() if share >= _MIN_SHARE}
    bottleneck = max(shares, key=lambda limit: shares[limit])
    batch = recipe.global_batch_size * _LARGER_BATCH
    parallel = f"parallel.dp={num_ranks} parallel.local_steps={_LOCAL_STEPS}"
    if "python" in limits and recipe.grad_accum_steps > num_ranks:
        text = f"use fewer and larger micro-batches, `grad_accum_steps={num_ranks}` ({_KEEPS})"
        yield from _trial(text, recipe, grad_accum_steps=num_ranks)
    if bottleneck in ("python", "communication"):
        text = f"use a larger batch, `global_batch_size={batch}` ({_CHANGES}: adapt the learning "
        yield from _trial(f"{text}rate)", recipe, global_batch_size=batch)
    if "communication" in limits and num_ranks > 1:
        sent = replace(recipe.parallel, grad_compression="int8")
        text = f"send gradients as int8, `parallel.grad_compression=int8` ({_CHANGES})"
        yield from _trial(text, recipe, parallel=sent)
        seldom = replace(recipe.parallel, dp=num_ranks, local_steps=_LOCAL_STEPS)
        text = f"average replicas every {_LOCAL_STEPS} steps, `{parallel}` ({_CHANGES})"
        yield from _trial(text, recipe, parallel=seldom)
    if "compute" in limits and recipe.recompute != "none":
        text = "keep the activations, `recompute=none` (the same bits, and more memory)"
        yield from _trial(text, recipe, recompute="none")
    if "compute" in limits and recipe.precision is Precision.FP32:
        text = f"train in bfloat16, `precision=bf16` ({_CHANGES})"
        yield from _trial(text, recipe, precision=Precision.BF16)


def _trial(text: str, recipe: Recipe, **fields: Any) -> Iterator[Trial]:
    """Yield a trial with other fields, unless that is not a valid recipe or the same one."""
    try:
        changed = replace(recipe, **fields)
    except ConfigError:
        return
    if changed != recipe:
        yield Trial(text=text, recipe=changed)
