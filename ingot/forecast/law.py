"""Laws of the loss that are linear in their coefficients, fitted by Bayesian linear regression.

    power         log L = c - A (1 - t^-a)
    annealing     log L = c + A S1^-a - C S2         (Tissue et al. 2024, for the log loss)
    multi-power   log L = c + A S1^-a - B sum_k (lr_k-1 - lr_k) (1 - (1 + S(k, t) / r)^-b)
                                                     (Luo et al. 2025, for the log loss)

t counts bins. S1 is the sum of the learning rates so far, relative to their mean over the run, and
S2 the momentum of their fall, summed: m_t = decay m_t-1 + lr_t-1 - lr_t. S(k, t) is the sum of the
learning rates from k to t. The laws are published for the loss; for its logarithm, they are as good
on language models and better where losses approach zero, and a factor on the loss only moves c.

Exponents are taken from a grid. For each value on it, the coefficients have a Gaussian prior with
full covariance, learned from finished runs, so their posterior has a closed form. The values are
weighted by their evidence rather than the best being chosen: a forecast is a mean over the grid.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ingot.forecast.curve import BINS, Floats

_FREE = 10.0  # standard deviation of the constant c


def power(lr: Floats) -> Floats:
    """Return the features of the power law by exponent, bin and coefficient."""
    t = np.arange(1, BINS + 1) + 0.0 * lr
    return np.stack([_columns(t**-a) for a in (0.05, 0.15, 0.3, 0.5, 0.75, 1.0, 1.5, 2.5)])


def annealing(lr: Floats) -> Floats:
    """Return the features of the annealing law by exponent and decay, bin and coefficient."""
    relative = lr / max(lr.mean(), 1e-300)
    s1 = np.cumsum(relative) + 0.5
    nodes = [
        _columns(s1**-a, -_momentum(relative, decay))
        for decay in (0.0, 0.6, 0.9)
        for a in (0.05, 0.2, 0.5, 1.0, 2.0)
    ]
    return np.stack(nodes)


def multi_power(lr: Floats) -> Floats:
    """Return the features of the multi-power law by exponents, bin and coefficient."""
    relative = lr / max(lr.mean(), 1e-300)
    s1 = np.cumsum(relative) + 0.5
    fall = -np.diff(relative, prepend=relative[:1])
    since = s1[None, :] - s1[:, None] + relative[:, None]  # from k to t
    since = np.where(np.tri(BINS, dtype=bool).T, since, 0.0)
    nodes = [
        _columns(s1**-a, -(fall @ (1 - (1 + since / reach) ** -b)))
        for reach, b in ((0.3, 0.5), (2.0, 0.5), (2.0, 2.0))
        for a in (0.05, 0.2, 0.5, 1.0, 2.0)
    ]
    return np.stack(nodes)


LAWS: dict[str, Callable[[Floats], Floats]] = {
    "power law": power,
    "annealing law": annealing,
    "multi-power law": multi_power,
}
"""The features of each law, from the learning rates of the bins."""


@dataclass(frozen=True)
class Prior:
    """Distribution of a law's coefficients, apart from the constant, for each value of the grid."""

    mean: Floats
    """By value and coefficient."""
    covariance: Floats
    """By value, coefficient and coefficient."""
    log_weight: Floats
    """Log probability of each value."""

    @classmethod
    def flat(cls, features: Floats) -> Prior:
        """Return a prior that prefers small coefficients but little else."""
        nodes, _, size = features.shape
        wide = np.broadcast_to(np.eye(size - 1) * 9.0, (nodes, size - 1, size - 1))
        return cls(np.zeros((nodes, size - 1)), wide, np.zeros(nodes))


def fit(features: Floats, log_loss: Floats, prior: Prior, *, noise: float, memory: float) -> Floats:
    """Fit a law to the bins so far, and return the log loss of all bins.

    Args:
        features: Those of the law, see `LAWS`.
        log_loss: Log loss of the bins so far.
        prior: Prior of the coefficients.
        noise: Standard deviation of the law's error in a bin.
        memory: Fraction of the bins so far after which a bin counts 1 / e as much.
    """
    now = len(log_loss)
    offset = float(log_loss[-1])
    weight = np.exp((np.arange(now) + 1 - now) / (memory * now)) / noise**2
    seen = features[:, :now]
    mean, precision = _with_constant(prior)
    gram = precision + np.einsum("gbp,b,gbq->gpq", seen, weight, seen)
    moment = np.einsum("gpq,gq->gp", precision, mean)
    moment = moment + np.einsum("gbp,b,b->gp", seen, weight, log_loss - offset)
    covariance = np.linalg.inv(gram)
    posterior = np.einsum("gpq,gq->gp", covariance, moment)
    # Evidence: the exponent of the Gaussian integral, and its determinants.
    misfit = np.einsum("b,b->", weight, (log_loss - offset) ** 2)
    misfit = misfit + np.einsum("gp,gpq,gq->g", mean, precision, mean)
    misfit = misfit - np.einsum("gp,gp->g", posterior, moment)
    logdet = np.linalg.slogdet(precision)[1] - np.linalg.slogdet(gram)[1]
    log_weight = prior.log_weight + 0.5 * (logdet - misfit)
    share = np.exp(log_weight - log_weight.max())
    share = share / share.sum()
    return share @ np.einsum("gbp,gp->gb", features, posterior) + offset


def learn_prior(features: NDArray[np.float64], log_loss: Floats, *, noise: float) -> Prior:
    """Learn a prior from whole runs: `features` by run, value, bin, coefficient.

    The coefficients of each run are fitted with a wide prior; their mean and covariance over the
    runs is the prior, and how well a value fits all runs its probability.
    """
    runs, _, _, size = features.shape
    flat = Prior.flat(features[0])
    mean, precision = _with_constant(flat)
    centred = log_loss - log_loss[:, -1:]
    gram = precision + np.einsum("rgbp,rgbq->rgpq", features, features) / noise**2
    moment = np.einsum("gpq,gq->gp", precision, mean)
    moment = moment + np.einsum("rgbp,rb->rgp", features, centred) / noise**2
    found = np.linalg.solve(gram, moment[..., None])[..., 0]
    residual = centred[:, None] - np.einsum("rgbp,rgp->rgb", features, found)
    error = np.sqrt((residual**2).mean(-1))
    share = np.exp(-error / noise)
    share = share / share.sum(1, keepdims=True)  # by run, over the values
    own = found[..., 1:]
    total = share.sum(0)[:, None] + 1e-9
    centre = np.einsum("rg,rgp->gp", share, own) / total
    apart = own - centre
    spread = np.einsum("rg,rgp,rgq->gpq", share, apart, apart) / total[..., None]
    spread = spread + np.eye(size - 1) * 1e-3 + spread * (3.0 / runs)
    return Prior(centre, spread, np.log(total[:, 0] / runs + 1e-3))


def _with_constant(prior: Prior) -> tuple[Floats, Floats]:
    """Return mean and precision of the constant and the coefficients."""
    nodes, size = prior.mean.shape
    mean = np.concatenate([np.zeros((nodes, 1)), prior.mean], axis=1)
    precision = np.zeros((nodes, size + 1, size + 1))
    precision[:, 0, 0] = _FREE**-2
    precision[:, 1:, 1:] = np.linalg.inv(prior.covariance)
    return mean, precision


def _momentum(lr: Floats, decay: float) -> Floats:
    """Return S2: the momentum of the fall of the learning rate, summed."""
    fall = -np.diff(lr, prepend=lr[:1])
    momentum, total, sums = 0.0, 0.0, np.empty_like(lr)
    for k, step in enumerate(fall):
        momentum = decay * momentum + step
        total += momentum
        sums[k] = total
    return sums


def _columns(*columns: Floats) -> Floats:
    return np.stack([np.ones_like(columns[0]), *columns], axis=-1)
