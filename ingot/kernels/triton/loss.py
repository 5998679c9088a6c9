"""`loss` on GPUs: logits are read once, and the `linear_` ops never write them to memory.

From logits, a program loops over its row with a running maximum and sum. The backward pass
recomputes these, then reads the row once more.

The `linear_` ops multiply tiles of hidden states by chunks of `VOCAB_CHUNK` vocabulary entries on
the tensor cores, and keep only what a loss needs of each chunk: maximum, sum of exponentials, sum
of logits, and the target's logit. A second kernel merges the chunks in order, so a token's loss
does not depend on the other tokens. The backward pass processes `TOKEN_CHUNK` tokens at a time: the
gradient of their logits is stored, rounded once, and multiplied by hidden states and weight; the
weight's gradient is accumulated in float32.
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
from ingot.kernels.triton.kernel import elementwise_space, kernel
from ingot.kernels.triton.launch import KernelConfig
from ingot.kernels.triton.linear import (
    GROUP_M,
    gemm_space,
    gemm_tile,
    input_precision,
    itemsize,
    matmul,
    swizzle,
)
from ingot.kernels.triton.provider import ExampleInputs, as_rows, provide
from ingot.kernels.triton.softmax import online_softmax
from ingot.kernels.triton.target import TargetSpec
from ingot.ops.gradient import Backward

VOCAB_CHUNK = 1024  # vocabulary entries whose logits one program reduces
TOKEN_CHUNK = 2048  # tokens whose logit gradients exist at a time
_MAX_BLOCK_V = 4096


def _row_space(target: TargetSpec, BLOCK_V: int, **_: object) -> Iterator[KernelConfig]:
    yield from elementwise_space(target, BLOCK_V)


@triton.jit
def _loss_from_stats(
    lse, target_logit, logit_sum, vocab_size, smoothing, z_loss, LOGPROB: tl.constexpr
):
    """Return a token's loss, or its log-probability, from the statistics of its logits."""
    if LOGPROB:
        loss = target_logit - lse
    else:
        loss = lse - (1.0 - smoothing) * target_logit + z_loss * lse * lse
        loss -= tl.where(smoothing > 0, smoothing * (logit_sum / vocab_size), 0.0)
    return loss


@triton.jit
def _dlogits_from_probs(
    probs, is_target, lse, grad, vocab_size, smoothing, z_loss, LOGPROB: tl.constexpr
):
    """Return the gradient of the logits from their probabilities."""
    if LOGPROB:
        dlogits = grad * (tl.where(is_target, 1.0, 0.0) - probs)
    else:
        dlogits = probs * (1.0 + 2.0 * z_loss * lse) - smoothing / vocab_size
        dlogits = grad * (dlogits - tl.where(is_target, 1.0 - smoothing, 0.0))
    return dlogits


@triton.jit
def _row_stats(logits, vocab_size, SMOOTHING: tl.constexpr, BLOCK_V: tl.constexpr):
    """Return the log-sum-exp and the sum of a row of logits."""
    row_max = tl.full([1], float("-inf"), tl.float32)
    row_sum = tl.zeros([1], tl.float32)
    logit_sum = tl.zeros([1], tl.float32)
    for start_v in range(0, vocab_size, BLOCK_V):
        offs_v = (start_v + tl.arange(0, BLOCK_V))[None, :]
        mask = offs_v < vocab_size
        z = tl.load(logits + offs_v, mask, other=float("-inf")).to(tl.float32)
        row_max, row_sum = online_softmax(z, row_max, row_sum)
        if SMOOTHING:
            logit_sum += tl.sum(tl.where(mask, z, 0.0), 1)
    return row_max + tl.log(row_sum), logit_sum


@kernel(space=_row_space, bound_by="bandwidth", scalar_loads=2)
@triton.jit
def _loss(
    logits, targets, out, vocab_size, stride_lm, ignore_index, smoothing, z_loss,
    LOGPROB: tl.constexpr, SMOOTHING: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Compute the loss of a token."""
    token = tl.program_id(0).to(tl.int64)
    logits += token * stride_lm
    target = tl.load(targets + token).to(tl.int64)
    lse, logit_sum = _row_stats(logits, vocab_size, SMOOTHING, BLOCK_V)
    offs = tl.arange(0, 1) + target
    known = (offs >= 0) & (offs < vocab_size)
    target_logit = tl.load(logits + offs, known, other=float("nan")).to(tl.float32)
    loss = _loss_from_stats(lse, target_logit, logit_sum, vocab_size, smoothing, z_loss, LOGPROB)
    if not LOGPROB:
        loss = tl.where(offs == ignore_index, 0.0, loss)
    tl.store(out + token + tl.arange(0, 1), loss)


@kernel(space=_row_space, bound_by="bandwidth", scalar_loads=2)
@triton.jit
def _loss_backward(
    logits, targets, grad_output, grad_logits, vocab_size, stride_lm, ignore_index, smoothing,
    z_loss,
    LOGPROB: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of a token's logits."""
    token = tl.program_id(0).to(tl.int64)
    logits += token * stride_lm
    target = tl.load(targets + token).to(tl.int64)
    grad = tl.load(grad_output + token + tl.arange(0, 1))
    if not LOGPROB:
        grad = tl.where(target + tl.arange(0, 1) == ignore_index, 0.0, grad)
    lse, _ = _row_stats(logits, vocab_size, False, BLOCK_V)
    for start_v in range(0, vocab_size, BLOCK_V):
        offs_v = start_v + tl.arange(0, BLOCK_V)
        mask = offs_v < vocab_size
        z = tl.load(logits + offs_v, mask, other=float("-inf")).to(tl.float32)
        dlogits = _dlogits_from_probs(
            tl.exp(z - lse), offs_v == target, lse, grad, vocab_size, smoothing, z_loss, LOGPROB
        )
        ptrs = grad_logits + token * vocab_size + offs_v
        tl.store(ptrs, dlogits.to(grad_logits.dtype.element_ty), mask)


def _dlogits_space(target: TargetSpec, INPUT_PRECISION: str, **_: object) -> Iterator[KernelConfig]:
    # The gradient needs registers as well: 128 accumulator registers per thread spilled on sm_90.
    yield from gemm_space(
        target, itemsize(INPUT_PRECISION), max_acc_registers=64 if target.arch == 90 else 128
    )


def _chunk_stats_space(
    target: TargetSpec, INPUT_PRECISION: str, **_: object
) -> Iterator[KernelConfig]:
    # Logits, their exponentials and the row statistics are live at the same time.
    max_acc_registers = 32 if target.max_tile_registers < 128 else 64
    yield from gemm_space(target, itemsize(INPUT_PRECISION), max_acc_registers=max_acc_registers)


@kernel(space=_chunk_stats_space, bound_by="tensor cores")
@triton.jit
def _chunk_stats(
    hidden, weight, targets, max_out, sum_out, logit_sum_out, target_logit_out, M, vocab_size, K,
    stride_hm, stride_wv,
    VOCAB_CHUNK: tl.constexpr, EVEN_K: tl.constexpr, SMOOTHING: tl.constexpr,
    INPUT_PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute the logit statistics of a tile of tokens for a chunk of the vocabulary."""
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    chunk = tl.program_id(1)
    target = tl.load(targets + offs_m, offs_m < M, other=-1).to(tl.int64)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    logit_sum = tl.zeros([BLOCK_M], tl.float32)
    target_logit = tl.zeros([BLOCK_M], tl.float32)
    for start_v in range(0, tl.minimum(VOCAB_CHUNK, vocab_size - chunk * VOCAB_CHUNK), BLOCK_N):
        offs_v = chunk * VOCAB_CHUNK + start_v + tl.arange(0, BLOCK_N)
        z = gemm_tile(
            hidden, weight, tl.zeros([BLOCK_M, BLOCK_N], tl.float32), offs_m, offs_v, M,
            vocab_size, K, stride_hm, 1, stride_wv, 1, BLOCK_K, EVEN_K, INPUT_PRECISION,
        )  # fmt: skip
        target_logit += tl.sum(tl.where(offs_v[None, :] == target[:, None], z, 0.0), 1)
        if SMOOTHING:
            logit_sum += tl.sum(z, 1)  # out-of-bounds columns are 0
        z = tl.where((offs_v < vocab_size)[None, :], z, float("-inf"))
        row_max, row_sum = online_softmax(z, row_max, row_sum)
    offs = chunk.to(tl.int64) * M + offs_m
    tl.store(max_out + offs, row_max, offs_m < M)
    tl.store(sum_out + offs, row_sum, offs_m < M)
    tl.store(target_logit_out + offs, target_logit, offs_m < M)
    if SMOOTHING:
        tl.store(logit_sum_out + offs, logit_sum, offs_m < M)


def _merge_space(target: TargetSpec, **_: object) -> Iterator[KernelConfig]:
    yield KernelConfig.of(2)


@kernel(space=_merge_space, bound_by="latency")
@triton.jit
def _merge_stats(
    chunk_max, chunk_sum, chunk_logit_sum, chunk_target_logit, targets, out, lse_out, M, num_chunks,
    vocab_size, ignore_index, smoothing, z_loss,
    LOGPROB: tl.constexpr, SMOOTHING: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Merge the chunk statistics of a tile of tokens in order, and compute their loss."""
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask = offs_m < M
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    target_logit = tl.zeros([BLOCK_M], tl.float32)
    logit_sum = tl.zeros([BLOCK_M], tl.float32)
    for chunk in range(num_chunks):
        offs = offs_m.to(tl.int64) + chunk * M
        next_max = tl.load(chunk_max + offs, mask, other=0.0)
        next_sum = tl.load(chunk_sum + offs, mask, other=1.0)
        new_max = tl.maximum(row_max, next_max)
        row_sum = row_sum * tl.exp(row_max - new_max) + next_sum * tl.exp(next_max - new_max)
        row_max = new_max
        target_logit += tl.load(chunk_target_logit + offs, mask, other=0.0)
        if SMOOTHING:
            logit_sum += tl.load(chunk_logit_sum + offs, mask, other=0.0)
    lse = row_max + tl.log(row_sum)
    loss = _loss_from_stats(lse, target_logit, logit_sum, vocab_size, smoothing, z_loss, LOGPROB)
    if not LOGPROB:
        target = tl.load(targets + offs_m, mask, other=0)
        loss = tl.where(target == ignore_index, 0.0, loss)
    tl.store(out + offs_m, loss, mask)
    tl.store(lse_out + offs_m, lse, mask)


@kernel(space=_dlogits_space, bound_by="tensor cores")
@triton.jit
def _dlogits(
    hidden, weight, targets, lse, grad_output, out, M, vocab_size, K, stride_hm, stride_wv,
    ignore_index, smoothing, z_loss,
    LOGPROB: tl.constexpr, EVEN_K: tl.constexpr, INPUT_PRECISION: tl.constexpr,
    GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Recompute a tile of logits and compute its gradient."""
    m_tile, v_tile = swizzle(
        tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(vocab_size, BLOCK_N), GROUP_M
    )
    offs_m = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_v = v_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    z = gemm_tile(
        hidden, weight, tl.zeros([BLOCK_M, BLOCK_N], tl.float32), offs_m, offs_v, M, vocab_size,
        K, stride_hm, 1, stride_wv, 1, BLOCK_K, EVEN_K, INPUT_PRECISION,
    )  # fmt: skip
    target = tl.load(targets + offs_m, offs_m < M, other=-1).to(tl.int64)
    grad = tl.load(grad_output + offs_m, offs_m < M, other=0.0)
    if not LOGPROB:
        grad = tl.where(target == ignore_index, 0.0, grad)
    row_lse = tl.load(lse + offs_m, offs_m < M, other=0.0)[:, None]
    is_target = offs_v[None, :] == target[:, None]
    dlogits = _dlogits_from_probs(
        tl.exp(z - row_lse),
        is_target,
        row_lse,
        grad[:, None],
        vocab_size,
        smoothing,
        z_loss,
        LOGPROB,
    )
    mask = (offs_m < M)[:, None] & (offs_v < vocab_size)[None, :]
    offs = offs_m.to(tl.int64)[:, None] * vocab_size + offs_v[None, :]
    tl.store(out + offs, dlogits.to(out.dtype.element_ty), mask)


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
        vocab_size = rows.shape[1]
        _loss.launch(
            (rows.shape[0],),
            *(rows, targets.contiguous(), out, vocab_size, rows.stride(0), ignore_index),
            *(float(label_smoothing), float(z_loss)),
            LOGPROB=logprob,
            SMOOTHING=label_smoothing > 0,
            BLOCK_V=min(_MAX_BLOCK_V, triton.next_power_of_2(vocab_size)),
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
        grad_logits = logits.new_empty(logits.shape)
        rows = as_rows(logits)
        vocab_size = rows.shape[1]
        _loss_backward.launch(
            (rows.shape[0],),
            *(rows, targets.contiguous(), grads[0].contiguous(), grad_logits, vocab_size),
            *(rows.stride(0), ignore_index, float(label_smoothing), float(z_loss)),
            LOGPROB=logprob,
            BLOCK_V=min(_MAX_BLOCK_V, triton.next_power_of_2(vocab_size)),
        )
        return [grad_logits, *(None for _ in needs[1:])]

    return backward


def _loss_and_lse(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    options: tuple[int, float, float],
    logprob: bool,
) -> tuple[Tensor, Tensor]:
    """Return the loss and the log-sum-exp of each token."""
    (M, K), vocab_size = hidden.shape, weight.shape[0]
    num_chunks, smoothing = triton.cdiv(vocab_size, VOCAB_CHUNK), options[1] > 0
    chunk_stats = [
        hidden.new_empty((num_chunks, M), dtype=torch.float32) if needed else None
        for needed in (True, True, smoothing, True)
    ]
    _chunk_stats.launch(
        lambda constants: (triton.cdiv(M, constants["BLOCK_M"]), num_chunks),
        *(hidden, weight, targets, *chunk_stats, M, vocab_size, K),
        *(hidden.stride(0), weight.stride(0)),
        VOCAB_CHUNK=VOCAB_CHUNK,
        EVEN_K=K % 64 == 0,
        SMOOTHING=smoothing,
        INPUT_PRECISION=input_precision(hidden.dtype),
    )
    loss = hidden.new_empty((M,), dtype=torch.float32)
    lse = torch.empty_like(loss)
    block_m = 64
    _merge_stats.launch(
        (triton.cdiv(M, block_m),),
        *(*chunk_stats, targets, loss, lse, M, num_chunks, vocab_size, *options),
        LOGPROB=logprob,
        SMOOTHING=smoothing,
        BLOCK_M=block_m,
    )
    return loss, lse


def _parse_options(args: tuple[Any, ...]) -> tuple[int, float, float]:
    ignore_index, smoothing, z_loss = args or (0, 0.0, 0.0)
    return ignore_index, float(smoothing), float(z_loss)


def _linear_forward(logprob: bool) -> Any:
    def forward(hidden: Tensor, weight: Tensor, targets: Tensor, *options: Any) -> Tensor:
        args = as_rows(hidden), as_rows(weight), targets.contiguous()
        return _loss_and_lse(*args, _parse_options(options), logprob)[0]

    return forward


def _loss_and_grads(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    options: tuple[int, float, float],
    logprob: bool,
    grad_output: Tensor,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the loss of each token, and the needed gradients of hidden states and weight."""
    hidden, weight, targets = as_rows(hidden), as_rows(weight), targets.contiguous()
    loss, lse = _loss_and_lse(hidden, weight, targets, options, logprob)
    grad_hidden = hidden.new_empty(hidden.shape) if needs[0] else None
    grad_weight = weight.new_zeros(weight.shape, dtype=torch.float32) if needs[1] else None
    for start in range(0, len(hidden), TOKEN_CHUNK):
        chunk = slice(start, start + TOKEN_CHUNK)
        chunk_args = hidden[chunk], targets[chunk], lse[chunk], grad_output[chunk]
        dlogits = _chunk_dlogits(*chunk_args, weight, options, logprob)
        if grad_hidden is not None:
            matmul(dlogits, weight.T, out=grad_hidden[chunk])
        if grad_weight is not None:
            matmul(dlogits.T, hidden[chunk].T, residual=grad_weight, out=grad_weight)
    return loss, grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype)


def _linear_backward(logprob: bool) -> Backward:
    def backward(
        needs: list[bool],
        grads: list[Tensor],
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        *options_args: Any,
    ) -> list[Tensor | None]:
        grad_output, options = grads[0].contiguous(), _parse_options(options_args)
        _, *input_grads = _loss_and_grads(
            hidden, weight, targets, options, logprob, grad_output, needs
        )
        return [*input_grads, *(None for _ in needs[2:])]

    return backward


def _forward_backward(
    hidden: Tensor, weight: Tensor, targets: Tensor, *options_args: Any
) -> tuple[Tensor, Tensor | None, Tensor]:
    *options, grad_value, weight_grad = options_args
    grad_output = hidden.new_full(targets.shape, grad_value, dtype=torch.float32)
    needs, parsed = (True, weight_grad), _parse_options(tuple(options))
    losses, of_hidden, of_weight = _loss_and_grads(
        hidden, weight, targets, parsed, False, grad_output, needs
    )
    return (
        losses,
        of_hidden,
        weight.new_empty(0, weight.shape[1]) if of_weight is None else of_weight,
    )


def _chunk_dlogits(
    hidden: Tensor,
    targets: Tensor,
    lse: Tensor,
    grad_output: Tensor,
    weight: Tensor,
    options: tuple[int, float, float],
    logprob: bool,
) -> Tensor:
    (M, K), vocab_size = hidden.shape, weight.shape[0]
    dlogits = hidden.new_empty((M, vocab_size))

    def grid(constants: dict[str, Any]) -> tuple[int]:
        num_m_tiles = triton.cdiv(M, constants["BLOCK_M"])
        return (num_m_tiles * triton.cdiv(vocab_size, constants["BLOCK_N"]),)

    _dlogits.launch(
        grid,
        *(hidden, weight, targets, lse, grad_output, dlogits, M, vocab_size, K),
        *(hidden.stride(0), weight.stride(0), *options),
        LOGPROB=logprob,
        EVEN_K=K % 64 == 0,
        INPUT_PRECISION=input_precision(hidden.dtype),
        GROUP_M=GROUP_M,
    )
    return dlogits


def _supported(rows: Tensor, *_: object) -> bool:
    return rows.numel() > 0


def _example(options: tuple[Any, ...]) -> Any:
    return lambda make: (make(8192, 131072), make.ints(8192, below=131072), *options)


def _linear_example(options: tuple[Any, ...]) -> Any:
    def example(make: ExampleInputs) -> tuple[Any, ...]:
        targets = make.ints(4096, below=131072)
        return make(4096, 4096), make(131072, 4096), targets, *options

    return example


def linear_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Compute the logits with the GEMM of `linear`, without rounding them."""
    logits = hidden.new_empty((len(hidden), len(weight)), dtype=torch.float32)
    return matmul(hidden, weight, out=logits)[0]


def _logits_example(make: ExampleInputs) -> tuple[Any, ...]:
    return make(64, 4096), make(131072, 4096)


provide(ops.linear_logits, linear_logits, example=_logits_example, supports=_supported)

for _op, _linear_op, _logprob, _default_options in (
    (ops.token_logprobs, ops.linear_token_logprobs, True, ()),
    (ops.cross_entropy, ops.linear_cross_entropy, False, (-100, 0.0, 0.0)),
):
    provide(
        _op,
        _forward(_logprob),
        example=_example(_default_options),
        supports=_supported,
        backward=_backward(_logprob),
    )
    provide(
        _linear_op,
        _linear_forward(_logprob),
        example=_linear_example(_default_options),
        supports=_supported,
        backward=_linear_backward(_logprob),
    )

provide(
    ops.linear_cross_entropy_fwd_bwd,
    _forward_backward,
    example=_linear_example((-100, 0.0, 0.0, 1.0)),
    supports=_supported,
)
