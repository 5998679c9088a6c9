"""The update of AdamW (Loshchilov & Hutter 2017) of many tensors at once.

    m = b1 m + (1 - b1) g               v = b2 v + (1 - b2) g^2
    p = p - lr ((m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + decay p)

Tensors are written into: parameters, first and second moments. Parameters and gradients have one
dtype; moments are in float32 (float64 of float64), and so is the arithmetic: a parameter in
bfloat16 is rounded once. `step` is t, and counts from 1.

A model has hundreds of tensors, most of them small. A kernel for each would take longer to launch
than to run, so one call takes them all.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from ingot.core.errors import OpError
from ingot.ops.inputs import Make, Sample
from ingot.ops.op import Cost, Tolerance, op, wide


def _samples(make: Make) -> Iterator[Sample]:
    def state(params: list[Tensor], scale: float = 1.0) -> tuple[list[Tensor], ...]:
        """Gradients and moments: second ones are not negative."""
        grads = [make(*p.shape, scale=scale) for p in params]
        dtype = wide(make.dtype)
        first = [make(*p.shape, scale=scale).to(dtype) for p in params]
        return grads, first, [(make(*p.shape, scale=scale) ** 2).to(dtype) for p in params]

    params = [make(6, 16), make(16), make(3, 4, 5)]
    yield Sample("typical", (params, *state(params), 3, 1e-2))
    params = [make(67, 131), make(5000), make(3)]
    yield Sample("large", (params, *state(params), 100, 1e-3, 0.9, 0.999, 1e-8, 0.1))
    params = [make(7), make(1), make(0), make(3, 5)]
    yield Sample("odd", (params, *state(params), 2, 0.1, 0.8, 0.95, 1e-6, 0.0))
    params = [make(1)]
    yield Sample("one_row", (params, *state(params), 1, 1e-2))
    params = [make.strided(3, 5), make(4, 6).T]
    grads, first, second = state(params)
    grads[0], first[1] = make(5, 3).T, first[1].T.contiguous().T
    yield Sample("strided", (params, grads, first, second, 5, 1e-2))
    params = [make.spread(4, 33), make(8, 8) * 0]
    yield Sample("extreme", (params, *state(params, 2.0**-6), 10**6, 1e-2))


def _check(
    params: list[Tensor],
    grads: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
) -> None:
    counts = [len(params), len(grads), len(first), len(second)]
    if len(set(counts)) != 1 or not params:
        raise OpError(
            f"adamw: {counts} parameters, gradients, first and second moments",
            remedy="give as many of each, one at least",
        )
    for place, (p, *others) in enumerate(zip(params, grads, first, second, strict=True)):
        if any(other.shape != p.shape for other in others):
            raise OpError(
                f"adamw: parameter {place} is {tuple(p.shape)}, its gradient and moments "
                f"{[tuple(other.shape) for other in others]}",
                remedy="give them one shape",
            )
    dtype, devices = params[0].dtype, {t.device for t in (*params, *grads, *first, *second)}
    narrow = {t.dtype for t in (*params, *grads)}
    if narrow != {dtype} or {t.dtype for t in (*first, *second)} != {wide(dtype)}:
        raise OpError(
            f"adamw: parameters and gradients are {sorted(map(str, narrow))}",
            remedy=f"give them one floating dtype, and moments in {wide(dtype)}",
        )
    if len(devices) != 1:
        raise OpError(
            f"adamw: tensors on {sorted(map(str, devices))}",
            remedy="call it once for each device",
        )
    if step < 1 or not (0 <= beta1 < 1 and 0 <= beta2 < 1):
        raise OpError(
            f"adamw: step {step}, betas {beta1} and {beta2}",
            remedy="count steps from 1; give betas from 0 to below 1",
        )


def _fake(*_: object) -> None:
    return None


def _cost(
    params: list[Tensor],
    grads: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    *_: object,
) -> Cost:
    narrow, state = sum(p.nbytes for p in params), sum(m.nbytes for m in first)
    return Cost(bytes=3 * narrow + 4 * state, flops=14 * sum(p.numel() for p in params))


@op(
    check=_check,
    fake=_fake,
    samples=_samples,
    tolerance=Tolerance(),
    cost=_cost,
    rows=(),
    mutates=("params", "first", "second"),
)
def adamw(
    params: list[Tensor],
    grads: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    step: int,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    decay: float = 0.01,
) -> None:
    """Update all parameters and their moments in place.

    >>> p, g, m, v = (torch.full((2,), value) for value in (1.0, 0.5, 0.0, 0.0))
    >>> adamw([p], [g], [m], [v], step=1, lr=0.1, decay=0.0)
    >>> p, m
    (tensor([0.9000, 0.9000]), tensor([0.0500, 0.0500]))
    """
    for p, g, m, v in zip(params, grads, first, second, strict=True):
        m.copy_(beta1 * m + (1 - beta1) * g)
        v.copy_(beta2 * v + (1 - beta2) * g * g)
        mean, variance = m / (1 - beta1**step), v / (1 - beta2**step)
        p.copy_(p - lr * (mean / (variance.sqrt() + eps) + decay * p))
