"""Plan a training run on a cluster: read the model, search the plans, write the recipe's keys."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from ingot.core import config
from ingot.core.errors import ConfigError, DataError, UnknownName
from ingot.core.paths import write_atomic
from ingot.planning.fit import FittedModel, calibrate, load_fitted
from ingot.planning.hardware import Cluster, find_accelerator
from ingot.planning.published import MeasuredRun, parse_run, read_runs
from ingot.planning.search import PlanEstimate, SearchResult, search
from ingot.planning.workload import (
    SHAPES,
    MatmulPrecision,
    ModelShape,
    TrainingWorkload,
    shape_from_config,
    shape_from_decoder,
)

_SKIPPED_STEPS = 3
"""First steps of a run that are not measured: they compile and allocate."""


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """The plans of a training run, best first."""

    model: str
    workload: TrainingWorkload
    cluster: Cluster
    fitted: FittedModel
    result: SearchResult
    own_runs: int
    """Number of runs that the prediction was calibrated with."""

    @property
    def first(self) -> PlanEstimate:
        """The first choice."""
        return self.result.estimates[0]


def plan(
    model: str,
    *,
    gpu: str,
    gpus: int,
    seq_len: int,
    global_batch_size: int,
    per_node: int | None = None,
    precision: MatmulPrecision = "bf16",
    runs: Path | None = None,
) -> PlanReport:
    """Rank the parallel layouts of a training run by predicted step time.

    `model` is a name of `ingot.planning.workload.SHAPES` or of a preset, a directory or config.json
    of Hugging Face, or a recipe. `runs` are measured runs to calibrate with: a CSV file, or a
    directory of runs of `ingot train`.

    >>> report = plan("llama3-8b", gpu="h100", gpus=8, seq_len=8192, global_batch_size=128)
    >>> report.first.plan.gpus
    8
    """
    shape = read_shape(model)
    accelerator = find_accelerator(gpu)
    cluster = Cluster(accelerator=accelerator, gpus=gpus, per_node=per_node or 0)
    workload = TrainingWorkload(
        model=shape, seq_len=seq_len, global_batch_size=global_batch_size, precision=precision
    )
    peaks = {"fp8": accelerator.fp8_tflops, "mxfp8": accelerator.fp8_tflops}
    peaks |= {"bf16": accelerator.bf16_tflops, "fp4": accelerator.fp4_tflops}
    if peaks[precision] is None:
        raise ConfigError(f"{gpu}: has no matmuls in {precision}", hint="use --precision bf16")
    own = read_own_runs(runs, gpu) if runs else []
    fitted = calibrate(load_fitted(), own) if own else load_fitted()
    result = search(workload, cluster, fitted, is_calibrated=bool(own))
    return PlanReport(
        model=model,
        workload=workload,
        cluster=cluster,
        fitted=fitted,
        result=result,
        own_runs=len(own),
    )


def read_shape(model: str) -> ModelShape:
    """Return the shape of a model that is named, or described by a file.

    >>> read_shape("llama3-70b").layers
    80
    """
    if model in SHAPES:
        return SHAPES[model]
    path = Path(model)
    if path.suffix == ".toml":
        table = _read_recipe(path)
        if "init_from" in table:
            return read_shape(str(table["init_from"]))
        return shape_from_decoder(_table(table, "model", path))
    if path.is_dir():
        path = path / "config.json"
    if path.name.endswith(".json") and path.is_file():
        try:
            return shape_from_config(json.loads(path.read_text()))
        except ValueError as error:
            raise ConfigError(f"{path}: not JSON: {error}", hint="correct the file") from error
    from ingot.nn.presets import PRESETS

    if model not in PRESETS:
        raise UnknownName("model", model, [*SHAPES, *PRESETS])
    return shape_from_decoder(asdict(PRESETS[model]))


def _read_recipe(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: not a recipe: {error}"[:300], hint="name a TOML file"
        ) from error


def _table(recipe: Mapping[str, Any], name: str, path: Path) -> Mapping[str, Any]:
    table = recipe.get(name)
    if not isinstance(table, Mapping):
        raise ConfigError(f"{path}: has no [{name}] table", hint=f"add [{name}] to the recipe")
    return cast(Mapping[str, Any], table)


def read_own_runs(place: Path, gpu: str) -> list[MeasuredRun]:
    """Read measured runs: a CSV file, a run of `ingot train`, or a directory of such runs."""
    if place.is_file():
        return read_runs(place)
    from ingot.observe.history import RunHistory, find_runs

    found = find_runs([place])
    if not found:
        raise DataError(
            f"{place}: no run of `ingot train` and no CSV file",
            hint="name a table of measured runs, a run directory or a directory of runs",
        )
    return [_own_run(RunHistory.read(directory), gpu) for directory in found]


def _own_run(history: Any, gpu: str) -> MeasuredRun:
    """Build the measured run of a run directory from its recipe and its metrics."""
    path, recipe = history.directory, history.recipe
    ranks = int(history.environment.get("ranks", 1))
    parallel = recipe.get("parallel", {})
    axes = {name: int(parallel.get(name, 1)) for name in ("pp", "dp", "cp", "tp")}
    interleaved = parallel.get("schedule", "1f1b") != "1f1b"
    seconds = history.curve("seconds").values[_SKIPPED_STEPS:]
    if not len(seconds):
        raise DataError(
            f"{path}: has no step after the first {_SKIPPED_STEPS}", hint="train it for longer"
        )
    batch = int(recipe["global_batch_size"])
    row: dict[str, Any] = {
        **asdict(shape_from_decoder(_table(recipe, "model", path))),
        **axes,
        "vp": 2 if interleaved else 1,
        "ep": int(parallel.get("ep", 1)),
        "fsdp": ranks // math.prod(axes.values()),
        "id": path.name,
        "source": "own",
        "gpu": gpu,
        "gpus": ranks,
        "seq_len": _table(recipe, "data", path).get("seq_len", 0),
        "global_batch_size": batch,
        "micro_batch_size": batch // int(recipe.get("grad_accum_steps", 1)),
        "recompute": recipe.get("recompute", "none"),
        "step_s": float(np.median(seconds)),
    }
    return parse_run(row, str(path))


def apply(report: PlanReport, recipe: Path) -> dict[str, Any]:
    """Write the first plan that `ingot train` can run into a recipe; return its keys.

    The other lines of the recipe stay as they are.
    """
    batch = _load_recipe(recipe).global_batch_size
    if batch != report.workload.global_batch_size:
        raise ConfigError(
            f"{recipe}: global_batch_size is {batch}, but the plan is for "
            f"{report.workload.global_batch_size}",
            hint=f"run with --global-batch-size {batch}",
        )
    for estimate in report.result.estimates:
        keys = recipe_keys(estimate)
        if _is_runnable(recipe, keys, estimate.plan.gpus):
            write_atomic(recipe, set_keys(recipe.read_text(), keys))
            return keys
    raise ConfigError(
        f"{recipe}: `ingot train` can run no plan that fits",
        hint="use a number of GPUs that is a power of two, and precision=bf16; see "
        "docs/distributed.md for what can be combined",
    )


def _load_recipe(path: Path, overrides: Sequence[str] = ()) -> Any:
    from ingot.training.recipe import Recipe

    return config.load(Recipe, path, overrides)


def _is_runnable(recipe: Path, keys: Mapping[str, Any], ranks: int) -> bool:
    """Return whether the trainer accepts a recipe with these keys on this number of ranks."""
    if ranks & (ranks - 1):
        return False
    parallel = (f"parallel.{name}={value}" for name, value in keys["parallel"].items())
    own = (f"{name}={value}" for name, value in keys.items() if name != "parallel")
    try:
        _load_recipe(recipe, [*own, *parallel]).check_ranks(ranks)
    except ConfigError:
        return False
    return True


def recipe_keys(estimate: PlanEstimate) -> dict[str, Any]:
    """Return the keys of a recipe that a plan decides; each data rank has some micro-batches."""
    chosen = estimate.plan
    axes = {name: getattr(chosen, name) for name in ("pp", "dp", "ep", "cp", "tp")}
    schedule = "1f1b" if chosen.vp == 1 else "interleaved_1f1b"
    return {
        "grad_accum_steps": chosen.micro_batches(estimate.workload) * chosen.data_ranks,
        "recompute": chosen.recompute,
        "parallel": {**axes, "schedule": schedule, "batch_shards": chosen.data_ranks},
    }


def set_keys(text: str, keys: Mapping[str, Any]) -> str:
    """Set keys in the text of a recipe: values at the top, and tables at the end.

    >>> print(set_keys("steps = 3\\n\\n[model]\\ndim = 8\\n", {"recompute": "full",
    ...                                                        "parallel": {"tp": 2}}))
    recompute = "full"
    steps = 3
    <BLANKLINE>
    [model]
    dim = 8
    <BLANKLINE>
    [parallel]
    tp = 2
    <BLANKLINE>
    """
    for name, value in keys.items():
        if isinstance(value, Mapping):
            items = cast(Mapping[str, Any], value).items()
            lines = "\n".join(f"{key} = {json.dumps(one)}" for key, one in items)
            kept = re.sub(rf"(?ms)^\[{name}\]\n.*?(?=^\[|\Z)", "", text).rstrip("\n")
            text = f"{kept}\n\n[{name}]\n{lines}\n"
            continue
        line = f"{name} = {json.dumps(value)}"
        first_table = re.search(r"(?m)^\[", text)
        end = first_table.start() if first_table else len(text)
        top, count = re.subn(rf"(?m)^{name}\s*=.*$", line, text[:end])
        text = (top if count else _insert_after_comments(top, line)) + text[end:]
    return text


def _insert_after_comments(text: str, line: str) -> str:
    comments = re.match(r"(?:#.*\n)*", text)
    at = comments.end() if comments else 0
    return f"{text[:at]}{line}\n{text[at:]}"
