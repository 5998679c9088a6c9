"""Gives an op its Triton kernels, and everybody else the list of them."""

# pyright: basic
from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ingot.kernels.triton import interpreting, supported, tuned
from ingot.kernels.triton.kernel import Launch, recording
from ingot.ops.gradient import Backward, as_tuple
from ingot.ops.op import Op, always, tensors

HERE = Path(__file__).parent
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PROVIDED: dict[str, Provided] = {}

Example = Callable[["Meta"], tuple[Any, ...]]


class Meta:
    """Makes tensors of representative calls: they have a shape and no memory, or, on a device that
    is named, values that such a call could have.

    >>> Meta()(8, 4).shape, Meta().ints(3).dtype
    (torch.Size([8, 4]), torch.int64)
    >>> Meta(device="cpu").starts(2, rows=10)
    tensor([ 0,  5, 10])
    """

    def __init__(self, dtype: torch.dtype = torch.bfloat16, device: str = "meta") -> None:
        self.dtype, self.device = dtype, device

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Floats of this dtype: halves of unit normals, whose products fit float16."""
        return torch.randn(shape, dtype=dtype or self.dtype, device=self.device) * 0.5

    def ints(self, *shape: int, dtype: torch.dtype = torch.int64, below: int = 2) -> Tensor:
        """Integers from 0 to `below`, exclusive."""
        return torch.randint(below, shape, dtype=dtype, device=self.device)

    def starts(self, groups: int, rows: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Where groups of the same size begin, and where the last one ends."""
        return torch.arange(groups + 1, dtype=dtype, device=self.device) * (rows // groups)


@dataclass(frozen=True, kw_only=True, eq=False)
class Provided:
    """An op that has Triton kernels, and a representative call of it."""

    op: Op[..., Any]
    forward: Callable[..., Any]
    backward: Backward | None
    example: Example
    also: tuple[Example, ...]
    """Calls that take other kernels: decoding beside training."""
    cost: tuple[int, int]
    """Bytes and FLOPs of the example: given, where the op's cost reads values."""

    def launches(self, direction: str, dtype: torch.dtype = torch.bfloat16) -> list[Launch]:
        """What the representative call would launch, "forward" or "backward"."""
        make = Meta(dtype)
        with recording() as launches:
            for args in self.calls(direction, make):
                self.run(direction, args, dtype)
        return launches

    def calls(self, direction: str, make: Meta) -> list[tuple[Any, ...]]:
        """Arguments of the representative calls in that direction."""
        examples = (self.example, *self.also) if direction == "forward" else (self.example,)
        return [self.op.with_defaults(example(make)) for example in examples]

    def run(self, direction: str, args: tuple[Any, ...], dtype: torch.dtype) -> None:
        """Make the launches of a call whose tensors are of that dtype."""
        if direction == "forward":
            self.forward(*args)
        elif self.backward:
            needs = [isinstance(arg, Tensor) and arg.dtype == dtype for arg in args]
            grads = [torch.randn_like(out) for out in as_tuple(self.op.fake(*args))]
            self.backward(needs, grads, *args)


def provide(
    op: Op[..., Any],
    forward: Callable[..., Any],
    *,
    example: Example,
    batch_invariant: bool = True,
    supports: Callable[..., bool] = always,
    backward: Backward | None = None,
    also: tuple[Example, ...] = (),
    cost: tuple[int, int] | None = None,
) -> None:
    """Register the functions that launch an op's kernels.

    `example` gives the arguments of a representative call: what the kernels are compiled for, and
    what the roofline is drawn for.
    """
    if cost is None:
        found = op.cost(*op.with_defaults(example(Meta())))
        cost = found.bytes, found.flops
    PROVIDED[op.name] = Provided(
        op=op, forward=forward, backward=backward, example=example, also=also, cost=cost
    )

    def able(*args: Any) -> bool:
        return takes(args) and supports(*args)

    op.provide("triton", forward, batch_invariant=batch_invariant, supports=able, backward=backward)


def takes(args: tuple[Any, ...]) -> bool:
    """Whether these arguments are where kernels can reach them, in dtypes that they know."""
    place = "cpu" if interpreting() else "cuda"
    # In the interpreter casts to bfloat16 truncate and products are of bit patterns.
    dtypes = DTYPES[:2] if interpreting() else DTYPES
    return all(
        t.device.type == place and (not t.is_floating_point() or t.dtype in dtypes)
        for t in tensors(args)
    ) and (interpreting() or supported(tuned.capability()))


def families() -> Iterator[str]:
    """The families that have kernels here."""
    for path in sorted(HERE.parents[1].joinpath("ops").glob("*.py")):
        if (HERE / path.name).exists() and path.stem != "__init__":
            yield path.stem


def provided() -> dict[str, Provided]:
    """Every op that has kernels here, by name. Imports all families."""
    for family in families():
        importlib.import_module(f"ingot.kernels.triton.{family}")
    return dict(PROVIDED)


def as_rows(x: Tensor) -> Tensor:
    """A tensor as rows whose channels lie side by side: a view if possible.

    >>> as_rows(torch.zeros(2, 3, 4)).shape
    torch.Size([6, 4])
    """
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()
