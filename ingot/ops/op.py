"""The decorator that turns a PyTorch function into an op.

An op is a plain PyTorch function, its `reference`, with a record around it:

    @op(fake=fake_like, samples=..., tolerance=Tolerance(), cost=..., row_args=("x",))
    def silu(x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)

The following is derived from the record:

- a torch op `ingot::silu`, which torch.compile, torch.export and autograd support (`library`);
- a second torch op, `ingot::silu_backward`, opaque like the first, so that the backward may be
  computed by a kernel and a graph stays whole in either case (`autograd`);
- dispatch between providers: the reference supports every call, kernels under
  `ingot.kernels.<provider>.<family>` are loaded at the first call (`dispatch`);
- the tests, the table of `ingot ops` and the reference page of the op.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ingot.core.errors import OpError
from ingot.ops.autograd import connect_backward
from ingot.ops.gradient import Gradient, differentiate
from ingot.ops.inputs import SampleInput, TensorMaker
from ingot.ops.library import backward_schema, define
from ingot.ops.record import REGISTRY, Cost, Op, P, R, Tolerance


def op(
    *,
    check: Callable[..., None],
    fake: Callable[..., R],
    samples: Callable[[TensorMaker], Iterator[SampleInput]],
    tolerance: Tolerance,
    cost: Callable[..., Cost],
    row_args: tuple[str, ...],
    gradient: Gradient | None = differentiate,
    mutates: tuple[str, ...] = (),
    decode_outputs: Callable[..., tuple[Tensor, ...]] | None = None,
) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Turn the decorated function, the reference, into an op.

    - `check` raises an OpError for arguments that do not fit together.
    - `fake` allocates the outputs: their shapes and dtypes, contiguous, values unset.
    - `samples` yields the inputs that the op is tested with; `tolerance` bounds the error on them.
    - `cost` returns the bytes and FLOPs of a call.
    - `row_args` names the arguments whose first dimension is the tokens, where each row of the
      outputs depends only on the same row of these; () if that does not hold.
    - `gradient` derives the backward from the reference; None if the op has no gradient, for
      example because its outputs are integers.
    - `mutates` names the arguments that the op writes into, such as a KV cache. Such an op has no
      gradient.
    - `decode_outputs` reassembles values that are stored across several arguments, so that the
      error of the values is measured rather than that of their parts.
    """

    def declare(reference: Callable[P, R]) -> Op[P, R]:
        record = Op(
            name=reference.__name__,
            family=reference.__module__.rpartition(".")[2],
            reference=reference,
            check=check,
            fake=fake,
            samples=samples,
            tolerance=tolerance,
            cost=cost,
            row_args=row_args,
            gradient=None if mutates else gradient,
            mutates=mutates,
            decode_outputs=decode_outputs,
        )
        _register(record)
        return record

    return declare


def _register(record: Op[..., Any]) -> None:
    if any(p.kind is not p.POSITIONAL_OR_KEYWORD for p in record.signature.parameters.values()):
        raise OpError(
            f"op '{record.name}' has keyword-only or variable parameters",
            hint="make them positional-or-keyword; callers can still pass them by name",
        )
    name = record.name
    schema = torch.library.infer_schema(record.reference, mutates_args=record.mutates)
    forward = define(name, schema, record.forward_kernel, record.forward_fake)
    object.__setattr__(record, "__doc__", record.reference.__doc__)
    object.__setattr__(record, "__signature__", record.signature)
    object.__setattr__(record, "overload", forward)
    object.__setattr__(record, "_eager_call", forward._op)
    if not record.mutates:  # autograd supports no gradient for an op that mutates its arguments
        backward = define(
            f"{name}_backward",
            backward_schema(schema),
            record.backward_kernel,
            record.backward_fake,
        )
        object.__setattr__(record, "backward_overload", backward)
        connect_backward(name, backward, record.fallback, record.gradient is not None)
    REGISTRY[name] = record
