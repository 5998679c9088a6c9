"""The AdamW update (Loshchilov & Hutter 2017) of many tensors in one call.

    g = grad_scale g
    m = b1 m + (1 - b1) g               v = b2 v + (1 - b2) g^2
    p = p - lr ((m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay p)

Parameters, first and second moments are updated in place. `step` is t, counted from 1. A gradient
has the dtype of its parameter or float32, and is multiplied by `grad_scale`, which combines the
factors of gradient clipping and loss scaling. The arithmetic is in float32 (float64 for float64).
Moments are in float32 too, or all in bfloat16, rounded to nearest at each step, as in the training
of DeepSeek-V3.

An update is often smaller than half a unit in the last place of a bfloat16 parameter and would be
lost. Therefore such a parameter has a master weight in float32. The parameter is its upper 16 bits,
rounded, and `master_lo` stores the lower 16 bits as int16:

    bits = high * 65536 + low,    high = (bits + 0x8000) >> 16,    low = int16(bits)

The parameter is the master weight rounded to nearest, ties away from 0. The two parts together are
bitwise equal to the master weight, and the update is applied to the master weight. Without
`master_lo`, a bfloat16 parameter is rounded at each step.

`row_stats` receives what the update has read anyway, as seven sums over each row: `ROW_STATS`. A
row is an element of the first dimension, as ranks divide a tensor; a vector has rows of one.

A model has hundreds of tensors, most of them small. One kernel per tensor would take longer to
launch than to run, so one call updates all of them.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ingot.core.errors import OpError
from ingot.ops.arguments import accum_dtype
from ingot.ops.inputs import SampleInput, TensorMaker
from ingot.ops.op import op
from ingot.ops.record import Cost, Tolerance

ROW_STATS = ("gg", "gm", "mm", "uu", "pp", "gu", "v")
"""Columns of `row_stats`: sums of g g, g m and so on, of the scaled gradient g, the first moment m
before the update, the change u of the parameter, which is subtracted, and the parameter p before
it; and of the square roots of the second moment v."""


def num_rows(param: Tensor) -> int:
    """Return the number of rows of a tensor: elements of its first dimension; one of a scalar.

    >>> num_rows(torch.zeros(3, 4)), num_rows(torch.zeros(5)), num_rows(torch.tensor(0.0))
    (3, 5, 1)
    """
    return param.shape[0] if param.dim() else 1


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """Split a float32 tensor into its bfloat16 rounding and the lower 16 bits in int16.

    >>> high, low = split(torch.tensor([1.0, 1.001, 1.999]))
    >>> high, low
    (tensor([1., 1., 2.], dtype=torch.bfloat16), tensor([    0,  8389, -8389], dtype=torch.int16))
    """
    bits = master.view(torch.int32)
    high = ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    return high, bits.to(torch.int16)


def join(high: Tensor, low: Tensor) -> Tensor:
    """Return the float32 tensor that was split into these two.

    >>> join(*split(torch.tensor([1.001, -0.0])))
    tensor([1.0010, -0.0000])
    """
    return ((high.view(torch.int16).int() << 16) + low).view(torch.float32)


def _samples(make: TensorMaker) -> Iterator[SampleInput]:
    def state(params: list[Tensor], scale: float = 1.0) -> tuple[list[Tensor], ...]:
        """Return gradients and moments; second moments are not negative."""
        grads = [make(*p.shape, scale=scale) for p in params]
        dtype = accum_dtype(make.dtype)
        exp_avgs = [make(*p.shape, scale=scale).to(dtype) for p in params]
        return grads, exp_avgs, [(make(*p.shape, scale=scale) ** 2).to(dtype) for p in params]

    params = [make(6, 16), make(16), make(3, 4, 5)]
    yield SampleInput("typical", (params, *state(params), [], 3, 1e-2))
    params = [make(67, 131), make(5000), make(3)]
    yield SampleInput("large", (params, *state(params), [], 100, 1e-3, 0.9, 0.999, 1e-8, 0.1))
    params = [make(7), make(1), make(0), make(3, 5)]
    yield SampleInput("odd", (params, *state(params), [], 2, 0.1, 0.8, 0.95, 1e-6, 0.0))
    params = [make(1)]
    yield SampleInput("one_row", (params, *state(params), [], 1, 1e-2))
    params = [make.strided(3, 5), make(4, 6).T]
    grads, exp_avgs, exp_avg_sqs = state(params)
    grads[0], exp_avgs[1] = make(5, 3).T, exp_avgs[1].T.contiguous().T
    yield SampleInput("strided", (params, grads, exp_avgs, exp_avg_sqs, [], 5, 1e-2))
    params = [make.spread(4, 33), make(8, 8) * 0]
    yield SampleInput("extreme", (params, *state(params, 2.0**-6), [], 10**6, 1e-2))
    params = [make(5, 7), make(40)]
    grads, *moments = state(params)
    grads[1] = grads[1].to(accum_dtype(make.dtype))
    rest = (1e-2, 0.9, 0.95, 1e-8, 0.1, 0.3)
    yield SampleInput("scaled", (params, grads, *moments, [], 4, *rest))
    params = [make(9, 33), make(70), make(0, 3), make(3, 4, 5)]
    stats = make.floats([0.0] * 7 * 82).view(82, 7).to(accum_dtype(make.dtype))
    yield SampleInput("typical_stats", (params, *state(params), [], 3, *rest, stats))
    if make.dtype == torch.bfloat16:
        yield from _split_samples(make, state)


def _split_samples(
    make: TensorMaker, state: Callable[..., tuple[list[Tensor], ...]]
) -> Iterator[SampleInput]:
    """Yield samples for bfloat16 only: split master weights and 16-bit moments."""

    def bits(*shape: int) -> Tensor:
        return make.ints(2**16, *shape).sub(2**15).to(torch.int16)

    rest = (20, 1e-3, 0.9, 0.95, 1e-8, 0.1, 0.5)
    for name, shapes in {
        "split": ((6, 16), (33,)),
        "split_large": ((67, 131), (5000,), (3,)),
        "split_odd": ((7,), (1,), (0,), (3, 5)),
    }.items():
        params = [make(*shape) for shape in shapes]
        yield SampleInput(name, (params, *state(params), [bits(*shape) for shape in shapes], *rest))
    params = [make.strided(3, 5), make(4, 6).T]
    grads, *moments = state(params)
    grads[0] = grads[0].float()
    yield SampleInput("split_strided", (params, grads, *moments, [bits(5, 3).T, bits(6, 4)], *rest))
    params = [make(9, 13), make(50)]
    grads, *moments = state(params)
    short = [[m.bfloat16() for m in some] for some in moments]
    yield SampleInput("short_moments", (params, grads, *short, [], *rest))
    low = [bits(9, 13), bits(50)]
    yield SampleInput("split_short_moments", ([p + 1 for p in params], grads, *short, low, *rest))
    stats = make.floats([0.0] * 7 * 59).view(59, 7)
    yield SampleInput("split_stats", (params, grads, *moments, low, *rest, stats))


def _check(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    master_lo: list[Tensor],
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    grad_scale: float,
    row_stats: Tensor | None,
) -> None:
    counts = [len(params), len(grads), len(exp_avgs), len(exp_avg_sqs), len(master_lo or params)]
    if len(set(counts)) != 1 or not params:
        raise OpError(
            f"adamw: {counts[:4]} params, grads, exp_avgs and exp_avg_sqs; "
            f"{len(master_lo)} master_lo",
            hint="pass equally many of each, at least one; `master_lo` may be empty",
        )
    for index, (p, *others) in enumerate(
        zip(params, grads, exp_avgs, exp_avg_sqs, master_lo or params, strict=True)
    ):
        if any(other.shape != p.shape for other in others):
            raise OpError(
                f"adamw: parameter {index} is {tuple(p.shape)}, its gradient and state "
                f"{[tuple(other.shape) for other in others]}",
                hint="pass tensors of the same shape",
            )
    _check_dtypes(params, grads, [*exp_avgs, *exp_avg_sqs], master_lo)
    devices = {t.device for t in (*params, *grads, *exp_avgs, *exp_avg_sqs, *master_lo)}
    if len(devices) != 1:
        raise OpError(
            f"adamw: tensors on {sorted(map(str, devices))}",
            hint="call it once for each device",
        )
    if row_stats is not None:
        _check_row_stats(params, row_stats)
    if step < 1 or not (0 <= beta1 < 1 and 0 <= beta2 < 1):
        raise OpError(
            f"adamw: step {step}, betas {beta1} and {beta2}",
            hint="count steps from 1; pass betas from 0 to below 1",
        )


def _check_row_stats(params: list[Tensor], row_stats: Tensor) -> None:
    expected = sum(map(num_rows, params)), len(ROW_STATS)
    dtype = accum_dtype(params[0].dtype)
    fits = row_stats.shape == expected and row_stats.dtype == dtype
    if not fits or not row_stats.is_contiguous() or row_stats.device != params[0].device:
        raise OpError(
            f"adamw: row_stats is {row_stats.dtype} {tuple(row_stats.shape)} on {row_stats.device}",
            hint=f"pass {expected}, contiguous, in {dtype} on {params[0].device}",
        )


def _check_dtypes(
    params: list[Tensor], grads: list[Tensor], moments: list[Tensor], master_lo: list[Tensor]
) -> None:
    dtype = params[0].dtype
    if {p.dtype for p in params} != {dtype} or not dtype.is_floating_point:
        raise OpError(
            f"adamw: parameters are {_dtypes(params)}",
            hint="pass one floating dtype, or call it once for each",
        )
    if not {g.dtype for g in grads} <= {dtype, torch.float32}:
        raise OpError(
            f"adamw: gradients are {_dtypes(grads)}",
            hint=f"pass each in {dtype}, as parameters are, or in torch.float32",
        )
    if {m.dtype for m in moments} not in ({accum_dtype(dtype)}, {torch.bfloat16}):
        raise OpError(
            f"adamw: moments are {_dtypes(moments)}",
            hint=f"pass all of them in {accum_dtype(dtype)}, or all in torch.bfloat16",
        )
    if master_lo and (dtype != torch.bfloat16 or {t.dtype for t in master_lo} != {torch.int16}):
        raise OpError(
            f"adamw: `master_lo` is {_dtypes(master_lo)}, with parameters in {dtype}",
            hint="pass torch.int16 with parameters in torch.bfloat16, else an empty list",
        )


def _dtypes(given: list[Tensor]) -> str:
    return ", ".join(sorted({str(t.dtype) for t in given}))


def _fake(*_: object) -> None:
    return None


def _cost(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    master_lo: list[Tensor],
    *rest: object,
) -> Cost:
    read, written = (
        sum(t.nbytes for t in ts) for ts in (grads, (*params, *exp_avgs, *exp_avg_sqs, *master_lo))
    )
    stats = rest[-1].nbytes if isinstance(rest[-1], Tensor) else 0
    return Cost(bytes=read + 2 * written + stats, flops=15 * sum(p.numel() for p in params))


def _join_master_weights(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    master_lo: list[Tensor],
    *rest: object,
) -> tuple[Tensor, ...]:
    """Return the mutated tensors, with split parameters joined to master weights."""
    joined = map(join, (p.bfloat16() for p in params), master_lo) if master_lo else params
    stats = (row for row in (rest[-1],) if isinstance(row, Tensor))
    return *joined, *exp_avgs, *exp_avg_sqs, *stats


@op(
    check=_check,
    fake=_fake,
    samples=_samples,
    tolerance=Tolerance(),
    cost=_cost,
    row_args=(),
    mutates=("params", "exp_avgs", "exp_avg_sqs", "master_lo", "row_stats"),
    decode_outputs=_join_master_weights,
)
def adamw(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    master_lo: list[Tensor],
    step: int,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    grad_scale: float = 1.0,
    row_stats: Tensor | None = None,
) -> None:
    """Update all parameters and their moments in place; `master_lo` may be empty.

    `row_stats` (rows of all parameters, 7) receives the sums of `ROW_STATS` over each row.

    >>> p, g, m, v = (torch.full((2,), value) for value in (1.0, 0.5, 0.0, 0.0))
    >>> adamw([p], [g], [m], [v], [], step=1, lr=0.1, weight_decay=0.0)
    >>> p, m
    (tensor([0.9000, 0.9000]), tensor([0.0500, 0.0500]))
    """
    first_row = 0
    for index, (p, m, v) in enumerate(zip(params, exp_avgs, exp_avg_sqs, strict=True)):
        g, before = grad_scale * grads[index], m.clone()
        m.copy_(beta1 * m + (1 - beta1) * g)
        v.copy_(beta2 * v + (1 - beta2) * g * g)
        mean, variance = m / (1 - beta1**step), v / (1 - beta2**step)
        master = join(p.bfloat16(), master_lo[index]).to(accum_dtype(p.dtype)) if master_lo else p
        change = lr * (mean / (variance.sqrt() + eps) + weight_decay * master)
        if row_stats is not None:
            end = first_row + num_rows(p)
            row_stats[first_row:end] = _row_sums(g, before, change, master, v)
            first_row = end
        master = master - change
        if master_lo:
            master, rest = split(master.float())
            master_lo[index].copy_(rest)
        p.copy_(master)


def _row_sums(g: Tensor, m: Tensor, u: Tensor, p: Tensor, v: Tensor) -> Tensor:
    """Return the sums of `ROW_STATS`, (rows, 7)."""
    g, m, u, p, v = (
        t.reshape(num_rows(t), t[:1].numel() if t.dim() else 1) for t in (g, m, u, p, v)
    )
    terms = (g * g, g * m, m * m, u * u, p * p, g * u, v.sqrt())
    return torch.stack([term.sum(1) for term in terms], 1)
