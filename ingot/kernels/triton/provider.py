"""Registration of Triton kernels for ops, and the list of ops that have them."""

# pyright: basic
from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ingot.kernels.triton import config_store, interpreting, supported
from ingot.kernels.triton.launch import Launch, record_launches
from ingot.ops.arguments import as_tuple, tensors
from ingot.ops.dispatch import always
from ingot.ops.gradient import Backward
from ingot.ops.record import Op

HERE = Path(__file__).parent
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_TRITON_OPS: dict[str, TritonOp] = {}

Example = Callable[["ExampleInputs"], tuple[Any, ...]]


class ExampleInputs:
    """Creates the tensors of representative calls: on the meta device by default, so without
    memory; on any other device, with plausible values.

    >>> ExampleInputs()(8, 4).shape, ExampleInputs().ints(3).dtype
    (torch.Size([8, 4]), torch.int64)
    >>> ExampleInputs(device="cpu").offsets(2, num_rows=10)
    tensor([ 0,  5, 10])
    """

    def __init__(self, dtype: torch.dtype = torch.bfloat16, device: str = "meta") -> None:
        self.dtype, self.device = dtype, device

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return samples of N(0, 0.5), small enough that float16 GEMMs do not overflow."""
        return torch.randn(shape, dtype=dtype or self.dtype, device=self.device) * 0.5

    def ints(self, *shape: int, dtype: torch.dtype = torch.int64, below: int = 2) -> Tensor:
        """Return random integers from 0 to `below`, exclusive."""
        return torch.randint(below, shape, dtype=dtype, device=self.device)

    def offsets(self, num_groups: int, num_rows: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Return the row offsets of equally large groups, (num_groups + 1,)."""
        group_size = num_rows // num_groups
        return torch.arange(num_groups + 1, dtype=dtype, device=self.device) * group_size


@dataclass(frozen=True, kw_only=True, eq=False)
class TritonOp:
    """An op that has Triton kernels, with a representative call."""

    op: Op[..., Any]
    forward: Callable[..., Any]
    backward: Backward | None
    example: Example
    extra_examples: tuple[Example, ...]
    """Forward calls that launch other kernels than `example`, such as decoding."""
    epilogue_examples: tuple[Example, ...]
    """Calls in both directions that launch the same kernels with another epilogue."""
    cost: tuple[int, int]
    """Bytes and FLOPs of the example."""

    def launches(self, direction: str, dtype: torch.dtype = torch.bfloat16) -> list[Launch]:
        """Return the launches of the representative calls, "forward" or "backward"."""
        make = ExampleInputs(dtype)
        with record_launches() as launches:
            for args in self.calls(direction, make):
                self.run(direction, args, dtype)
        return launches

    def calls(self, direction: str, make: ExampleInputs) -> list[tuple[Any, ...]]:
        """Return the arguments of the representative calls in that direction."""
        examples = [self.example, *self.epilogue_examples]
        if direction == "forward":
            examples += self.extra_examples
        return [self.op.with_defaults(example(make)) for example in examples]

    def run(self, direction: str, args: tuple[Any, ...], dtype: torch.dtype) -> None:
        """Run a call whose tensors have that dtype."""
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
    extra_examples: tuple[Example, ...] = (),
    epilogue_examples: tuple[Example, ...] = (),
    cost: tuple[int, int] | None = None,
) -> None:
    """Register the functions that launch an op's kernels.

    `example` returns the arguments of a representative call, for which the kernels are compiled and
    the roofline is computed. `cost` (bytes, FLOPs) is needed where the op's own cost function reads
    values, which meta tensors do not have.
    """
    if cost is None:
        op_cost = op.cost(*op.with_defaults(example(ExampleInputs())))
        cost = op_cost.bytes, op_cost.flops
    _TRITON_OPS[op.name] = TritonOp(
        op=op,
        forward=forward,
        backward=backward,
        example=example,
        extra_examples=extra_examples,
        epilogue_examples=epilogue_examples,
        cost=cost,
    )

    def supported_args(*args: Any) -> bool:
        return accepts(args) and supports(*args)

    op.provide(
        "triton",
        forward,
        batch_invariant=batch_invariant,
        supports=supported_args,
        backward=backward,
    )


def accepts(args: tuple[Any, ...]) -> bool:
    """Return whether all tensors are on a device and in a dtype that the kernels support."""
    device_type = "cpu" if interpreting() else "cuda"
    # Triton's interpreter truncates casts to bfloat16 and multiplies bit patterns in its dots.
    dtypes = DTYPES[:2] if interpreting() else DTYPES
    return all(
        t.device.type == device_type and (not t.is_floating_point() or t.dtype in dtypes)
        for t in tensors(args)
    ) and (interpreting() or supported(config_store.device_arch()))


def families() -> Iterator[str]:
    """Yield the op families that have kernels here."""
    for path in sorted(HERE.parents[1].joinpath("ops").glob("*.py")):
        if (HERE / path.name).exists() and path.stem != "__init__":
            yield path.stem


def triton_ops() -> dict[str, TritonOp]:
    """Return every op that has kernels here, by name; imports all families."""
    for family in families():
        importlib.import_module(f"ingot.kernels.triton.{family}")
    return dict(_TRITON_OPS)


def as_rows(x: Tensor) -> Tensor:
    """Return x as 2D with a unit stride in the last dimension; a view if possible.

    >>> as_rows(torch.zeros(2, 3, 4)).shape
    torch.Size([6, 4])
    """
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()
