"""Check that a training run has the same bits on several numbers of ranks.

result = verify_ranks("recipes/stdlib-10m.toml", ["grad_accum_steps=4"], ranks=(1, 2, 4))
result.equal, result.losses
"""

# pyright: basic
from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ingot.core import config, log
from ingot.core.errors import ConfigError, IngotError
from ingot.observe import metrics
from ingot.training.checkpoint import Checkpoint, Checkpoints
from ingot.training.recipe import Recipe
from ingot.workflows.launch import launch

_LOG = log.logger(__name__)
_PARTS = ("weights", "optimizer", "ema", "clipper", "outer")
_COMPARED = ("step", "loss", "grad_norm", "clip_factor", "update_norm", "validation_loss")


@dataclass(frozen=True, kw_only=True)
class RanksCertificate:
    """What was compared, and the first difference."""

    ranks: tuple[int, ...]
    steps: int
    losses: list[float]
    """Loss of each step on the first number of ranks."""
    tensors: int
    """Tensors compared: weights, optimizer state, EMA."""
    difference: str | None
    """What differs first; None if every bit is equal."""


def verify_ranks(
    recipe: Path | str, overrides: Sequence[str] = (), *, ranks: Sequence[int], steps: int = 10
) -> RanksCertificate:
    """Train a few steps on each number of ranks and compare losses, gradient norms and weights."""
    options = [*overrides, f"steps={steps}", f"checkpoint_every={steps}"]
    parsed = config.load(Recipe, recipe, options)
    if len(set(ranks)) < 2:
        raise ConfigError("ranks: at least two numbers are compared", hint="give --ranks 1 2 4")
    for size in ranks:
        parsed.check_ranks(size)
    with tempfile.TemporaryDirectory() as directory:
        runs: list[Path] = []
        for size in ranks:
            runs.append(Path(directory) / str(size))
            _LOG.info("training %d steps on %d ranks", steps, size)
            arguments = ["train", str(recipe), *options, "--run", str(runs[-1])]
            launch(size, arguments, runs[-1], quiet=True)
        curves = [_curve(run) for run in runs]
        states = [_tensors(run) for run in runs]
    differences = (
        f"{what} on {size} ranks, compared with {ranks[0]}"
        for size, curve, state in zip(ranks[1:], curves[1:], states[1:], strict=True)
        for what in _differences((curves[0], states[0]), (curve, state))
    )
    return RanksCertificate(
        ranks=tuple(ranks),
        steps=steps,
        losses=[line["loss"] for line in curves[0] if line.get("loss") is not None],
        tensors=len(states[0]),
        difference=next(differences, None),
    )


Run = tuple[list[dict[str, Any]], dict[str, torch.Tensor]]


def _differences(one: Run, other: Run) -> list[str]:
    lines = zip(one[0], other[0], strict=False)
    found = [f"{name} of step {a['step']}" for a, b in lines for name in a if a[name] != b[name]]
    if len(one[0]) != len(other[0]) or one[1].keys() != other[1].keys():
        found.append("what was logged and saved")
    shared = one[1].keys() & other[1].keys()
    return found + sorted(name for name in shared if not torch.equal(one[1][name], other[1][name]))


def _curve(run: Path) -> list[dict[str, Any]]:
    return [{name: line.get(name) for name in _COMPARED} for line in metrics.read(run)]


def _tensors(run: Path) -> dict[str, torch.Tensor]:
    found: Checkpoint | None = Checkpoints(run / "checkpoints", keep=1).latest()
    if found is None:
        raise IngotError(f"{run}: no checkpoint", hint="see the messages of the run")
    return {f"{part}/{n}": t for part in _PARTS for n, t in found.tensors(part).items()}
