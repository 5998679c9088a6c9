"""Gradients in int8, with one float32 scale for each row of a weight and stochastic rounding.

    scale = max |g| / 127        q = floor(g / scale + u)        u uniform in (0, 1)

so that q * scale is g on average, and differs from it by less than `scale`. Error feedback, which
adds what was lost to the next gradient, would allow fewer bits, but needs a copy of the whole model
for each shard of the batch, on the rank that computes it.

u is a function of the seed, the step, the shard of the global batch, the weight and the element,
and rows are never divided among ranks. So a single process that rounds each shard computes the
same bits as ranks that send them. Vectors, such as the weights of norms, are not rounded.

A message holds some rows of several weights, in bytes:

    scales and vectors in float32 | integers in int8 | up to 3 bytes of padding
"""

# pyright: basic
from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ingot.core.random import Purpose, philox_generator
from ingot.parallel.ranks import Ranks, all_gather, all_reduce, tree_sum

_MAX = 127
_LEVELS = 2**16  # of the random numbers
_PER_BLOCK = 16  # random numbers per block of the generator, 256 bits
_CHUNK = 2**18  # elements at a time, so that temporaries stay in the cache
# An all-gather of the messages of w ranks sends w - 1 bytes for each element that this rank stores,
# times the ranks that shard the weights; an all-reduce in float32 up to 8 for each that it stores.
_MAX_GATHERED = 4


class Int8Rounding:
    """The rounding of one run; `set_shard` selects the random numbers.

    >>> rounding = Int8Rounding(seed=0)
    >>> rounding.set_shard(step=0, shard=0)
    >>> rounding.round("w", torch.tensor([[127.0, 0.0, -1.0], [0.5, 0.0, 0.0]]))
    tensor([[127.0000,   0.0000,  -1.0000],
            [  0.5000,   0.0000,   0.0000]])
    """

    def __init__(self, seed: int) -> None:
        self._seed, self._step, self._shard = seed, 0, 0

    def set_shard(self, *, step: int, shard: int) -> None:
        """Set the step and the index of the shard whose gradients are rounded next."""
        self._step, self._shard = step, shard

    def quantize(self, name: str, rows: Tensor, first_row: int = 0) -> tuple[Tensor, Tensor]:
        """Return the integers and the scales of rows of a weight, which begin at `first_row`.

        A row that is not finite has a scale that is not a number.
        """
        scales = rows.abs().amax(1) / _MAX
        divisors = torch.where(scales > 0, scales, 1.0)
        integers = torch.empty(rows.shape, dtype=torch.int8, device=rows.device)
        for part in _chunks(rows.shape):
            exact = rows[part] / divisors[part, None]
            # With a power of two as the factor, it rounds once, fused or not.
            exact.add_(self._levels(name, first_row + part.start, exact), alpha=1 / _LEVELS)
            integers[part] = exact.nan_to_num_(0.0).floor_().clamp_(-_MAX, _MAX)
        return integers, torch.where(scales.isfinite(), scales, math.nan)

    def round(self, name: str, grad: Tensor) -> Tensor:
        """Return what other ranks would receive of a gradient, in float32."""
        if grad.dim() < 2:
            return grad
        rows = grad.float().reshape(-1, _width(grad.shape))
        return dequantize(*self.quantize(name, rows)).view(grad.shape)

    def _levels(self, name: str, first_row: int, like: Tensor) -> Tensor:
        """Return a random number from 0.5 to 65535.5 for each element of these rows."""
        rows, width = like.shape
        blocks = -(-width // _PER_BLOCK)  # a row begins with a new block
        stream = philox_generator(
            Purpose.ROUNDING,
            seed=self._seed,
            step=self._step,
            index=self._shard << 32 | zlib.crc32(name.encode()),
            start=first_row * blocks,
        )
        bits = torch.from_numpy(stream.random_raw(4 * blocks * rows).view("int16"))
        return bits.view(rows, -1)[:, :width].to(like).add_(_LEVELS / 2 + 0.5)


def dequantize(integers: Tensor, scales: Tensor) -> Tensor:
    """Return rows in float32.

    >>> dequantize(torch.tensor([[-127, 2]], dtype=torch.int8), torch.tensor([0.5]))
    tensor([[-63.5000,   1.0000]])
    """
    return integers.float().mul_(scales[:, None])


def _width(shape: torch.Size) -> int:
    """Return the elements of a row; a stack of matrices, such as experts, has those of each."""
    return shape[2] if len(shape) == 3 else math.prod(shape[1:])


def _chunks(shape: torch.Size) -> Iterator[slice]:
    step = max(1, _CHUNK // max(1, shape[1]))
    for begin in range(0, shape[0], step):
        yield slice(begin, min(begin + step, shape[0]))


@dataclass(frozen=True)
class _Field:
    """Where a weight is: in the vector of all elements, and in the two sections of a message."""

    name: str
    elements: slice
    floats: slice
    integers: slice
    width: int
    """Elements of a row; 0 if it is not rounded."""
    rows: int
    """Rows per index of the first dimension."""


class Int8Messages:
    """Messages with as many rows of each weight; `shapes` are those of the rows, by name.

    >>> messages = Int8Messages({"w": torch.Size([1, 2]), "b": torch.Size([1])}, Int8Rounding(0))
    >>> sent = messages.encode(torch.tensor([[127.0, 5.0, 0.5], [254.0, 2.0, 0.5]]))
    >>> sent.shape, sent.dtype
    (torch.Size([2, 12]), torch.uint8)
    >>> messages.sum(sent)
    tensor([381.,   7.,   1.])
    """

    def __init__(self, shapes: Mapping[str, torch.Size], rounding: Int8Rounding) -> None:
        self._rounding = rounding
        self._fields: list[_Field] = []
        elements = floats = integers = 0
        for name, shape in shapes.items():
            count = math.prod(shape)
            width = _width(shape) if len(shape) > 1 else 0
            as_floats, as_integers = (count // width, count) if width else (count, 0)
            self._fields.append(
                _Field(
                    name,
                    slice(elements, elements + count),
                    slice(floats, floats + as_floats),
                    slice(integers, integers + as_integers),
                    width,
                    as_floats // shape[0] if shape else 1,
                )
            )
            elements += count
            floats, integers = floats + as_floats, integers + as_integers
        self._elements, self._floats = elements, 4 * floats
        self._bytes = self._floats + -(-integers // 4) * 4

    def encode(self, values: Tensor, first_row: int = 0) -> Tensor:
        """Return a message for each row of `values`: the rows of the weights that follow one
        another, from `first_row` on."""
        messages = torch.zeros(len(values), self._bytes, dtype=torch.uint8, device=values.device)
        floats, all_integers = self._sections(messages)
        for field in self._fields:
            own = values[:, field.elements]
            if field.width:
                rows, first = own.reshape(-1, field.width), first_row * field.rows
                integers, scales = self._rounding.quantize(field.name, rows, first)
                all_integers[:, field.integers] = integers.view(len(values), -1)
                own = scales.view(len(values), -1)
            floats[:, field.floats] = own
        return messages

    def sum(self, messages: Tensor) -> Tensor:
        """Return the sum of messages in the order of the tree: a vector of all elements."""
        total = torch.empty(self._elements, device=messages.device)
        floats, all_integers = self._sections(messages)
        for field in self._fields:
            own, numbers = total[field.elements], floats[:, field.floats]
            if not field.width:
                own.copy_(tree_sum(list(numbers)))
                continue
            integers = all_integers[:, field.integers].unflatten(1, (-1, field.width))
            rows = own.view(-1, field.width)
            for part in _chunks(rows.shape):
                pairs = zip(integers[:, part], numbers[:, part], strict=True)
                rows[part] = tree_sum([dequantize(*pair) for pair in pairs])
        return total

    def all_reduce(self, messages: Tensor, ranks: Ranks) -> Tensor:
        """Return the sum of these messages and of those of the other ranks.

        Up to four messages are gathered, which sends int8. More are summed first, and the sums
        are sent in float32. Both have the same bits.
        """
        if ranks.group is None or ranks.size == 1:
            return self.sum(messages)
        if ranks.size * len(messages) <= _MAX_GATHERED:
            return self.sum(all_gather(messages, ranks.group))
        total = self.sum(messages)
        all_reduce(total, ranks.group)
        return total

    def _sections(self, messages: Tensor) -> tuple[Tensor, Tensor]:
        floats, integers = messages[:, : self._floats], messages[:, self._floats :]
        return floats.view(torch.float32), integers.view(torch.int8)
