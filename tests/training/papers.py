"""The papers' updates once more, in float64 and numpy: what the optimizers are compared with.

Each is a function of a weight and the gradients of all steps; nothing is shared with the package.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def norm(x: Array) -> float:
    return math.sqrt(float((x * x).sum()))


def adamw(
    w: Array, grads: Iterable[Array], *, lr: float, b1: float, b2: float, eps: float, decay: float
) -> Array:
    """Loshchilov & Hutter 2017, algorithm 2."""
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, g in enumerate(grads, start=1):
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g * g
        w = w - lr * (m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps) + decay * w)
    return w


def sgd(
    w: Array, grads: Iterable[Array], *, lr: float, momentum: float, nesterov: bool, decay: float
) -> Array:
    """Sutskever et al. 2013 in torch's form: the velocity begins with the first gradient."""
    v = np.zeros_like(w)
    for g in grads:
        g = g + decay * w
        v = momentum * v + g
        w = w - lr * (g + momentum * v if nesterov else v)
    return w


def lion(
    w: Array, grads: Iterable[Array], *, lr: float, b1: float, b2: float, decay: float
) -> Array:
    """Chen et al. 2023, algorithm 2."""
    m = np.zeros_like(w)
    for g in grads:
        w = w - lr * (np.sign(b1 * m + (1 - b1) * g) + decay * w)
        m = b2 * m + (1 - b2) * g
    return w


def lamb(
    w: Array,
    grads: Iterable[Array],
    *,
    lr: float,
    b1: float,
    b2: float,
    eps: float,
    decay: float,
    adapt: bool = True,
) -> Array:
    """You et al. 2019, algorithm 2, phi the identity."""
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, g in enumerate(grads, start=1):
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g * g
        u = m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps) + decay * w
        ratio = norm(w) / norm(u) if adapt and norm(w) and norm(u) else 1.0
        w = w - lr * ratio * u
    return w


def lars(
    w: Array,
    grads: Iterable[Array],
    *,
    lr: float,
    momentum: float,
    trust: float,
    decay: float,
    adapt: bool = True,
) -> Array:
    """You et al. 2017, algorithm 1."""
    v = np.zeros_like(w)
    for g in grads:
        ratio = 1.0
        if adapt and norm(w) and norm(g):
            ratio = trust * norm(w) / (norm(g) + decay * norm(w))
        v = momentum * v + lr * ratio * (g + decay * w)
        w = w - v
    return w


def muon(w: Array, grads: Iterable[Array], *, lr: float, momentum: float, decay: float) -> Array:
    """Jordan et al. 2024, Nesterov's momentum; steps scaled as in Liu et al. 2025."""
    m = np.zeros_like(w)
    for g in grads:
        m = momentum * m + (1 - momentum) * g
        x = momentum * m + (1 - momentum) * g
        x = x / norm(x)
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        w = w - lr * decay * w - lr * 0.2 * math.sqrt(max(w.shape)) * x
    return w


def soap(
    w: Array,
    grads: Iterable[Array],
    bases: tuple[Array, Array],
    *,
    lr: float,
    b1: float,
    b2: float,
    eps: float,
    decay: float,
    every: int,
) -> Array:
    """Vyas et al. 2024, algorithm 3, from the eigenvectors of the first gradient on."""
    first, *rest = grads
    left, right = bases
    rows, columns = (1 - b2) * first @ first.T, (1 - b2) * first.T @ first
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, g in enumerate(rest, start=1):
        turned = left.T @ g @ right
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * turned * turned
        n = (left.T @ m @ right) / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps)
        w = w - lr * (left @ n @ right.T + decay * w)
        rows = b2 * rows + (1 - b2) * g @ g.T
        columns = b2 * columns + (1 - b2) * g.T @ g
        if t % every == 0:
            left, right = np.linalg.qr(rows @ left)[0], np.linalg.qr(columns @ right)[0]
    return w
