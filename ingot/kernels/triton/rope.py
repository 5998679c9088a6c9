"""`rope` on GPUs: all heads of a token in one program, since they rotate by the same angles.

The backward pass rotates by the negated angles. `rope_and_cache` rotates queries and keys and
writes keys and values into the KV cache in one launch. A slot outside the cache is not written: a
kernel cannot raise an error.

Angles are position times frequency in float32, as in the reference. Sine and cosine are computed
here because NVIDIA's library computes those of large angles through local memory (80 instructions
of the kernel were spills), and the fast hardware instructions have errors of 2**-21.
"""

# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false
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
from ingot.kernels.triton.provider import ExampleInputs, provide
from ingot.kernels.triton.target import TargetSpec
from ingot.ops.gradient import differentiate

_MAX_BLOCK_H = 32


def _space(
    target: TargetSpec, BLOCK_H: int, BLOCK_P: int, BLOCK_REST: int, **_: object
) -> Iterator[KernelConfig]:
    # The halves of a head are loaded separately: 8 elements per thread would be 64-bit loads.
    yield from elementwise_space(target, BLOCK_H * max(2 * BLOCK_P, BLOCK_REST), min_per_thread=16)


@triton.jit
def _sin_cos(angle):
    """Return sine and cosine in float32, within 2 ulp for angles up to some millions.

    Range reduction subtracts multiples of pi/2 in three parts (Cody & Waite 1980), each with one
    rounding, followed by Cephes' polynomials between -pi/4 and pi/4.
    """
    quarters = tl.floor(angle * 0.6366197723675814 + 0.5)
    r = tl.fma(quarters, tl.full(angle.shape, -1.57079601287841796875, tl.float32), angle)
    r = tl.fma(quarters, tl.full(angle.shape, -3.1391647326017846353e-7, tl.float32), r)
    r = tl.fma(quarters, tl.full(angle.shape, -5.3903025299577654e-15, tl.float32), r)
    z = r * r
    sine = ((-1.9515295891e-4 * z + 8.3321608736e-3) * z - 1.6666654611e-1) * z * r + r
    cosine = ((2.443315711809948e-5 * z - 1.388731625493765e-3) * z + 4.166664568298827e-2) * z * z
    cosine = cosine - 0.5 * z + 1.0
    quadrant = quarters.to(tl.int32) & 3
    swap = (quadrant & 1) == 1
    sin = tl.where(swap, cosine, sine)
    cos = tl.where(swap, sine, cosine)
    sin = tl.where(quadrant >= 2, -sin, sin)
    cos = tl.where((quadrant == 1) | (quadrant == 2), -cos, cos)
    return sin, cos


@triton.jit
def _cos_sin(position, freqs, num_pairs, scale, BLOCK_P: tl.constexpr):
    """Return the scaled cosine and sine of a token's angles."""
    offs_p = tl.arange(0, BLOCK_P)
    angle = position.to(tl.float32) * tl.load(freqs + offs_p, offs_p < num_pairs, other=0.0)
    sin, cos = _sin_cos(angle)
    return (cos * scale)[None, :], (sin * scale)[None, :]


@triton.jit
def _rotate_heads(
    x, y, offs_h, num_heads, num_pairs, head_dim, stride_xh, stride_yh, cos, sin,
    INTERLEAVED: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """Rotate a block of heads of a token from x to y, and copy the channels that do not rotate."""
    mask_h = offs_h < num_heads
    if BLOCK_P > 0 and INTERLEAVED:
        offs_d = tl.arange(0, 2 * BLOCK_P)[None, :]
        mask = mask_h & (offs_d < 2 * num_pairs)
        both = tl.load(x + offs_h * stride_xh + offs_d, mask, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(both, [BLOCK_H, BLOCK_P, 2]))
        rotated = tl.join(a * cos - b * sin, a * sin + b * cos)
        rotated = tl.reshape(rotated, [BLOCK_H, 2 * BLOCK_P])
        tl.store(y + offs_h * stride_yh + offs_d, rotated.to(y.dtype.element_ty), mask)
    elif BLOCK_P > 0:
        offs_p = tl.arange(0, BLOCK_P)[None, :]
        mask = mask_h & (offs_p < num_pairs)
        a = tl.load(x + offs_h * stride_xh + offs_p, mask, other=0.0).to(tl.float32)
        b = tl.load(x + offs_h * stride_xh + num_pairs + offs_p, mask, other=0.0).to(tl.float32)
        first = (a * cos - b * sin).to(y.dtype.element_ty)
        second = (a * sin + b * cos).to(y.dtype.element_ty)
        tl.store(y + offs_h * stride_yh + offs_p, first, mask)
        tl.store(y + offs_h * stride_yh + num_pairs + offs_p, second, mask)
    if BLOCK_REST > 0:
        offs_d = 2 * num_pairs + tl.arange(0, BLOCK_REST)[None, :]
        mask = mask_h & (offs_d < head_dim)
        rest = tl.load(x + offs_h * stride_xh + offs_d, mask, other=0.0)
        tl.store(y + offs_h * stride_yh + offs_d, rest, mask)


@kernel(space=_space, bound_by="bandwidth", scalar_loads=1)
@triton.jit
def _rope(
    x, positions, freqs, y, num_heads, num_pairs, head_dim, stride_xt, stride_xh, scale, direction,
    INTERLEAVED: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """Rotate a block of heads of a token; backwards if `direction` is -1."""
    token = tl.program_id(0).to(tl.int64)
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    cos, sin = 0.0, 0.0
    if BLOCK_P > 0:
        cos, sin = _cos_sin(tl.load(positions + token), freqs, num_pairs, scale, BLOCK_P)
        sin = sin * direction
    _rotate_heads(
        x + token * stride_xt, y + token * num_heads * head_dim, offs_h, num_heads, num_pairs,
        head_dim, stride_xh, head_dim, cos, sin,
        INTERLEAVED, BLOCK_H, BLOCK_P, BLOCK_REST,
    )  # fmt: skip


@kernel(space=_space, bound_by="bandwidth", scalar_loads=2)
@triton.jit
def _rope_and_cache(
    q, k, v, positions, freqs, k_cache, v_cache, slot_mapping, y, num_heads, num_kv_heads,
    num_pairs, head_dim, num_slots, block_size, stride_qt, stride_qh, stride_kt, stride_kh,
    stride_vt, stride_vh, stride_kcb, stride_kct, stride_kch, stride_vcb, stride_vct, stride_vch,
    scale,
    INTERLEAVED: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_REST: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Process a block of heads of a token: of its queries, its keys or its values."""
    token = tl.program_id(0).to(tl.int64)
    head_block = tl.program_id(1)
    num_q_blocks = tl.cdiv(num_heads, BLOCK_H)
    num_k_blocks = tl.cdiv(num_kv_heads, BLOCK_H)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    valid_slot = (slot >= 0) & (slot < num_slots)
    cos, sin = 0.0, 0.0
    if BLOCK_P > 0:
        cos, sin = _cos_sin(tl.load(positions + token), freqs, num_pairs, scale, BLOCK_P)
    if head_block < num_q_blocks:
        offs_h = head_block * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        _rotate_heads(
            q + token * stride_qt, y + token * num_heads * head_dim, offs_h, num_heads, num_pairs,
            head_dim, stride_qh, head_dim, cos, sin,
            INTERLEAVED, BLOCK_H, BLOCK_P, BLOCK_REST,
        )  # fmt: skip
    elif head_block < num_q_blocks + num_k_blocks:
        offs_h = (head_block - num_q_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        cache = k_cache + slot // block_size * stride_kcb + slot % block_size * stride_kct
        _rotate_heads(
            k + token * stride_kt, cache, offs_h, tl.where(valid_slot, num_kv_heads, 0), num_pairs,
            head_dim, stride_kh, stride_kch, cos, sin,
            INTERLEAVED, BLOCK_H, BLOCK_P, BLOCK_REST,
        )  # fmt: skip
    else:
        v_block = head_block - num_q_blocks - num_k_blocks
        offs_h = v_block * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        cache = v_cache + slot // block_size * stride_vcb + slot % block_size * stride_vct
        _rotate_heads(
            v + token * stride_vt, cache, offs_h, tl.where(valid_slot, num_kv_heads, 0), 0,
            head_dim, stride_vh, stride_vch, cos, sin,
            INTERLEAVED, BLOCK_H, 0, BLOCK_D,
        )  # fmt: skip


def _with_unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _block_sizes(num_heads: int, num_pairs: int, head_dim: int) -> dict[str, int]:
    rest = head_dim - 2 * num_pairs
    return {
        "BLOCK_H": min(_MAX_BLOCK_H, triton.next_power_of_2(num_heads)),
        "BLOCK_P": triton.next_power_of_2(num_pairs) if num_pairs else 0,
        "BLOCK_REST": triton.next_power_of_2(rest) if rest else 0,
    }


def _launch(
    x: Tensor, positions: Tensor, freqs: Tensor, interleaved: bool, scale: float, direction: float
) -> Tensor:
    y = x.new_empty(x.shape)
    x = _with_unit_stride(x)
    num_tokens, num_heads, head_dim = x.shape
    blocks = _block_sizes(num_heads, len(freqs), head_dim)
    _rope.launch(
        (num_tokens, triton.cdiv(num_heads, blocks["BLOCK_H"])),
        *(x, positions.contiguous(), freqs.contiguous(), y, num_heads, len(freqs), head_dim),
        *(x.stride(0), x.stride(1), scale, direction),
        INTERLEAVED=interleaved,
        **blocks,
    )
    return y


def rope(x: Tensor, positions: Tensor, freqs: Tensor, interleaved: bool, scale: float) -> Tensor:
    """Launch one kernel."""
    return _launch(x, positions, freqs, interleaved, scale, 1.0)


def _backward(
    needs: list[bool],
    grads: list[Tensor],
    x: Tensor,
    positions: Tensor,
    freqs: Tensor,
    interleaved: bool,
    scale: float,
) -> list[Tensor | None]:
    grad_x = _launch(grads[0], positions, freqs, interleaved, scale, -1.0) if needs[0] else None
    grad_freqs = None
    if needs[2]:  # frequencies are not usually trained: use the reference
        freqs_only = [False, False, True, False, False]
        args = x, positions, freqs, interleaved, scale
        grad_freqs = differentiate(ops.rope.fallback)(freqs_only, grads, *args)[2]
    return [grad_x, None, grad_freqs, None, None]


def rope_and_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    freqs: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    interleaved: bool,
    scale: float,
) -> Tensor:
    """Launch one kernel."""
    y = q.new_empty(q.shape)
    q, k, v = _with_unit_stride(q), _with_unit_stride(k), _with_unit_stride(v)
    (num_tokens, num_heads, head_dim), num_kv_heads = q.shape, k.shape[1]
    blocks = _block_sizes(max(num_heads, num_kv_heads), len(freqs), head_dim)
    num_head_blocks = triton.cdiv(num_heads, blocks["BLOCK_H"]) + 2 * triton.cdiv(
        num_kv_heads, blocks["BLOCK_H"]
    )
    num_blocks, block_size = k_cache.shape[:2]
    _rope_and_cache.launch(
        (num_tokens, num_head_blocks),
        *(q, k, v, positions.contiguous(), freqs.contiguous(), k_cache, v_cache),
        *(
            slot_mapping.contiguous(),
            y,
            num_heads,
            num_kv_heads,
            len(freqs),
            head_dim,
            num_blocks * block_size,
            block_size,
        ),
        *(*q.stride()[:2], *k.stride()[:2], *v.stride()[:2]),
        *(*k_cache.stride()[:3], *v_cache.stride()[:3], scale),
        INTERLEAVED=interleaved,
        BLOCK_D=triton.next_power_of_2(head_dim),
        **blocks,
    )
    return y


def _supported(x: Tensor, *_: object) -> bool:
    return x.numel() > 0 and x.shape[-1] <= 1024


def _cache_supported(q: Tensor, *args: Any) -> bool:
    k_cache: Tensor = args[4]  # one in int8 is written by the CPU kernel only
    return _supported(q) and k_cache.dtype == q.dtype


def _example(make: ExampleInputs) -> tuple[Any, ...]:
    positions = make.ints(8192, below=8192)
    return make(8192, 32, 128), positions, make(64, dtype=torch.float32), False, 1.0


def _cache_example(make: ExampleInputs) -> tuple[Any, ...]:
    q, k, v = make(256, 32, 128), make(256, 8, 128), make(256, 8, 128)
    caches = make(4096, 16, 8, 128), make(4096, 16, 8, 128)
    freqs, tokens = make(64, dtype=torch.float32), torch.arange(256, device=make.device)
    return q, k, v, tokens, freqs, *caches, tokens, False, 1.0


provide(ops.rope, rope, example=_example, supports=_supported, backward=_backward)
provide(ops.rope_and_cache, rope_and_cache, example=_cache_example, supports=_cache_supported)
