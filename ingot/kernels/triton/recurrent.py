"""`recurrent` on GPUs, forward: a cell is one GEMM kernel with the gates in its epilogue; sequences
and rollouts are one kernel in which a program computes all steps of 16 rows.

A program of `_gru_steps` writes the states of a step to memory and reads them for the next one,
after a barrier of its own threads: no program waits for another, and no step is a launch. A block
of rows reads all weights in every step, from L2 if they fit there.

Both compute in the convention of cuDNN (`reset_after=True`). The reference computes the other one,
and the gradients of the recurrences.
"""

# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ingot import ops
from ingot.kernels.triton.kernel import elementwise_space, kernel
from ingot.kernels.triton.launch import KernelConfig
from ingot.kernels.triton.linear import input_precision
from ingot.kernels.triton.provider import ExampleInputs, provide
from ingot.kernels.triton.sample import philox_uniform_at
from ingot.kernels.triton.target import TargetSpec

_STEP_ROWS = 16  # the fewest that tensor cores multiply
_MAX_CATEGORIES = 4096  # of a group, which is kept in registers


def _cell_space(target: TargetSpec, INPUT_PRECISION: str, **_: object) -> Iterator[KernelConfig]:
    """Yield tiles of rows and hidden channels; each has four accumulators."""
    for block_m, block_n, num_warps in ((64, 32, 4), (64, 32, 8), (32, 32, 4)):
        block_k = 32 if INPUT_PRECISION == "ieee" else 64
        stages = 1 if target.backend == "hip" else 2
        yield KernelConfig.of(num_warps, stages, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k)


def _steps_space(target: TargetSpec, HAS_HEAD: bool, **_: object) -> Iterator[KernelConfig]:
    # Other tiles, and more or fewer channels of a state at a time, spilled on sm_80 or sm_120.
    for num_warps in (4, 8):
        block_k = 16 if HAS_HEAD else 32
        yield KernelConfig.of(num_warps, 1, BLOCK_M=_STEP_ROWS, BLOCK_N=32, BLOCK_K=block_k)


@triton.jit
def _tanh(x):
    e = tl.exp(-2.0 * tl.abs(x))
    large = (1.0 - e) / (1.0 + e)
    t = x * x
    p = -6.27423291e-3 * t + 2.10716740e-2
    p = p * t - 5.38523085e-2
    p = p * t + 0.133325861
    p = p * t - 0.333333176
    return tl.where(tl.abs(x) < 0.55, x + x * t * p, tl.where(x < 0, -large, large))


@triton.jit
def _gate_sums(
    x, w, acc_r, acc_z, acc_n, offs_x, offs_n, mask_m, H, K, stride_w,
    BLOCK_K: tl.constexpr, INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    """Add rows of x, which begin at offs_x, times the three parts of a weight."""
    offs_k = tl.arange(0, BLOCK_K)
    x_ptrs = x + offs_x[:, None] + offs_k[None, :]
    w_ptrs = w + offs_n.to(tl.int64)[None, :] * stride_w + offs_k[:, None]
    part = H.to(tl.int64) * stride_w
    mask_n = (offs_n < H)[None, :]
    for start_k in range(0, K, BLOCK_K):
        mask_k = offs_k < K - start_k
        a = tl.load(x_ptrs, mask_m[:, None] & mask_k[None, :], other=0.0)
        mask_w = mask_n & mask_k[:, None]
        b = tl.load(w_ptrs, mask_w, other=0.0)
        acc_r = tl.dot(a, b, acc_r, input_precision=INPUT_PRECISION)
        b = tl.load(w_ptrs + part, mask_w, other=0.0)
        acc_z = tl.dot(a, b, acc_z, input_precision=INPUT_PRECISION)
        b = tl.load(w_ptrs + 2 * part, mask_w, other=0.0)
        acc_n = tl.dot(a, b, acc_n, input_precision=INPUT_PRECISION)
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K
    return acc_r, acc_z, acc_n


@triton.jit
def _bias_at(bias, offs_n, H):
    return tl.load(bias + offs_n, offs_n < H, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _mix(acc_r, acc_z, acc_xn, acc_hn, h, b_ih, b_hh, offs_n, H):
    """Return the next state of a tile from its sums and its state."""
    r = tl.sigmoid(acc_r + _bias_at(b_ih, offs_n, H) + _bias_at(b_hh, offs_n, H))
    z = tl.sigmoid(acc_z + _bias_at(b_ih + H, offs_n, H) + _bias_at(b_hh + H, offs_n, H))
    hn = acc_hn + _bias_at(b_hh + 2 * H, offs_n, H)
    n = _tanh(acc_xn + _bias_at(b_ih + 2 * H, offs_n, H) + r * hn)
    return (1.0 - z) * n + z * h


@kernel(space=_cell_space, bound_by="tensor cores")
@triton.jit
def _gru_cell(
    x, h, w_ih, w_hh, b_ih, b_hh, out, T, num_inputs, H, INPUT_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute a tile of rows and hidden channels."""
    offs_m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m = offs_m < T
    zeros = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    r, z, xn = _gate_sums(
        x, w_ih, zeros, zeros, zeros, offs_m * num_inputs, offs_n, mask_m, H, num_inputs,
        num_inputs, BLOCK_K, INPUT_PRECISION,
    )  # fmt: skip
    r, z, hn = _gate_sums(
        h, w_hh, r, z, zeros, offs_m * H, offs_n, mask_m, H, H, H, BLOCK_K, INPUT_PRECISION
    )
    mask = mask_m[:, None] & (offs_n < H)[None, :]
    offs = offs_m[:, None] * H + offs_n[None, :]
    state = tl.load(h + offs, mask, other=0.0).to(tl.float32)
    state = _mix(r, z, xn, hn, state, b_ih, b_hh, offs_n, H)
    tl.store(out + offs, state.to(out.dtype.element_ty), mask)


@triton.jit
def _store_outputs(
    y, states, w_out, b_out, row, active, num_outputs, H, INPUT_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute the outputs of rows of states."""
    for start_n in range(0, num_outputs, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        offs_k = tl.arange(0, BLOCK_K)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        w_ptrs = w_out + offs_n[None, :] * H + offs_k[:, None]
        h_ptrs = states + row[:, None] * H + offs_k[None, :]
        for start_k in range(0, H, BLOCK_K):
            mask_k = offs_k < H - start_k
            a = tl.load(h_ptrs, active[:, None] & mask_k[None, :], other=0.0)
            b = tl.load(w_ptrs, (offs_n < num_outputs)[None, :] & mask_k[:, None], other=0.0)
            acc = tl.dot(a, b, acc, input_precision=INPUT_PRECISION)
            h_ptrs += BLOCK_K
            w_ptrs += BLOCK_K
        acc += _bias_at(b_out, offs_n, num_outputs)
        mask = active[:, None] & (offs_n < num_outputs)[None, :]
        y_ptrs = y + row[:, None] * num_outputs + offs_n[None, :]
        tl.store(y_ptrs, acc.to(y.dtype.element_ty), mask)


@kernel(space=_steps_space, bound_by="latency")
@triton.jit
def _gru_steps(
    x, y, states, out, starts, w_ih, w_hh, b_ih, b_hh, w_out, b_out, B, num_actions, num_outputs, H,
    HAS_HEAD: tl.constexpr, INPUT_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute all steps of a block of a member's sequences.

    Sequence s has the tokens starts[s] to starts[s + 1] of x (tokens, actions) and `out` (tokens,
    H). It has one row more, from starts[s] + s on, of `states`; with a head also of y, its outputs,
    which are the first inputs. The first rows are the initial values.
    """
    member = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = rows < B
    sequence = member * B + rows
    start = tl.load(starts + sequence, mask_m, other=0).to(tl.int64)
    length = tl.load(starts + sequence + 1, mask_m, other=0).to(tl.int64) - start
    num_inputs = num_outputs + num_actions
    w_ih += member * 3 * H * num_inputs
    w_hh += member * 3 * H * H
    b_ih += member * 3 * H
    b_hh += member * 3 * H
    for step in range(0, tl.max(length, 0)):
        active = mask_m & (step < length)
        token = start + step
        before = token + sequence
        for start_n in range(0, H, BLOCK_N):
            offs_n = start_n + tl.arange(0, BLOCK_N)
            zeros = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            r, z, xn = _gate_sums(
                x, w_ih + num_outputs, zeros, zeros, zeros, token * num_actions, offs_n, active, H,
                num_actions, num_inputs, BLOCK_K, INPUT_PRECISION,
            )  # fmt: skip
            if HAS_HEAD:
                r, z, xn = _gate_sums(
                    y, w_ih, r, z, xn, before * num_outputs, offs_n, active, H, num_outputs,
                    num_inputs, BLOCK_K, INPUT_PRECISION,
                )  # fmt: skip
            r, z, hn = _gate_sums(
                states, w_hh, r, z, zeros, before * H, offs_n, active, H, H, H, BLOCK_K,
                INPUT_PRECISION,
            )  # fmt: skip
            mask = active[:, None] & (offs_n < H)[None, :]
            offs = before[:, None] * H + offs_n[None, :]
            state = tl.load(states + offs, mask, other=0.0).to(tl.float32)
            state = _mix(r, z, xn, hn, state, b_ih, b_hh, offs_n, H)
            tl.store(states + offs + H, state.to(states.dtype.element_ty), mask)
            if out is not None:
                out_ptrs = out + token[:, None] * H + offs_n[None, :]
                tl.store(out_ptrs, state.to(out.dtype.element_ty), mask)
        tl.debug_barrier()
        if HAS_HEAD:
            _store_outputs(
                y, states, w_out + member * num_outputs * H, b_out + member * num_outputs,
                before + 1, active, num_outputs, H, INPUT_PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            tl.debug_barrier()


def _rssm_space(
    target: TargetSpec, BLOCK_M: int, BLOCK_N: int, **_: object
) -> Iterator[KernelConfig]:
    yield from elementwise_space(target, BLOCK_M * BLOCK_N)


@triton.jit
def _softmax_rows(logits, offs, mask):
    scores = tl.load(logits + offs, mask, other=float("-inf")).to(tl.float32)
    row_max = tl.max(scores, 1)
    exps = tl.where(mask, tl.exp(scores - row_max[:, None]), 0.0)
    row_sum = tl.sum(exps, 1)
    return exps / row_sum[:, None]


@triton.jit
def _store_log(to, p, offs, mask):
    tl.store(to + offs, tl.log(tl.where(mask, p, 1.0)), mask)


@kernel(space=_rssm_space, bound_by="bandwidth", scalar_loads=4)
@triton.jit
def _rssm_step(
    prior, posterior, seeds, positions, sample, prior_log, log, R, G, C, unimix,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute the log-probabilities of a tile of groups, and a sample of each."""
    group = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)[None, :]
    mask = (group < R)[:, None] & (offs_n < C)
    offs = group[:, None] * C + offs_n
    p = tl.where(mask, (1.0 - unimix) * _softmax_rows(prior, offs, mask) + unimix / C, 0.0)
    _store_log(prior_log, p, offs, mask)
    if posterior is not None:
        p = tl.where(mask, (1.0 - unimix) * _softmax_rows(posterior, offs, mask) + unimix / C, 0.0)
    _store_log(log, p, offs, mask)
    row = group // G
    seed = tl.load(seeds + row, group < R, other=0).to(tl.int64)
    position = tl.load(positions + row, group < R, other=0).to(tl.int64)
    uniform = philox_uniform_at(seed, position, (group % G).to(tl.int32))
    threshold = (uniform * tl.sum(p, 1))[:, None]
    passed = tl.where(mask & (tl.cumsum(p, 1) <= threshold), 1, 0)
    index = tl.minimum(tl.sum(passed, 1), C - 1)[:, None]
    one_hot = tl.where(offs_n == index, 1.0, 0.0)
    tl.store(sample + offs, one_hot.to(sample.dtype.element_ty), mask)


@kernel(space=_rssm_space, bound_by="bandwidth")
@triton.jit
def _rssm_step_backward(
    logits, grad_sample, grad_log, grad_other, grad_logits, R, C, unimix,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the logits of a tile of groups."""
    group = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)[None, :]
    mask = (group < R)[:, None] & (offs_n < C)
    offs = group[:, None] * C + offs_n
    s = _softmax_rows(logits, offs, mask)
    grad = tl.load(grad_log + offs, mask, other=0.0)
    if grad_other is not None:
        grad += tl.load(grad_other + offs, mask, other=0.0)
    grad = grad / ((1.0 - unimix) * s + unimix / C)
    if grad_sample is not None:
        grad += tl.load(grad_sample + offs, mask, other=0.0).to(tl.float32)
    grad = (1.0 - unimix) * s * (grad - tl.sum(s * grad, 1)[:, None])
    tl.store(grad_logits + offs, grad.to(grad_logits.dtype.element_ty), mask)


def _gru_cell_forward(x: Tensor, h: Tensor, *weights: Any) -> Tensor:
    out = h.new_empty(h.shape)
    args = [tensor.contiguous() for tensor in (x, h, *weights[:4])]
    rows, hidden = h.shape

    def grid(constants: dict[str, Any]) -> tuple[int, int]:
        tiles = triton.cdiv(rows, constants["BLOCK_M"])
        return tiles, triton.cdiv(hidden, constants["BLOCK_N"])

    _gru_cell.launch(
        grid,
        *(*args, out, rows, x.shape[1], hidden),
        INPUT_PRECISION=input_precision(x.dtype),
        shape=(hidden, x.shape[1]),
    )
    return out


def _gru_forward(x: Tensor, h: Tensor, cu_seqlens: Tensor, *weights: Any) -> Tensor:
    out = x.new_empty((x.shape[0], h.shape[1]))
    states = x.new_empty((x.shape[0] + h.shape[0], h.shape[1]))
    numbers = torch.arange(h.shape[0], device=x.device)
    states[cu_seqlens[:-1] + numbers] = h
    args = [tensor.contiguous() for tensor in weights[:4]]
    _gru_steps.launch(
        (triton.cdiv(h.shape[0], _STEP_ROWS), 1),
        *(x.contiguous(), None, states, out, cu_seqlens.contiguous(), *args, None, None),
        *(h.shape[0], x.shape[1], 0, h.shape[1]),
        HAS_HEAD=False,
        INPUT_PRECISION=input_precision(x.dtype),
        shape=(h.shape[1], x.shape[1]),
    )
    return out


def _rollout_forward(h: Tensor, y: Tensor, actions: Tensor, *weights: Any) -> tuple[Tensor, Tensor]:
    members, rows, steps, num_actions = actions.shape
    hidden, outputs = h.shape[2], y.shape[2]
    states = h.new_empty((members, rows, steps + 1, hidden))
    ys = y.new_empty((members, rows, steps + 1, outputs))
    states[:, :, 0], ys[:, :, 0] = h, y
    starts = torch.arange(members * rows + 1, device=h.device) * steps
    args = [tensor.contiguous() for tensor in weights[:6]]
    _gru_steps.launch(
        (triton.cdiv(rows, _STEP_ROWS), members),
        *(actions.contiguous(), ys, states, None, starts, *args),
        *(rows, num_actions, outputs, hidden),
        HAS_HEAD=True,
        INPUT_PRECISION=input_precision(h.dtype),
        shape=(hidden, num_actions + outputs),
    )
    return ys[:, :, 1:].contiguous(), states[:, :, -1].contiguous()


def _rssm_blocks(categories: int) -> dict[str, int]:
    block_n = triton.next_power_of_2(categories)
    return {"BLOCK_M": max(1, 2048 // block_n), "BLOCK_N": block_n}


def _rssm_forward(
    prior: Tensor, posterior: Tensor | None, seeds: Tensor, positions: Tensor, unimix: float
) -> tuple[Tensor, Tensor, Tensor]:
    rows, groups, categories = prior.shape
    sample = prior.new_empty(prior.shape)
    logs = [prior.new_empty(prior.shape, dtype=torch.float32) for _ in range(2)]
    blocks = _rssm_blocks(categories)
    _rssm_step.launch(
        (triton.cdiv(rows * groups, blocks["BLOCK_M"]),),
        *(prior.contiguous(), None if posterior is None else posterior.contiguous()),
        *(seeds.contiguous(), positions.contiguous(), sample, *logs),
        *(rows * groups, groups, categories, unimix),
        **blocks,
    )
    return sample, logs[0], logs[1]


def _rssm_backward(
    needs: list[bool],
    grads: list[Tensor],
    prior: Tensor,
    posterior: Tensor | None,
    seeds: Tensor,
    positions: Tensor,
    unimix: float,
) -> list[Tensor | None]:
    of_sample, of_prior, of_posterior = (grad.contiguous() for grad in grads)

    def compute(logits: Tensor, *some: Tensor | None) -> Tensor:
        grad, blocks = logits.new_empty(logits.shape), _rssm_blocks(logits.shape[2])
        groups = logits.shape[0] * logits.shape[1]
        _rssm_step_backward.launch(
            (triton.cdiv(groups, blocks["BLOCK_M"]),),
            *(logits.contiguous(), *some, grad, groups, logits.shape[2], unimix),
            **blocks,
        )
        return grad

    if posterior is None:
        return [compute(prior, of_sample, of_prior, of_posterior), None, None, None, None]
    of_prior_logits = compute(prior, None, of_prior, None) if needs[0] else None
    of_logits = compute(posterior, of_sample, of_posterior, None) if needs[1] else None
    return [of_prior_logits, of_logits, None, None, None]


def _resets_after(*args: Any) -> bool:
    return bool(args[-1]) and args[0].numel() > 0


def _few_categories(prior: Tensor, *_: object) -> bool:
    return prior.numel() > 0 and prior.shape[2] <= _MAX_CATEGORIES


def _weight_examples(make: ExampleInputs, inputs: int, hidden: int, *members: int) -> list[Tensor]:
    shapes = (3 * hidden, inputs), (3 * hidden, hidden), (3 * hidden,), (3 * hidden,)
    return [make(*members, *shape) for shape in shapes]


def _gru_example(make: ExampleInputs) -> tuple[Any, ...]:
    starts = make.offsets(64, num_rows=4096)
    return make(4096, 512), make(64, 512), starts, *_weight_examples(make, 512, 512)


def _rollout_example(make: ExampleInputs) -> tuple[Any, ...]:
    states = make(5, 16, 256), make(5, 16, 2), make(5, 16, 50, 6)
    return *states, *_weight_examples(make, 8, 256, 5), make(5, 2, 256), make(5, 2)


provide(
    ops.gru_cell,
    _gru_cell_forward,
    example=lambda make: (make(4096, 1024), make(4096, 1024), *_weight_examples(make, 1024, 1024)),
    supports=_resets_after,
)
provide(ops.gru, _gru_forward, example=_gru_example, supports=_resets_after)
provide(ops.gru_rollout, _rollout_forward, example=_rollout_example, supports=_resets_after)
provide(
    ops.rssm_step,
    _rssm_forward,
    example=lambda make: (make(8192, 32, 32), make(8192, 32, 32), make.ints(8192), make.ints(8192)),
    supports=_few_categories,
    backward=_rssm_backward,
)
