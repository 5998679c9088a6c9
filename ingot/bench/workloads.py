"""The workloads of the op benchmarks: shapes of small language models, with cold caches.

A `Workload` is an op, a shape, a dtype, and a function that makes the arguments of one call. They
are a table (`WORKLOADS`): every op at the size of a decode step (32 tokens) and of a training step
(2048 tokens, or 256 rows of logits), `linear` at the projections of two models and from 1 row to
2048, attention as decode over a paged KV cache and as prefill.

**Cold caches.** A call that finds its weight in a cache, where the previous call left it, is timed
at the speed of that cache. In a model, all other layers run in between. So every call gets new
arguments from one large buffer, the `arena`: floats are views of it, consecutive from call to call,
and wrap around at its end. The arena is four times the L3 cache, like the buffer that
`ingot.bench.cpu_peaks` reads, and is filled once for all workloads, with random bfloat16: that is
valid in every view, since the upper half of a float32 is a bfloat16.

Arguments that are small or not floats (positions, targets, masks) are made separately and stay in a
cache. Outputs are placed by the allocator, often in memory that was just freed and is in a cache,
as in a model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ingot.core.device import Device
from ingot.core.errors import UnknownName
from ingot.ops.codec import KV_SCALE_BYTES
from ingot.ops.epilogue import ActivationFn
from ingot.ops.record import registry
from ingot.ops.rope import rope_frequencies

Args: TypeAlias = tuple[Any, ...]
MakeArgs: TypeAlias = "Callable[[Views], Args]"

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "int64": torch.int64}
VOCAB_SIZE = 32000
# Query heads, key-value heads, channels of a head.
HEADS = (12, 4, 64)
_PREFILL_HEADS = (HEADS, (9, 3, 64), (32, 8, 128))
BLOCK_SIZE = 16
# (out, in) of qkv, gate and up, down, vocabulary; then gate or up and vocabulary of SmolLM2-135M.
PROJECTIONS = ((1280, 768), (4096, 768), (768, 2048), (32000, 768), (1728, 576), (49152, 576))
EXPERTS = 8
LORA_RANK = 16
LINEAR_ROWS = (1, 2, 4, 8, 16, 64, 128, 512, 2048)

_MiB = 2**20
_LINE = 64
_MIN_STEP = 2**16


@dataclass(frozen=True)
class Workload:
    """An op, and the arguments it is timed on.

    >>> WORKLOADS[0].op, WORKLOADS[0].shape, WORKLOADS[0].dtype
    ('gelu', '32x2048', 'bf16')
    """

    op: str
    shape: str
    dtype: str
    make_args: MakeArgs
    """Makes the arguments of one call."""
    sdpa: MakeArgs | None = None
    """For attention: arguments of the same work for `scaled_dot_product_attention`."""


class Views:
    """Consecutive views of the arena from an offset on; at its end they wrap around.

    >>> views = Views(new_arena(2**20), torch.float32, at=0)
    >>> x, y = views(2, 3), views(4)
    >>> y.storage_offset() * 4, views.taken
    (64, 40)
    """

    def __init__(self, arena: Tensor, dtype: torch.dtype, at: int) -> None:
        self._arena, self._dtype, self._at = arena, dtype, at
        self._random = torch.Generator().manual_seed(at)
        self.taken = 0
        """Bytes of the views so far."""

    def __call__(self, *shape: int) -> Tensor:
        """Return the next floats, contiguous."""
        size = math.prod(shape) * self._dtype.itemsize
        start = self._at if self._at + size <= len(self._arena) else 0
        self._at = start + -(-size // _LINE) * _LINE
        self.taken += size
        return self._arena[start : start + size].view(self._dtype).view(shape)

    def bits(self, dtype: torch.dtype, *shape: int) -> Tensor:
        """Return the next bytes as integers of any value, contiguous."""
        width = shape[-1] * dtype.itemsize // self._dtype.itemsize
        return self(*shape[:-1], width).view(dtype)

    def ints(self, high: int, *shape: int) -> Tensor:
        """Return random integers from 0 to `high`, exclusive; not in the arena."""
        return torch.randint(high, shape, generator=self._random)

    def order(self, count: int) -> Tensor:
        """Return the numbers below `count` in random order; not in the arena."""
        return torch.randperm(count, generator=self._random, dtype=torch.int32)


def arena_size(machine: Device, device: str = "cpu") -> int:
    """Return four times the L3 cache, at least 512 MiB, but at most an eighth of the memory.

    On a GPU it is 1 GiB: the largest cache there is 256 MB, that of MI300X.
    """
    if device != "cpu":
        return min(1024 * _MiB, (machine.gpus[0].memory or 8192 * _MiB) // 8)
    return min(max(512 * _MiB, 4 * (machine.cpu.l3 or 0)), machine.memory // 8)


def new_arena(size: int, device: torch.device | str = "cpu") -> Tensor:
    """Return an arena of `size` bytes: normally distributed bfloat16, repeating after 32 MiB.

    The standard deviation is 0.5, so that logits have the size of a model's.
    """
    random = torch.Generator().manual_seed(0)
    block = torch.randn(min(size, 32 * _MiB) // 2, generator=random) * 0.5
    repeats = -(-size // (2 * len(block)))
    return block.bfloat16().to(device).repeat(repeats).view(torch.uint8)[:size]


def argument_sets(
    workload: Workload, arena: Tensor, make_args: MakeArgs | None = None
) -> list[Args]:
    """Return the arguments of as many calls as it takes to walk through the arena.

    They are made by `make_args`, or else by that of the workload. A call that reads only part of
    its arguments (rows of an embedding) advances by what it reads. Arguments outside the arena are
    moved to its device.
    """
    dtype, make_args = DTYPES[workload.dtype], make_args or workload.make_args
    views = Views(arena, dtype, at=0)
    moved = _Mover(arena.device)
    args = moved(workload.make_args(views))
    if not views.taken:
        return [args]
    read = min(views.taken, registry()[workload.op].cost(*args).bytes)
    step = -(-max(read, _MIN_STEP) // _LINE) * _LINE
    offsets = range(0, max(1, len(arena) - step), step)
    return [moved(make_args(Views(arena, dtype, at))) for at in offsets]


class _Mover:
    """Moves arguments to a device; those that several calls share are moved once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._moved: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, args: Args) -> Args:
        return tuple(self._one(arg) if isinstance(arg, Tensor) else arg for arg in args)

    def _one(self, tensor: Tensor) -> Tensor:
        if tensor.device == self._device:
            return tensor
        if id(tensor) not in self._moved:  # kept with its copy, so that its id is not reused
            self._moved[id(tensor)] = tensor, tensor.to(self._device)
        return self._moved[id(tensor)][1]


def select_workloads(names: Iterable[str] = ()) -> list[Workload]:
    """Return the workloads of these ops and families, by family; all if there are no names.

    >>> {workload.op for workload in select_workloads(["rms_norm", "silu"])} == {"rms_norm", "silu"}
    True
    """
    ops = registry()
    families = {op.family for op in ops.values()}
    wanted = {name.lower() for name in names}
    for name in wanted - ops.keys() - families:
        raise UnknownName("op", name, {*ops, *families})
    order = {name: (op.family, index) for index, (name, op) in enumerate(ops.items())}
    selected = [w for w in WORKLOADS if not wanted or wanted & {w.op, ops[w.op].family}]
    return sorted(selected, key=lambda workload: order[workload.op])


def floats(*shapes: tuple[int, ...]) -> MakeArgs:
    """Return a function that makes floats of these shapes.

    >>> [len(x) for x in floats((3, 4), (5,))(Views(new_arena(2**20), torch.float32, at=0))]
    [3, 5]
    """
    return lambda new: tuple(new(*shape) for shape in shapes)


def _text(*sizes: int) -> str:
    return "x".join(map(str, sizes))


def _elementwise() -> Iterator[Workload]:
    for tokens, dtype in product((32, 2048), ("bf16", "fp32")):
        wide, hidden, channels = (tokens, 2048), (tokens, 768), (768,)
        for op in ("gelu", "gelu_tanh", "silu", "relu_squared"):
            yield Workload(op, _text(*wide), dtype, floats(wide))
        for op in ("swiglu", "geglu", "geglu_tanh"):
            yield Workload(op, _text(*wide), dtype, floats(wide, wide))
        for op, shapes in {
            "rms_norm": (hidden, channels),
            "layer_norm": (hidden, channels, channels),
            "add_rms_norm": (hidden, hidden, channels),
            "square_sum": (hidden,),
            "add_layer_norm": (hidden, hidden, channels, channels),
        }.items():
            yield Workload(op, _text(*hidden), dtype, floats(*shapes))
        yield Workload("rope", _text(tokens, HEADS[0], HEADS[2]), dtype, _rope(tokens))
        shape = _text(tokens, HEADS[0] + 2 * HEADS[1], HEADS[2])
        yield Workload("rope_and_cache", shape, dtype, _rope_and_cache(tokens))
        yield Workload("embedding", _text(*hidden), dtype, _embedding(tokens))


def _rope(tokens: int) -> MakeArgs:
    heads, _, width = HEADS
    freqs, _ = rope_frequencies(width)
    positions = torch.arange(tokens)
    return lambda new: (new(tokens, heads, width), positions, freqs)


def _rope_and_cache(tokens: int) -> MakeArgs:
    """Queries, keys and values are parts of one projection; slots are in random order."""
    heads, kv_heads, width = HEADS
    freqs, _ = rope_frequencies(width)
    positions = torch.arange(tokens)
    pool = (tokens // BLOCK_SIZE, BLOCK_SIZE, kv_heads, width)

    def make_args(new: Views) -> Args:
        qkv, keys = new(tokens, heads + 2 * kv_heads, width), heads + kv_heads
        q, k, v = qkv[:, :heads], qkv[:, heads:keys], qkv[:, keys:]
        return q, k, v, positions, freqs, new(*pool), new(*pool), new.order(tokens)

    return make_args


def _embedding(tokens: int) -> MakeArgs:
    return lambda new: (new.ints(VOCAB_SIZE, tokens), new(VOCAB_SIZE, 768))


def _logits() -> Iterator[Workload]:
    for rows, dtype in product((32, 256), ("bf16", "fp32")):
        logits = (rows, VOCAB_SIZE)
        for op in ("softmax", "log_softmax"):
            yield Workload(op, _text(*logits), dtype, floats(logits))
        for op in ("token_logprobs", "cross_entropy"):
            yield Workload(op, _text(*logits), dtype, _with_targets(logits))


def _linear_losses() -> Iterator[Workload]:
    for tokens, dtype in product((1, 32), ("bf16", "fp32")):
        shapes = (tokens, 576), (49152, 576)
        yield Workload("linear_logits", _text(tokens, 576, 49152), dtype, floats(*shapes))
    losses = ("linear_cross_entropy", "linear_cross_entropy_fwd_bwd")
    for op, dtype in product(("linear_token_logprobs", *losses), ("bf16", "fp32")):
        make_args = _with_targets((512, 768), (VOCAB_SIZE, 768))
        yield Workload(op, _text(512, 768, VOCAB_SIZE), dtype, make_args)


def _with_targets(*shapes: tuple[int, ...]) -> MakeArgs:
    tokens = shapes[0][0]
    return lambda new: (*floats(*shapes)(new), new.ints(VOCAB_SIZE, tokens))


def _linear() -> Iterator[Workload]:
    """Shapes are rows x in x out, followed by the epilogue."""
    for (n, k), m in product(PROJECTIONS, LINEAR_ROWS):
        yield Workload("linear", _text(m, k, n), "bf16", floats((m, k), (n, k)))
    for m in (8, 512, 2048):
        yield Workload("linear", _text(m, 768, 4096), "fp32", floats((m, 768), (4096, 768)))
    for m in (8, 512):
        up, down = (2048, 768), (768, 2048)
        for activation in list(ActivationFn)[1:]:
            shape = f"{_text(m, 768, 2048)} {activation.name.lower()}"
            args = _with_activation(activation, (m, 768), up, (2048,))
            yield Workload("linear", shape, "bf16", args)
        shape = f"{_text(m, 768, 2048)} silu"
        yield Workload("gated_linear", shape, "bf16", floats((m, 768), up, up))
        grads = _with_activation(ActivationFn.GELU, (m, 2048), (m, 768), up, (2048,))
        yield Workload("linear_preact_grad", f"{_text(m, 768, 2048)} gelu", "bf16", grads)
        grads = floats((m, 2048), (m, 768), up, up)
        yield Workload("gated_linear_preact_grad", shape, "bf16", grads)
        grads = floats((m, 2048), (m, 2048), up, up)
        yield Workload("gated_linear_input_grad", _text(m, 2048, 768), "bf16", grads)
        shape = f"{_text(m, 2048, 768)} residual"
        yield Workload("linear", shape, "bf16", _with_residual((m, 2048), down, (m, 768)))
        shape = f"{_text(m, 768, 2048)} lora"
        yield Workload("linear", shape, "bf16", _with_lora((m, 768), up))
    for rows in (8, 512):  # 2 of 8 experts for each of 4 tokens, and of 256
        shape = _text(EXPERTS, rows, 768, 1024)
        yield Workload("grouped_linear", shape, "bf16", _grouped(rows, weights=1))
        args = _grouped(rows, weights=2)
        yield Workload("grouped_gated_linear", f"{shape} silu", "bf16", args)


def _lora() -> Iterator[Workload]:
    """Shapes are adapters x rows x in x rank: a decode step of eight adapters, and training."""
    for (adapters, rows), dtype in product(((8, 32), (1, 2048)), ("bf16", "fp32")):
        shape = _text(adapters, rows, 576, LORA_RANK)
        yield Workload("lora_shrink", shape, dtype, _shrink(adapters, rows))


def _shrink(adapters: int, rows: int) -> MakeArgs:
    scale = torch.full((adapters,), 2.0)
    index = torch.arange(rows, dtype=torch.int32) % adapters if adapters > 1 else None
    return lambda new: (new(rows, 576), new(adapters, LORA_RANK, 576), scale, index)


def _with_lora(*shapes: tuple[int, ...]) -> MakeArgs:
    def make_args(new: Views) -> Args:
        x, weight = floats(*shapes)(new)
        h, b = torch.ones(len(x), LORA_RANK), new(1, LORA_RANK, len(weight))
        return x, weight, None, int(ActivationFn.IDENTITY), None, h, b

    return make_args


def _with_activation(activation: ActivationFn, *shapes: tuple[int, ...]) -> MakeArgs:
    return lambda new: (*floats(*shapes)(new), int(activation))


def _with_residual(*shapes: tuple[int, ...]) -> MakeArgs:
    def make_args(new: Views) -> Args:
        x, weight, residual = floats(*shapes)(new)
        return x, weight, None, int(ActivationFn.IDENTITY), residual

    return make_args


def _quantized() -> Iterator[Workload]:
    """Shapes are rows x in x out; for 4 bits also the group size."""
    scale, groups = torch.full((2048,), 0.01), torch.full((2048, 768 // 128), 0.01)
    small_groups = torch.full((768 // 32, 2048), 0.01).T
    table, table_groups = torch.full((VOCAB_SIZE,), 0.01), torch.full((24, VOCAB_SIZE), 0.01).T
    for tokens, dtype in product((32, 512), ("bf16", "fp32")):
        bf16 = dtype == "bf16"
        yield Workload(
            "embedding_int8",
            _text(tokens, 768),
            dtype,
            lambda new, t=tokens, low=bf16: (
                *(new.ints(VOCAB_SIZE, t), new.bits(torch.int8, VOCAB_SIZE, 768), table, low),
            ),
        )
        yield Workload(
            "embedding_int4",
            f"{_text(tokens, 768)} by 32",
            dtype,
            lambda new, t=tokens, low=bf16: (
                *(new.ints(VOCAB_SIZE, t), new.bits(torch.uint8, VOCAB_SIZE, 384), table_groups),
                *(None, None, low),
            ),
        )
    for m in (1, 8, 512):
        for op in ("linear_int8", "linear_int8_dynamic"):
            yield Workload(
                op,
                _text(m, 768, 2048),
                "bf16",
                lambda new, m=m: (new(m, 768), new.bits(torch.int8, 2048, 768), scale),
            )
        yield Workload(
            "linear_int4_dynamic",
            f"{_text(m, 768, 2048)} by 32",
            "bf16",
            lambda new, m=m: (new(m, 768), new.bits(torch.uint8, 2048, 384), small_groups),
        )
        yield Workload(
            "linear_int4",
            f"{_text(m, 768, 2048)} by 128",
            "bf16",
            lambda new, m=m: (new(m, 768), new.bits(torch.uint8, 2048, 384), groups, groups),
        )


def _optimizers() -> Iterator[Workload]:
    """Tensors x their shape. Not in the arena, since the updates would overwrite it."""
    for (count, shape), dtype in product(((4, (768, 3072)), (64, (768,))), ("bf16", "fp32")):
        yield Workload("adamw", _text(count, *shape), dtype, _adamw(count, shape, dtype))


def _adamw(count: int, shape: tuple[int, ...], dtype: str) -> MakeArgs:
    @cache
    def args() -> Args:
        params = [torch.zeros(shape, dtype=DTYPES[dtype]) for _ in range(count)]
        grads = [torch.ones(shape, dtype=DTYPES[dtype]) for _ in range(count)]
        moments = ([torch.ones(shape) for _ in range(count)] for _ in range(2))
        return params, grads, *moments, [], 10, 1e-3

    return lambda new: args()


def _recurrent() -> Iterator[Workload]:
    """Shapes are rows x hidden channels, sequences x tokens x channels, members x steps x
    channels, and rows x groups x categories."""
    for hidden, dtype in product((256, 1024), ("bf16", "fp32")):
        weights = (3 * hidden, hidden), (3 * hidden, hidden), (3 * hidden,), (3 * hidden,)
        for rows in (1, 256):
            shapes = (rows, hidden), (rows, hidden), *weights
            yield Workload("gru_cell", _text(rows, hidden), dtype, floats(*shapes))
        yield Workload("gru", _text(16, 64, hidden), dtype, _sequences(16, 64, *weights))
        yield Workload("gru_rollout", _text(5, 50, hidden), dtype, _rollout(5, 50, hidden))
    for rows, dtype in product((32, 256), ("bf16", "fp32")):
        yield Workload("rssm_step", _text(rows, 32, 32), dtype, _latents(rows))


def _latents(rows: int) -> MakeArgs:
    """32 groups of 32 categories."""
    numbers = torch.arange(rows)
    return lambda new: (*floats((rows, 32, 32), (rows, 32, 32))(new), numbers, numbers)


def _sequences(count: int, length: int, *weights: tuple[int, ...]) -> MakeArgs:
    starts = torch.arange(count + 1) * length
    tokens, states = (count * length, weights[0][1]), (count, weights[0][1])

    def make_args(new: Views) -> Args:
        return new(*tokens), new(*states), starts, *floats(*weights)(new)

    return make_args


def _rollout(members: int, steps: int, hidden: int) -> MakeArgs:
    """Two outputs and six actions."""
    states = (1, hidden), (1, 2), (1, steps, 6)
    weights = (3 * hidden, 8), (3 * hidden, hidden), (3 * hidden,), (3 * hidden,)
    return floats(*((members, *shape) for shape in (*states, *weights, (2, hidden), (2,))))


def _grouped(rows: int, weights: int) -> MakeArgs:
    offsets = torch.arange(EXPERTS + 1) * rows // EXPERTS
    shapes = [(rows, 768), *((EXPERTS, 1024, 768) for _ in range(weights))]
    return lambda new: (*floats(*shapes)(new), offsets)


def _attention() -> Iterator[Workload]:
    decodes = ((32, 512), (8, 4096), (1, 16384))
    for (sequences, context), dtype in product(decodes, ("bf16", "fp32")):
        make_args, sdpa = _decode(sequences, context), _sdpa(HEADS, sequences, 1, context)
        name = f"decode {sequences} of {context}"
        yield Workload("attention", name, dtype, make_args, sdpa)
    for dtype in ("bf16", "fp32"):
        yield Workload("attention", "decode 32 of 512 int8", dtype, _decode(32, 512, int8=True))
    for tokens, heads, dtype in product((512, 2048, 8192), _PREFILL_HEADS, ("bf16", "fp32")):
        query_heads, kv_heads, width = heads
        name = f"prefill {tokens}, {query_heads}/{kv_heads} x {width}"
        sdpa = _sdpa(heads, sequences=1, queries=tokens, keys=tokens)
        yield Workload("attention", name, dtype, _prefill(heads, tokens), sdpa)
    for (batch, length), dtype in product(((8, 128), (4, 512)), ("bf16", "fp32")):
        yield Workload("padded_attention", f"{batch} of {length}", dtype, _padded(batch, length))


def _decode(sequences: int, context: int, int8: bool = False) -> MakeArgs:
    """One query per sequence; its blocks are anywhere in the KV cache."""
    heads, kv_heads, width = HEADS
    blocks = sequences * context // BLOCK_SIZE
    starts = torch.arange(sequences + 1, dtype=torch.int32)
    lengths = torch.full((sequences,), context, dtype=torch.int32)

    def make_args(new: Views) -> Args:
        q, pool = new(sequences, heads, width), (blocks, BLOCK_SIZE, kv_heads)
        table = new.order(blocks).view(sequences, -1)
        k, v = (
            new.bits(torch.int8, *pool, width + KV_SCALE_BYTES) if int8 else new(*pool, width)
            for _ in range(2)
        )
        return q, k, v, starts, lengths, table

    return make_args


def _prefill(of: tuple[int, int, int], tokens: int) -> MakeArgs:
    heads, kv_heads, width = of
    starts = torch.tensor([0, tokens], dtype=torch.int32)
    kv = (tokens, kv_heads, width)
    return lambda new: (new(tokens, heads, width), new(*kv), new(*kv), starts)


def _padded(batch: int, length: int) -> MakeArgs:
    """Sequences of half the length to all of it."""
    heads, kv_heads, width = HEADS
    lengths = torch.linspace(length / 2, length, batch)
    tokens = torch.arange(length) < lengths[:, None]
    kv = (batch, length, kv_heads, width)
    return lambda new: (new(batch, length, heads, width), new(*kv), new(*kv), tokens)


def _sdpa(of: tuple[int, int, int], sequences: int, queries: int, keys: int) -> MakeArgs:
    """Contiguous by head and of equal length, unlike the keys of a server."""
    heads, kv_heads, width = of
    kv = (sequences, kv_heads, keys, width)
    return floats((sequences, heads, queries, width), kv, kv)


def _sampling() -> Iterator[Workload]:
    shape = (32, VOCAB_SIZE)
    for dtype in ("bf16", "fp32"):
        yield Workload("apply_penalties", _text(*shape), dtype, _apply_penalties)
        yield Workload("sampling_logprobs", _text(*shape), dtype, _sampling_logprobs)
        yield Workload("sample", _text(*shape), dtype, _sample)
    yield Workload(
        "philox_uniform", "32", "int64", lambda new: (new.ints(99, 32), new.ints(99, 32))
    )


@cache
def _seen() -> Args:
    """Return masks of the prompt and counts of generated tokens: 5 MB, shared by all calls."""
    counts = torch.zeros(32, VOCAB_SIZE, dtype=torch.int32)
    counts[:, ::100] = 1
    return counts.roll(7, dims=1).bool(), counts


def _apply_penalties(new: Views) -> Args:
    options = (torch.full((32,), value) for value in (1.3, 0.5, 0.2))
    return new(32, VOCAB_SIZE), *_seen(), *options


def _sampling_logprobs(new: Views) -> Args:
    temperature, top_p, min_p = (torch.full((32,), value) for value in (0.8, 0.95, 0.0))
    return new(32, VOCAB_SIZE), temperature, torch.full((32,), 50), top_p, min_p


def _sample(new: Views) -> Args:
    return *_sampling_logprobs(new), new.ints(2**40, 32), new.ints(4096, 32)


WORKLOADS: tuple[Workload, ...] = tuple(
    workload
    for family in (
        *(_elementwise, _logits, _linear_losses, _linear, _lora, _quantized, _attention, _sampling),
        _recurrent,
        _optimizers,
    )
    for workload in family()
)
