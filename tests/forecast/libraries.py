"""A small library of made-up runs that follow a law, and curves like them."""

from __future__ import annotations

import numpy as np

from ingot.forecast.curve import BINS, LossCurve
from ingot.forecast.runs import RunLibrary

STEPS = 1000
T = np.arange(1.0, BINS + 1)


def curve(
    exponent: float = 0.5, *, scale: float = 3.0, noise: float = 0.0, seed: int = 0
) -> LossCurve:
    """A whole run: power law with a floor, a learning rate that falls."""
    rng = np.random.default_rng(seed)
    loss = 1.0 + scale * T**-exponent
    values = np.log(loss) + noise * rng.standard_normal(BINS)
    return LossCurve(values, np.linspace(1.0, 0.02, BINS), STEPS, "validation_loss")


def library(runs: int = 60) -> RunLibrary:
    """Runs of two tasks with different exponents."""
    rng = np.random.default_rng(1)
    curves = [
        curve(float(rng.uniform(0.3, 1.2)), scale=float(rng.uniform(1, 6)), noise=0.01, seed=i)
        for i in range(runs)
    ]
    values = np.stack([c.log_loss for c in curves])
    tasks = tuple(("text/decoder", "digits/cnn")[i % 2] for i in range(runs))
    lr = np.stack([c.lr for c in curves])
    return RunLibrary(tasks, lr, {"loss": values, "validation_loss": values})
