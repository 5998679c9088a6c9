"""The error of a result, and its bound.

The oracle is an op's reference in float64. The error of a row is its largest deviation from the
oracle divided by its largest magnitude; the error of a result is that of its worst row. The
gradient of an argument without a row per token, such as a weight, is measured as a whole.

The baseline is plain PyTorch at the same precision: the same reference in the dtype of the result,
with every step rounded. The error of a provider may be `Tolerance.forward` times the baseline's,
that of a gradient `Tolerance.backward` times (the rule of FlashAttention's tests). If the baseline
is nearly correct by chance, or unusable because it overflowed or cancelled, the bound is a number
of roundings: one if the result is narrower than the arithmetic, four otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ingot.ops.arguments import accum_dtype, as_tuple, map_tensors
from ingot.ops.dispatch import prefer
from ingot.ops.gradient import differentiate
from ingot.ops.record import Op

_MAX_BASELINE_ERROR = 0.25  # a baseline with a larger error is not used


def forward_errors(op: Op[..., Any], provider: str, args: tuple[Any, ...]) -> list[float]:
    """Return each output's error divided by its bound: at most 1 if the provider is correct.

    >>> from ingot import ops
    >>> args = torch.randn(4, 8), torch.ones(8), 1e-6
    >>> max(forward_errors(ops.rms_norm, "aten", args)) <= 1
    True
    """
    with prefer(provider):
        results = run_and_collect(op, op, args)
    oracle = run_and_collect(op, op.reference, _promote(args, torch.float64))
    baselines = run_and_collect(op, op.reference, _promote(args, results[0].dtype))
    return [
        relative_error(result, truth)
        / error_bound(result, relative_error(baseline, truth), op.tolerance.forward)
        for result, truth, baseline in zip(results, oracle, baselines, strict=True)
    ]


def backward_errors(op: Op[..., Any], provider: str, args: tuple[Any, ...]) -> dict[str, float]:
    """Return the error divided by its bound for the gradient of each argument that has one."""
    cotangents = _cotangents(op, args)
    with prefer(provider):
        results = _compute_gradients(op, op, args, cotangents)
    oracle = _compute_gradients(op, op.reference, _promote(args, torch.float64), cotangents)
    baselines = _compute_gradients(op, op.reference, args, cotangents)
    return {
        name: relative_error(result, oracle[name], name in op.row_args)
        / error_bound(
            result,
            relative_error(baselines[name], oracle[name], name in op.row_args),
            op.tolerance.backward,
        )
        for name, result in results.items()
    }


def run_and_collect(
    op: Op[..., Any], function: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[Tensor, ...]:
    """Return the outputs of a call, then the tensors it mutates; these are copies of the arguments.

    >>> from ingot import ops
    >>> run_and_collect(ops.silu, ops.silu, (torch.zeros(1),))
    (tensor([0.]),)
    """
    names = op.signature.parameters
    args = tuple(
        map_tensors(torch.clone, arg) if name in op.mutates and arg is not None else arg
        for name, arg in zip(names, args, strict=True)
    )
    returned = as_tuple(function(*args))
    return returned + (op.decode_outputs(*args) if op.decode_outputs else op.mutated_tensors(args))


def relative_error(actual: Tensor, oracle: Tensor, by_row: bool = True) -> float:
    """Return the worst row's largest deviation divided by its largest magnitude.

    It is inf if a value is non-finite in only one of the two, or if an integer differs.

    >>> relative_error(torch.tensor([[1.0, 4.0]]), torch.tensor([[2.0, 4.0]]))
    0.25
    """
    if not actual.numel():
        return 0.0
    if not actual.is_floating_point():
        return 0.0 if torch.equal(actual, oracle) else torch.inf
    rounded = oracle.to(actual.dtype)
    finite = rounded.isfinite()
    if not torch.equal(actual[~finite], rounded[~finite]):
        return torch.inf
    deviation = (actual.double() - oracle.double()).abs().where(finite, 0)
    magnitude = oracle.double().abs().where(finite, 0)
    if not by_row:
        deviation, magnitude = deviation.flatten(), magnitude.flatten()
    # Below the smallest normal number, the spacing of floats is constant.
    floor = torch.finfo(actual.dtype).tiny
    shares = deviation.amax(-1) / magnitude.amax(-1).clamp_min(floor)
    return float(shares.nan_to_num(torch.inf).max())


def error_bound(result: Tensor, baseline: float, factor: float) -> float:
    """Return the allowed error of a result, given that of the baseline and the tolerance's factor.

    >>> error_bound(torch.zeros(1), 1e-3, 2.0)
    0.002
    """
    if not result.is_floating_point():
        return 1.0
    eps = torch.finfo(result.dtype).eps
    roundings = 1 if result.dtype != accum_dtype(result.dtype) else 4
    return factor * max(roundings * eps / 2, baseline if baseline < _MAX_BASELINE_ERROR else 0.0)


def _cotangents(op: Op[..., Any], args: tuple[Any, ...]) -> list[Tensor]:
    """Return gradients of the outputs, in the dtypes of the outputs."""
    random = torch.Generator().manual_seed(0)
    outputs = as_tuple(op.fake(*args))
    return [torch.randn(o.shape, generator=random).to(o.device, o.dtype) for o in outputs]


def _compute_gradients(
    op: Op[..., Any],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    cotangents: list[Tensor],
) -> dict[str, Tensor]:
    needs = [isinstance(arg, Tensor) and arg.is_floating_point() for arg in args]
    outputs = as_tuple(function(*args))
    grads = [grad.to(out.dtype) for grad, out in zip(cotangents, outputs, strict=True)]
    gradients = differentiate(function)(needs, grads, *args)
    return {
        name: torch.zeros_like(arg) if gradient is None else gradient
        for name, arg, gradient, needed in zip(
            op.signature.parameters, args, gradients, needs, strict=True
        )
        if needed
    }


def _promote(args: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    def promote(arg: Any) -> Any:
        floating = isinstance(arg, Tensor) and arg.is_floating_point()
        return arg.to(torch.promote_types(arg.dtype, dtype)) if floating else arg

    return tuple(map_tensors(promote, arg) for arg in args)
