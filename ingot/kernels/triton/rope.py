"""`rope` on GPUs: a token's heads in one program, for they turn by the same angles.

Turning back by the same angles is the gradient. `rope_and_cache` turns queries and keys and
writes keys and values into their pool in one launch. A slot that is not in the pool is not
written: a kernel cannot raise.

Angles are position times frequency in float32, which is what the reference does too. Sine and
cosine are computed here: of an angle that may be large, NVIDIA's library computes them through
local memory (80 instructions of the kernel were spills), and the quick instructions are off by
2**-21.
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
from ingot.kernels.triton.kernel import Config, by_elements, kernel
from ingot.kernels.triton.provider import Meta, provide
from ingot.kernels.triton.target import Target
from ingot.ops.gradient import differentiate

_HEADS = 32


def _space(target: Target, HEADS: int, PAIRS: int, REST: int, **_: object) -> Iterator[Config]:
    # The halves of a head are loaded apart: 8 elements a thread were 64 bits at a time.
    yield from by_elements(target, HEADS * max(2 * PAIRS, REST), least=16)


@triton.jit
def _sin_cos(angle):
    """Sine and cosine of float32, to 2 units in the last place up to angles of some millions.

    Quarter turns are taken off by three parts of pi/2 (Cody & Waite 1980), each in one rounding;
    then Cephes' polynomials between -pi/4 and pi/4.
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
def _turn(position, freqs, pairs, scale, PAIRS: tl.constexpr):
    """Cosine and sine of a token's angles, scaled."""
    pair = tl.arange(0, PAIRS)
    angle = position.to(tl.float32) * tl.load(freqs + pair, pair < pairs, other=0.0)
    sin, cos = _sin_cos(angle)
    return (cos * scale)[None, :], (sin * scale)[None, :]


@triton.jit
def _heads(
    x, y, head, heads, pairs, width, x_head, y_head, cos, sin,
    INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Turn some heads of a token from x to y, and copy the channels that do not turn."""
    inside = head < heads
    if PAIRS > 0 and INTERLEAVED:
        channel = tl.arange(0, 2 * PAIRS)[None, :]
        within = inside & (channel < 2 * pairs)
        both = tl.load(x + head * x_head + channel, within, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(both, [HEADS, PAIRS, 2]))
        turned = tl.join(a * cos - b * sin, a * sin + b * cos)
        turned = tl.reshape(turned, [HEADS, 2 * PAIRS])
        tl.store(y + head * y_head + channel, turned.to(y.dtype.element_ty), within)
    elif PAIRS > 0:
        pair = tl.arange(0, PAIRS)[None, :]
        within = inside & (pair < pairs)
        a = tl.load(x + head * x_head + pair, within, other=0.0).to(tl.float32)
        b = tl.load(x + head * x_head + pairs + pair, within, other=0.0).to(tl.float32)
        one = (a * cos - b * sin).to(y.dtype.element_ty)
        other = (a * sin + b * cos).to(y.dtype.element_ty)
        tl.store(y + head * y_head + pair, one, within)
        tl.store(y + head * y_head + pairs + pair, other, within)
    if REST > 0:
        channel = 2 * pairs + tl.arange(0, REST)[None, :]
        within = inside & (channel < width)
        rest = tl.load(x + head * x_head + channel, within, other=0.0)
        tl.store(y + head * y_head + channel, rest, within)


@kernel(space=_space, bound="bandwidth", scalars=1)
@triton.jit
def _rope(
    x, positions, freqs, y, heads, pairs, width, x_token, x_head, scale, direction,
    INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Turn some heads of a token; back, where the direction is -1."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    cos, sin = 0.0, 0.0
    if PAIRS > 0:
        cos, sin = _turn(tl.load(positions + token), freqs, pairs, scale, PAIRS)
        sin = sin * direction
    _heads(
        x + token * x_token, y + token * heads * width, head, heads, pairs, width, x_head, width,
        cos, sin, INTERLEAVED, HEADS, PAIRS, REST,
    )  # fmt: skip


@kernel(space=_space, bound="bandwidth", scalars=2)
@triton.jit
def _rope_and_cache(
    q, k, v, positions, freqs, k_pool, v_pool, slots, y,
    heads, key_heads, pairs, width, num_slots, page,
    q_token, q_head, k_token, k_head, v_token, v_head,
    k_page, k_slot, k_pool_head, v_page, v_slot, v_pool_head, scale,
    INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Some heads of a token: of its queries, else of its keys, else of its values."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    query_parts = tl.cdiv(heads, HEADS)
    key_parts = tl.cdiv(key_heads, HEADS)
    slot = tl.load(slots + token).to(tl.int64)
    known = (slot >= 0) & (slot < num_slots)
    cos, sin = 0.0, 0.0
    if PAIRS > 0:
        cos, sin = _turn(tl.load(positions + token), freqs, pairs, scale, PAIRS)
    if part < query_parts:
        head = part * HEADS + tl.arange(0, HEADS)[:, None]
        _heads(
            q + token * q_token, y + token * heads * width, head, heads, pairs, width, q_head,
            width, cos, sin, INTERLEAVED, HEADS, PAIRS, REST,
        )  # fmt: skip
    elif part < query_parts + key_parts:
        head = (part - query_parts) * HEADS + tl.arange(0, HEADS)[:, None]
        pool = k_pool + slot // page * k_page + slot % page * k_slot
        _heads(
            k + token * k_token, pool, head, tl.where(known, key_heads, 0), pairs, width, k_head,
            k_pool_head, cos, sin, INTERLEAVED, HEADS, PAIRS, REST,
        )  # fmt: skip
    else:
        head = (part - query_parts - key_parts) * HEADS + tl.arange(0, HEADS)[:, None]
        pool = v_pool + slot // page * v_page + slot % page * v_slot
        _heads(
            v + token * v_token, pool, head, tl.where(known, key_heads, 0), 0, width, v_head,
            v_pool_head, cos, sin, INTERLEAVED, HEADS, 0, WHOLE,
        )  # fmt: skip


def _side_by_side(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _tile(heads: int, pairs: int, width: int) -> dict[str, int]:
    rest = width - 2 * pairs
    return {
        "HEADS": min(_HEADS, triton.next_power_of_2(heads)),
        "PAIRS": triton.next_power_of_2(pairs) if pairs else 0,
        "REST": triton.next_power_of_2(rest) if rest else 0,
    }


def _launch(
    x: Tensor, positions: Tensor, freqs: Tensor, interleaved: bool, scale: float, direction: float
) -> Tensor:
    y = x.new_empty(x.shape)
    x = _side_by_side(x)
    tokens, heads, width = x.shape
    tile = _tile(heads, len(freqs), width)
    _rope.launch(
        (tokens, triton.cdiv(heads, tile["HEADS"])),
        *(x, positions.contiguous(), freqs.contiguous(), y, heads, len(freqs), width),
        *(x.stride(0), x.stride(1), scale, direction),
        INTERLEAVED=interleaved,
        **tile,
    )
    return y


def rope(x: Tensor, positions: Tensor, freqs: Tensor, interleaved: bool, scale: float) -> Tensor:
    """One kernel."""
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
    of_x = _launch(grads[0], positions, freqs, interleaved, scale, -1.0) if needs[0] else None
    of_freqs = None
    if needs[2]:  # nobody trains them: as the reference has it
        only = [False, False, True, False, False]
        args = x, positions, freqs, interleaved, scale
        of_freqs = differentiate(ops.rope.fallback)(only, grads, *args)[2]
    return [of_x, None, of_freqs, None, None]


def rope_and_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    freqs: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    slots: Tensor,
    interleaved: bool,
    scale: float,
) -> Tensor:
    """One kernel."""
    y = q.new_empty(q.shape)
    q, k, v = _side_by_side(q), _side_by_side(k), _side_by_side(v)
    (tokens, heads, width), key_heads = q.shape, k.shape[1]
    tile = _tile(max(heads, key_heads), len(freqs), width)
    parts = triton.cdiv(heads, tile["HEADS"]) + 2 * triton.cdiv(key_heads, tile["HEADS"])
    pages, page = k_pool.shape[:2]
    _rope_and_cache.launch(
        (tokens, parts),
        *(q, k, v, positions.contiguous(), freqs.contiguous(), k_pool, v_pool),
        *(slots.contiguous(), y, heads, key_heads, len(freqs), width, pages * page, page),
        *(*q.stride()[:2], *k.stride()[:2], *v.stride()[:2]),
        *(*k_pool.stride()[:3], *v_pool.stride()[:3], scale),
        INTERLEAVED=interleaved,
        WHOLE=triton.next_power_of_2(width),
        **tile,
    )
    return y


def _fits(x: Tensor, *_: object) -> bool:
    return x.numel() > 0 and x.shape[-1] <= 1024


def _example(make: Meta) -> tuple[Any, ...]:
    positions = make.ints(8192, below=8192)
    return make(8192, 32, 128), positions, make(64, dtype=torch.float32), False, 1.0


def _write_example(make: Meta) -> tuple[Any, ...]:
    q, k, v = make(256, 32, 128), make(256, 8, 128), make(256, 8, 128)
    pools = make(4096, 16, 8, 128), make(4096, 16, 8, 128)
    freqs, tokens = make(64, dtype=torch.float32), torch.arange(256, device=make.device)
    return q, k, v, tokens, freqs, *pools, tokens, False, 1.0


provide(ops.rope, rope, example=_example, supports=_fits, backward=_backward)
provide(ops.rope_and_cache, rope_and_cache, example=_write_example, supports=_fits)
