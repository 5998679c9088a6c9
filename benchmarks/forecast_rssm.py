"""Forecast curves with a GRU and with a recurrent state-space model (RSSM): which is better?

    taskset -c 0 python -m benchmarks.forecast_rssm

trains both on the curves of the library (`ingot.forecast.runs`), from 5 to 45 of their 50 bins to
the end, and writes benchmarks/results/forecast_rssm.csv: |log(forecast / truth)| of the final loss
of runs that were left out, from 20, 40 and 60 %. Both have the same inputs (the change of the log
loss in the bin before, in units of the curve's own scale, and the learning rate of the bin, which
is known in advance), the same number of weights within 2 %, steps and batches, and the best of the
same learning rates by a quarter of the runs that no split of known tasks leaves out. They differ in
their state:

    GRU     h' = gru([change, action], h)              change' = W h'
    RSSM    h' = gru([z, action], h)                   change' = W [h', z']
            z' ~ p(z' | h') in the future, q(z' | h', change') in the past: 8 variables of 8 classes

The RSSM is trained with the divergence of q and p (balanced, with a free nat) in addition to the
error; its forecast is the mean of 16 samples.

    known task      a quarter of all runs is left out, three times
    unknown task    all runs of one kind of data are left out

"weighted" is the forecast of `ingot.forecast`, of the same runs by a library of the others. Its
constants were chosen on these runs, so it has an advantage.
"""

# pyright: basic
from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ingot import ops
from ingot.forecast.curve import BINS
from ingot.forecast.forecaster import Forecaster
from ingot.forecast.learned import Learned
from ingot.forecast.runs import RunLibrary

RESULTS = Path(__file__).parent / "results" / "forecast_rssm.csv"
METHODS = ("GRU", "RSSM", "weighted")
NOWS = (10, 20, 30)
SPLITS = 3
LEARNING_RATES = (3e-3, 1e-2, 3e-2)
_BATCH, _ACTIONS, _SAMPLES = 64, 4, 16
_GROUPS, _CLASSES = 8, 8
_HIDDEN = 48  # of the RSSM; the GRU has as many as give the same number of weights
_REPRESENTATION, _DYNAMICS, _FREE_NATS = 0.1, 0.5, 1.0  # of the divergence
_PAST = 0.1  # weight of the errors of one step, of the bins so far
_HEALTHY = float(np.log(1.3))


@dataclass(frozen=True)
class Curves:
    """Log losses (R, 50) and what is known of all bins (R, 50, A)."""

    log_loss: Tensor
    actions: Tensor

    @classmethod
    def of(cls, library: RunLibrary) -> Curves:
        """Read the curves of a library of finished runs."""
        lr = np.maximum(library.lr, 1e-12)
        relative = np.log(lr / lr.max(1, keepdims=True)).clip(-4, 0)
        change = np.diff(relative, axis=1, prepend=relative[:, :1])
        done = np.broadcast_to(np.arange(1, BINS + 1) / BINS, lr.shape)
        actions = np.stack([relative, change, lr / lr.max(1, keepdims=True), done], -1)
        values = library.log_loss["validation_loss"]
        return cls(*(torch.tensor(x, dtype=torch.float32) for x in (values, actions)))

    def select(self, rows: Any) -> Curves:
        """Return the curves of these rows."""
        return Curves(self.log_loss[rows], self.actions[rows])

    def changes(self, now: int) -> tuple[Tensor, Tensor]:
        """Return the changes of the bins in units of the scale so far, and the scales (R, 1)."""
        values = self.log_loss
        scale = (values[:, :now] - values[:, now - 1 : now]).abs().mean(1, keepdim=True) + 0.02
        return torch.diff(values, dim=1, prepend=values[:, :1]) / scale, scale


class GatedUnit(nn.Module):
    """The weights of a gated recurrent unit and its step."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        shapes = (3 * hidden, inputs), (3 * hidden, hidden), (3 * hidden,), (3 * hidden,)
        self.weights = nn.ParameterList(
            nn.Parameter((torch.rand(*shape) * 2 - 1) * hidden**-0.5) for shape in shapes
        )
        self.hidden = hidden

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        """Return the next state."""
        return ops.gru_cell(x, h, *self.weights)


class CurveGRU(nn.Module):
    """A GRU that reads the changes so far and then feeds its own back."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.unit = GatedUnit(1 + _ACTIONS, hidden)
        self.head = nn.Linear(hidden, 1)

    def forward(self, changes: Tensor, actions: Tensor, now: int, seed: int) -> tuple[Tensor, ...]:
        """Return the changes of all bins but the first, and an additional loss."""
        rows = len(changes)
        x = torch.cat([changes[:, : now - 1, None], actions[:, 1:now]], -1).flatten(0, 1)
        start = changes.new_zeros(rows, self.unit.hidden)
        starts = torch.arange(rows + 1) * (now - 1)
        states = ops.gru(x, start, starts, *self.unit.weights).unflatten(0, (rows, now - 1))
        w_ih, w_hh, b_ih, b_hh = (weight[None] for weight in self.unit.weights)
        outputs, _ = ops.gru_rollout(
            states[None, :, -1],
            changes[None, :, now - 1 : now],
            actions[None, :, now:].contiguous(),
            w_ih,
            w_hh,
            b_ih,
            b_hh,
            self.head.weight[None],
            self.head.bias[None],
        )
        return torch.cat([self.head(states), outputs[0]], 1)[..., 0], changes.new_zeros(())


class CurveRSSM(nn.Module):
    """A recurrent state-space model that infers its latents so far and then imagines them."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        latent = _GROUPS * _CLASSES
        self.unit = GatedUnit(latent + _ACTIONS, hidden)
        self.prior, self.posterior = nn.Linear(hidden, latent), nn.Linear(hidden + 1, latent)
        self.head = nn.Linear(hidden + latent, 1)

    def forward(self, changes: Tensor, actions: Tensor, now: int, seed: int) -> tuple[Tensor, ...]:
        """Return the changes of all bins but the first, and the divergence."""
        rows = len(changes)
        h = changes.new_zeros(rows, self.unit.hidden)
        z = changes.new_zeros(rows, _GROUPS * _CLASSES)
        seeds = torch.full((rows,), seed)
        outputs: list[Tensor] = []
        divergences: list[Tensor] = []
        for k in range(1, BINS):
            h = self.unit(torch.cat([z, actions[:, k]], -1), h)
            prior, posterior = self._logits(self.prior(h)), None
            if k < now:
                seen = torch.cat([h, changes[:, k : k + 1]], -1)
                posterior = self._logits(self.posterior(seen))
            position = torch.arange(rows) * BINS + k
            sample, log_p, log_q = ops.rssm_step(prior, posterior, seeds, position)
            if posterior is not None:
                divergences.append(_divergence(log_p, log_q))
            z = sample.flatten(1)
            outputs.append(self.head(torch.cat([h, z], -1)))
        return torch.cat(outputs, -1), torch.stack(divergences).mean()

    @staticmethod
    def _logits(values: Tensor) -> Tensor:
        return values.unflatten(-1, (_GROUPS, _CLASSES))


def _divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return the balanced divergence of posterior and prior, but nothing below a free nat."""

    def divergence(q: Tensor, p: Tensor) -> Tensor:
        return (q.exp() * (q - p)).sum((-2, -1)).clamp(min=_FREE_NATS).mean()

    both = divergence(log_q.detach(), log_p), divergence(log_q, log_p.detach())
    return _DYNAMICS * both[0] + _REPRESENTATION * both[1]


def count_weights(model: nn.Module) -> int:
    """Return the number of weights of a model."""
    return sum(weight.numel() for weight in model.parameters())


def build(method: str) -> nn.Module:
    """Return an untrained model; both have the same number of weights within 2 %."""
    torch.manual_seed(0)
    rssm = CurveRSSM(_HIDDEN)
    if method == "RSSM":
        return rssm
    target = count_weights(rssm)
    hidden = min(range(8, 256), key=lambda h: abs(count_weights(CurveGRU(h)) - target))
    return CurveGRU(hidden)


def train(method: str, curves: Curves, lr: float, steps: int) -> nn.Module:
    """Train a model to forecast the rest of curves, from moments that are drawn."""
    model, random = build(method), np.random.default_rng(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps)
    for step in range(steps):
        now = int(random.integers(5, 46))
        batch = curves.select(random.integers(len(curves.log_loss), size=_BATCH))
        changes, _ = batch.changes(now)
        found, divergence = model(changes, batch.actions, now, step)
        error = (found - changes[:, 1:])[:, now - 1 :].cumsum(1)
        past = (found - changes[:, 1:])[:, : now - 1]
        loss = nn.functional.smooth_l1_loss(error, torch.zeros_like(error)) + divergence
        loss = loss + _PAST * nn.functional.smooth_l1_loss(past, torch.zeros_like(past))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model


@torch.no_grad()
def find_errors(model: nn.Module, curves: Curves, now: int) -> np.ndarray:
    """Return the errors of the final log losses of curves, from a moment."""
    samples = _SAMPLES if isinstance(model, CurveRSSM) else 1
    changes, scale = curves.changes(now)
    drops = [
        model(changes, curves.actions, now, seed)[0][:, now - 1 :].sum(1) for seed in range(samples)
    ]
    end = curves.log_loss[:, now - 1] + torch.stack(drops).mean(0) * scale[:, 0]
    return (end - curves.log_loss[:, -1]).abs().double().numpy()


def choose_lr(method: str, inner: Curves, held_out: Curves, steps: int) -> float:
    """Return the learning rate with the least error on curves that are not trained on."""

    def error(lr: float) -> float:
        model = train(method, inner, lr, steps)
        return float(np.mean([find_errors(model, held_out, now).clip(max=1) for now in NOWS]))

    return min(LEARNING_RATES, key=error)


def split_runs(library: RunLibrary) -> tuple[list[tuple[str, np.ndarray]], np.ndarray]:
    """Return the setting and the runs of each split, and the runs that tune the learning rate."""
    data = _data(library)
    *known, tuning = np.array_split(np.random.default_rng(0).permutation(len(data)), SPLITS + 1)
    unknown = [np.flatnonzero(data == kind) for kind in np.unique(data)]
    return [*(("known task", r) for r in known), *(("unknown task", r) for r in unknown)], tuning


def judge(library: RunLibrary, steps: int) -> Iterator[dict[str, object]]:
    """Yield the errors of both and of the weighted forecast for each split, moment and data."""
    splits, tuning = split_runs(library)
    curves, data, healthy = Curves.of(library), _data(library), _find_healthy(library)
    everything = np.arange(len(data))
    rest = curves.select(np.setdiff1d(everything, tuning))
    for method in METHODS:
        start, neural = time.process_time(), method != "weighted"
        lr = choose_lr(method, rest, curves.select(tuning), steps) if neural else None
        for split, (setting, rows) in enumerate(splits):
            others, kept = np.setdiff1d(everything, rows), rows[healthy[rows]]
            if lr is None:
                errors = _find_weighted_errors(library, others, kept)
            else:
                model = train(method, curves.select(others), lr, steps)
                errors = {now: find_errors(model, curves.select(kept), now) for now in NOWS}
            row = {"setting": setting, "split": split, "method": method, "lr": lr or ""}
            row["seconds"] = time.process_time() - start
            for now, found in errors.items():
                for kind in ("all", *np.unique(data[kept])):
                    own = found[(data[kept] == kind) | (kind == "all")]
                    parts = {"mean": own.mean(), "median": np.median(own), "worst": own.max()}
                    percent = 100 * now // BINS
                    yield row | {"percent": percent, "data": kind, "runs": len(own), **parts}


def _data(library: RunLibrary) -> np.ndarray:
    """Return the kind of data of each run."""
    return np.array([task.partition("/")[0] for task in library.tasks])


def _find_healthy(library: RunLibrary) -> np.ndarray:
    """Return which runs have no ramp of the learning rate and end near their best loss."""
    values = library.log_loss["validation_loss"]
    rising = (np.diff(library.lr, axis=1) > 0).mean(1) > 0.9
    return ~rising & (values[:, -1] < values.min(1) + _HEALTHY)


def _find_weighted_errors(
    library: RunLibrary, others: np.ndarray, rows: np.ndarray
) -> dict[int, np.ndarray]:
    """Return the errors of the forecast of the package, from each moment."""
    forecaster = Forecaster(library.select(others), Learned.load())
    found: dict[int, list[float]] = {now: [] for now in NOWS}
    for row in rows:
        curve = library.curve(int(row), "validation_loss", steps=BINS)
        for now, errors in found.items():
            end = forecaster.forecast(curve.prefix(now)).path[-1]
            errors.append(abs(float(end - curve.log_loss[-1])))
    return {now: np.array(errors) for now, errors in found.items()}


def write(rows: list[dict[str, object]], path: Path) -> None:
    """Write the table with four digits."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()})


def main() -> None:
    """Read the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="training steps of each model")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    library = RunLibrary.load().finished("validation_loss")
    rows: list[dict[str, object]] = []
    for row in judge(library, arguments.steps):
        rows.append(row)
        print(*row.values(), flush=True)  # noqa: T201
    write(rows, RESULTS)


if __name__ == "__main__":
    main()
