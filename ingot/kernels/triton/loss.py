"""`loss` on GPUs: the logits are read once; those of a `linear_` form are never in memory.

From logits, a program walks along its row with a running maximum and sum. Its gradient computes
these again, then reads the row once more.

The `linear_` forms multiply tiles of hidden states by chunks of `CHUNK` tokens of the vocabulary,
on the tensor cores, and keep of each chunk what a loss needs: maximum, sum of exponentials, sum of
logits, the target's logit. A second kernel merges the chunks in their order, so a token's loss does
not depend on the others. Backward works through `TOKENS` tokens at a time: the gradient of their
logits is stored, rounded once, and multiplied by hidden states and weight; the weight's gradient is
added up in float32.
"""

# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ingot import ops
from ingot.kernels.triton.kernel import Config, by_elements, kernel
from ingot.kernels.triton.linear import (
    GROUP,
    itemsize,
    matmul,
    precision,
    product,
    swizzle,
    tile_space,
)
from ingot.kernels.triton.provider import Meta, as_rows, provide
from ingot.kernels.triton.softmax import online
from ingot.kernels.triton.target import Target
from ingot.ops.gradient import Backward

CHUNK = 1024  # tokens of the vocabulary whose logits are reduced by one program
TOKENS = 2048  # tokens whose logits' gradients exist at one time
_WIDEST = 4096


def _row_space(target: Target, WIDTH: int, **_: object) -> Iterator[Config]:
    yield from by_elements(target, WIDTH)


@triton.jit
def _loss_of(lse, chosen, sums, vocabulary, smoothing, z_loss, LOGPROB: tl.constexpr):
    """A token's loss from what is known of its logits, or its log-probability."""
    if LOGPROB:
        loss = chosen - lse
    else:
        loss = lse - (1.0 - smoothing) * chosen + z_loss * lse * lse
        loss -= tl.where(smoothing > 0, smoothing * (sums / vocabulary), 0.0)
    return loss


@triton.jit
def _slope(p, hit, lse, grad, vocabulary, smoothing, z_loss, LOGPROB: tl.constexpr):
    """The gradient of logits with probabilities p; `hit` is where the target is."""
    if LOGPROB:
        slope = grad * (tl.where(hit, 1.0, 0.0) - p)
    else:
        slope = p * (1.0 + 2.0 * z_loss * lse) - smoothing / vocabulary
        slope = grad * (slope - tl.where(hit, 1.0 - smoothing, 0.0))
    return slope


@triton.jit
def _row_statistics(logits, vocabulary, SMOOTH: tl.constexpr, WIDTH: tl.constexpr):
    """log-sum-exp and sum of a row."""
    largest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    sums = tl.zeros([1], tl.float32)
    for first in range(0, vocabulary, WIDTH):
        column = (first + tl.arange(0, WIDTH))[None, :]
        inside = column < vocabulary
        z = tl.load(logits + column, inside, other=float("-inf")).to(tl.float32)
        largest, total = online(z, largest, total)
        if SMOOTH:
            sums += tl.sum(tl.where(inside, z, 0.0), 1)
    return largest + tl.log(total), sums


@kernel(space=_row_space, bound="bandwidth", scalars=2)
@triton.jit
def _loss(
    logits, targets, out, vocabulary, logits_row, ignore_index, smoothing, z_loss,
    LOGPROB: tl.constexpr, SMOOTH: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The loss of a row."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_row
    target = tl.load(targets + row).to(tl.int64)
    lse, sums = _row_statistics(logits, vocabulary, SMOOTH, WIDTH)
    at = tl.arange(0, 1) + target
    known = (at >= 0) & (at < vocabulary)
    chosen = tl.load(logits + at, known, other=float("nan")).to(tl.float32)
    loss = _loss_of(lse, chosen, sums, vocabulary, smoothing, z_loss, LOGPROB)
    if not LOGPROB:
        loss = tl.where(at == ignore_index, 0.0, loss)
    tl.store(out + row + tl.arange(0, 1), loss)


@kernel(space=_row_space, bound="bandwidth", scalars=2)
@triton.jit
def _loss_backward(
    logits, targets, grad, logits_grad, vocabulary, logits_row, ignore_index, smoothing, z_loss,
    LOGPROB: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The gradient of a row of logits."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_row
    target = tl.load(targets + row).to(tl.int64)
    given = tl.load(grad + row + tl.arange(0, 1))
    if not LOGPROB:
        given = tl.where(target + tl.arange(0, 1) == ignore_index, 0.0, given)
    lse, _ = _row_statistics(logits, vocabulary, False, WIDTH)
    for first in range(0, vocabulary, WIDTH):
        column = first + tl.arange(0, WIDTH)
        inside = column < vocabulary
        z = tl.load(logits + column, inside, other=float("-inf")).to(tl.float32)
        slope = _slope(
            tl.exp(z - lse), column == target, lse, given, vocabulary, smoothing, z_loss, LOGPROB
        )
        at = logits_grad + row * vocabulary + column
        tl.store(at, slope.to(logits_grad.dtype.element_ty), inside)


def _product_space(target: Target, PRECISION: str, **_: object) -> Iterator[Config]:
    # Slopes need registers beside the sums: 128 of these a thread did spill on sm_90.
    yield from tile_space(target, itemsize(PRECISION), most=64 if target.arch == 90 else 128)


def _statistics_space(target: Target, PRECISION: str, **_: object) -> Iterator[Config]:
    # Logits, their exponentials and what is kept of a row, all at once.
    most = 32 if target.tile_registers < 128 else 64
    yield from tile_space(target, itemsize(PRECISION), most=most)


@kernel(space=_statistics_space, bound="tensor cores")
@triton.jit
def _chunk_statistics(
    hidden, weight, targets, largest_out, total_out, sum_out, chosen_out,
    tokens, vocabulary, depth, hidden_row, weight_row,
    CHUNK: tl.constexpr, EVEN: tl.constexpr, SMOOTH: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """What a loss needs of the logits of a tile of tokens and a chunk of the vocabulary."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    chunk = tl.program_id(1)
    target = tl.load(targets + row, row < tokens, other=-1).to(tl.int64)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS], tl.float32)
    chosen = tl.zeros([ROWS], tl.float32)
    for first in range(0, tl.minimum(CHUNK, vocabulary - chunk * CHUNK), COLUMNS):
        column = chunk * CHUNK + first + tl.arange(0, COLUMNS)
        z = product(
            hidden, weight, tl.zeros([ROWS, COLUMNS], tl.float32), row, column, tokens,
            vocabulary, depth, hidden_row, 1, weight_row, 1, INNER, EVEN, PRECISION,
        )  # fmt: skip
        chosen += tl.sum(tl.where(column[None, :] == target[:, None], z, 0.0), 1)
        if SMOOTH:
            sums += tl.sum(z, 1)  # columns beyond the vocabulary are 0
        z = tl.where((column < vocabulary)[None, :], z, float("-inf"))
        largest, total = online(z, largest, total)
    at = chunk.to(tl.int64) * tokens + row
    tl.store(largest_out + at, largest, row < tokens)
    tl.store(total_out + at, total, row < tokens)
    tl.store(chosen_out + at, chosen, row < tokens)
    if SMOOTH:
        tl.store(sum_out + at, sums, row < tokens)


def _merge_space(target: Target, **_: object) -> Iterator[Config]:
    yield Config.of(2)


@kernel(space=_merge_space, bound="latency")
@triton.jit
def _merge_statistics(
    largests, totals, sums, chosens, targets, out, lse_out, tokens, chunks, vocabulary,
    ignore_index, smoothing, z_loss,
    LOGPROB: tl.constexpr, SMOOTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The loss of a tile of tokens from their chunks, one after another."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < tokens
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    chosen = tl.zeros([ROWS], tl.float32)
    summed = tl.zeros([ROWS], tl.float32)
    for chunk in range(chunks):
        at = row.to(tl.int64) + chunk * tokens
        high = tl.load(largests + at, inside, other=0.0)
        part = tl.load(totals + at, inside, other=1.0)
        now = tl.maximum(largest, high)
        total = total * tl.exp(largest - now) + part * tl.exp(high - now)
        largest = now
        chosen += tl.load(chosens + at, inside, other=0.0)
        if SMOOTH:
            summed += tl.load(sums + at, inside, other=0.0)
    lse = largest + tl.log(total)
    loss = _loss_of(lse, chosen, summed, vocabulary, smoothing, z_loss, LOGPROB)
    if not LOGPROB:
        target = tl.load(targets + row, inside, other=0)
        loss = tl.where(target == ignore_index, 0.0, loss)
    tl.store(out + row, loss, inside)
    tl.store(lse_out + row, lse, inside)


@kernel(space=_product_space, bound="tensor cores")
@triton.jit
def _slopes(
    hidden, weight, targets, lse, grad, out, tokens, vocabulary, depth, hidden_row, weight_row,
    ignore_index, smoothing, z_loss,
    LOGPROB: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile of logits, which are computed again."""
    row_tile, column_tile = swizzle(
        tl.program_id(0), tl.cdiv(tokens, ROWS), tl.cdiv(vocabulary, COLUMNS), GROUP
    )
    row = row_tile * ROWS + tl.arange(0, ROWS)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    z = product(
        hidden, weight, tl.zeros([ROWS, COLUMNS], tl.float32), row, column, tokens, vocabulary,
        depth, hidden_row, 1, weight_row, 1, INNER, EVEN, PRECISION,
    )  # fmt: skip
    target = tl.load(targets + row, row < tokens, other=-1).to(tl.int64)
    given = tl.load(grad + row, row < tokens, other=0.0)
    if not LOGPROB:
        given = tl.where(target == ignore_index, 0.0, given)
    known = tl.load(lse + row, row < tokens, other=0.0)[:, None]
    hit = column[None, :] == target[:, None]
    slope = _slope(
        tl.exp(z - known), hit, known, given[:, None], vocabulary, smoothing, z_loss, LOGPROB
    )
    inside = (row < tokens)[:, None] & (column < vocabulary)[None, :]
    at = row.to(tl.int64)[:, None] * vocabulary + column[None, :]
    tl.store(out + at, slope.to(out.dtype.element_ty), inside)


def _forward(logprob: bool) -> Any:
    def forward(
        logits: Tensor,
        targets: Tensor,
        ignore_index: int = 0,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
    ) -> Tensor:
        out = logits.new_empty(targets.shape, dtype=torch.float32)
        rows = as_rows(logits)
        vocabulary = rows.shape[1]
        _loss.launch(
            (rows.shape[0],),
            *(rows, targets.contiguous(), out, vocabulary, rows.stride(0), ignore_index),
            *(float(label_smoothing), float(z_loss)),
            LOGPROB=logprob,
            SMOOTH=label_smoothing > 0,
            WIDTH=min(_WIDEST, triton.next_power_of_2(vocabulary)),
        )
        return out

    return forward


def _backward(logprob: bool) -> Backward:
    def backward(
        needs: list[bool],
        grads: list[Tensor],
        logits: Tensor,
        targets: Tensor,
        ignore_index: int = 0,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
    ) -> list[Tensor | None]:
        of_logits = logits.new_empty(logits.shape)
        rows = as_rows(logits)
        vocabulary = rows.shape[1]
        _loss_backward.launch(
            (rows.shape[0],),
            *(rows, targets.contiguous(), grads[0].contiguous(), of_logits, vocabulary),
            *(rows.stride(0), ignore_index, float(label_smoothing), float(z_loss)),
            LOGPROB=logprob,
            WIDTH=min(_WIDEST, triton.next_power_of_2(vocabulary)),
        )
        return [of_logits, *(None for _ in needs[1:])]

    return backward


def _statistics(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    options: tuple[int, float, float],
    logprob: bool,
) -> tuple[Tensor, Tensor]:
    """Loss and log-sum-exp of each token."""
    (tokens, depth), vocabulary = hidden.shape, weight.shape[0]
    chunks, smooth = triton.cdiv(vocabulary, CHUNK), options[1] > 0
    parts = [
        hidden.new_empty((chunks, tokens), dtype=torch.float32) if kept else None
        for kept in (True, True, smooth, True)
    ]
    _chunk_statistics.launch(
        lambda constants: (triton.cdiv(tokens, constants["ROWS"]), chunks),
        *(hidden, weight, targets, *parts, tokens, vocabulary, depth),
        *(hidden.stride(0), weight.stride(0)),
        CHUNK=CHUNK,
        EVEN=depth % 64 == 0,
        SMOOTH=smooth,
        PRECISION=precision(hidden.dtype),
    )
    loss = hidden.new_empty((tokens,), dtype=torch.float32)
    lse = torch.empty_like(loss)
    rows = 64
    _merge_statistics.launch(
        (triton.cdiv(tokens, rows),),
        *(*parts, targets, loss, lse, tokens, chunks, vocabulary, *options),
        LOGPROB=logprob,
        SMOOTH=smooth,
        ROWS=rows,
    )
    return loss, lse


def _options(given: tuple[Any, ...]) -> tuple[int, float, float]:
    ignore_index, smoothing, z_loss = given or (0, 0.0, 0.0)
    return ignore_index, float(smoothing), float(z_loss)


def _linear_forward(logprob: bool) -> Any:
    def forward(hidden: Tensor, weight: Tensor, targets: Tensor, *options: Any) -> Tensor:
        args = as_rows(hidden), as_rows(weight), targets.contiguous()
        return _statistics(*args, _options(options), logprob)[0]

    return forward


def _gradients(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    options: tuple[int, float, float],
    logprob: bool,
    grad: Tensor,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The loss of each token, and the gradients of hidden and weight that are needed."""
    hidden, weight, targets = as_rows(hidden), as_rows(weight), targets.contiguous()
    loss, lse = _statistics(hidden, weight, targets, options, logprob)
    of_hidden = hidden.new_empty(hidden.shape) if needs[0] else None
    of_weight = weight.new_zeros(weight.shape, dtype=torch.float32) if needs[1] else None
    for first in range(0, len(hidden), TOKENS):
        part = slice(first, first + TOKENS)
        rows = hidden[part], targets[part], lse[part], grad[part]
        slopes = _chunk_slopes(*rows, weight, options, logprob)
        if of_hidden is not None:
            matmul(slopes, weight.T, out=of_hidden[part])
        if of_weight is not None:
            matmul(slopes.T, hidden[part].T, residual=of_weight, out=of_weight)
    return loss, of_hidden, None if of_weight is None else of_weight.to(weight.dtype)


def _linear_backward(logprob: bool) -> Backward:
    def backward(
        needs: list[bool],
        grads: list[Tensor],
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        *given: Any,
    ) -> list[Tensor | None]:
        grad, options = grads[0].contiguous(), _options(given)
        _, *found = _gradients(hidden, weight, targets, options, logprob, grad, needs)
        return [*found, *(None for _ in needs[2:])]

    return backward


def _with_gradients(
    hidden: Tensor, weight: Tensor, targets: Tensor, *given: Any
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    *options, slope = given
    grad = hidden.new_full(targets.shape, slope, dtype=torch.float32)
    return _gradients(hidden, weight, targets, _options(tuple(options)), False, grad, (True, True))


def _chunk_slopes(
    hidden: Tensor,
    targets: Tensor,
    lse: Tensor,
    grad: Tensor,
    weight: Tensor,
    options: tuple[int, float, float],
    logprob: bool,
) -> Tensor:
    (tokens, depth), vocabulary = hidden.shape, weight.shape[0]
    slopes = hidden.new_empty((tokens, vocabulary))

    def grid(constants: dict[str, Any]) -> tuple[int]:
        down = triton.cdiv(tokens, constants["ROWS"])
        return (down * triton.cdiv(vocabulary, constants["COLUMNS"]),)

    _slopes.launch(
        grid,
        *(hidden, weight, targets, lse, grad, slopes, tokens, vocabulary, depth),
        *(hidden.stride(0), weight.stride(0), *options),
        LOGPROB=logprob,
        EVEN=depth % 64 == 0,
        PRECISION=precision(hidden.dtype),
        GROUP=GROUP,
    )
    return slopes


def _fits(rows: Tensor, *_: object) -> bool:
    return rows.numel() > 0


def _example(options: tuple[Any, ...]) -> Any:
    return lambda make: (make(8192, 131072), make.ints(8192, below=131072), *options)


def _linear_example(options: tuple[Any, ...]) -> Any:
    def example(make: Meta) -> tuple[Any, ...]:
        targets = make.ints(4096, below=131072)
        return make(4096, 4096), make(131072, 4096), targets, *options

    return example


for _op, _linear_op, _logprob, _some in (
    (ops.token_logprobs, ops.linear_token_logprobs, True, ()),
    (ops.cross_entropy, ops.linear_cross_entropy, False, (-100, 0.0, 0.0)),
):
    provide(
        _op,
        _forward(_logprob),
        example=_example(_some),
        supports=_fits,
        backward=_backward(_logprob),
    )
    provide(
        _linear_op,
        _linear_forward(_logprob),
        example=_linear_example(_some),
        supports=_fits,
        backward=_linear_backward(_logprob),
    )

provide(
    ops.linear_cross_entropy_fwd_bwd,
    _with_gradients,
    example=_linear_example((-100, 0.0, 0.0, 1.0)),
    supports=_fits,
)
