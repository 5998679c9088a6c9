"""Kernels in Triton's interpreter: their numbers and their traffic, without a GPU.

Whether a process interprets is decided when Triton decorates its functions. So that kernels can be
compiled in this one, they are interpreted in another, which is asked by lines of JSON:

    with Interpreter() as interpreter:
        interpreter.call("errors", op="silu", sample="odd", dtype="float16")

The interpreter computes float32 and float16 correctly. Its casts to bfloat16 truncate and its
bfloat16 dots multiply bit patterns, so bfloat16 is not tested here. It runs programs one after
another, so a race would not show.
"""

# pyright: basic
from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import TracebackType
from typing import Any
from unittest import mock

from ingot.core.errors import IngotError

DTYPES = ("float32", "float16")
_planted: list[Any] = []


class Interpreter:
    """A process that interprets kernels; closed at the end of a `with`."""

    def __init__(self) -> None:
        command = [sys.executable, "-P", "-m", "ingot.kernels.triton.interpreter"]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TRITON_INTERPRET": "1"},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout

    def __enter__(self) -> Interpreter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._in.close()
        self._process.wait()
        self._out.close()

    def call(self, function: str, **arguments: Any) -> Any:
        """What a function of this module returns there; an error there is one here."""
        self._in.write(json.dumps([function, arguments]) + "\n")
        self._in.flush()
        line = self._out.readline()
        if not line:
            raise IngotError(
                "the interpreter ended", hint="call `python -m ingot.kernels.triton.interpreter`"
            )
        result = json.loads(line)
        if "error" in result:
            raise RuntimeError(result["error"])
        return result["value"]


def samples() -> list[tuple[str, str, str]]:
    """Every op with kernels, sample of it and dtype."""
    import torch

    from ingot.kernels.triton.provider import triton_ops
    from ingot.ops.inputs import TensorMaker

    return [
        (name, sample.name, dtype)
        for name, one in triton_ops().items()
        for dtype in DTYPES
        for sample in one.op.samples(TensorMaker(getattr(torch, dtype)))
    ]


def streaming() -> list[str]:
    """Ops that memory bounds, in all their kernels of a forward."""
    from ingot.kernels.triton.provider import triton_ops

    return [
        name
        for name, one in triton_ops().items()
        if {launch.kernel.bound_by for launch in one.launches("forward")} == {"bandwidth"}
    ]


def errors(op: str, sample: str, dtype: str) -> dict[str, float]:
    """The errors of a call as shares of their bounds: of the results, and of each gradient."""
    from ingot import ops
    from ingot.ops.accuracy import backward_errors, forward_errors

    record, args = _arguments(op, sample, dtype)
    with ops.prefer("triton"):
        assert record.select(*args).name == "triton", "the kernels do not take this call"
    found = {"forward": max(forward_errors(record, "triton", args))}
    if record.gradient:
        found |= backward_errors(record, "triton", args)
    return found


def plant(family: str, old: str, new: str, op: str) -> None:
    """Change the source of an op's kernels, for as long as this process runs: so tests plant
    violations, and see whether they are noticed."""
    from ingot.kernels.triton.provider import HERE, triton_ops
    from ingot.ops.op import registry

    triton_ops()
    text = (HERE / f"{family}.py").read_text()
    assert old in text, "nothing to change"
    name = f"ingot.kernels.triton.{family}"
    file = tempfile.NamedTemporaryFile("w", suffix=".py")  # noqa: SIM115
    _planted.append(file)  # the interpreter reads a function's source at its first call
    file.write(text.replace(old, new))
    file.flush()
    spec = importlib.util.spec_from_file_location(name, file.name)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    registry()[op].__dict__.pop("providers", None)


def differing(op: str, sample: str, dtype: str) -> list[str]:
    """Where rows have other bits alone, or in two halves, than in the whole batch."""
    from ingot import ops
    from ingot.ops.gradient import as_tuple

    record, args = _arguments(op, sample, dtype)
    names = list(record.signature.parameters)
    rows = len(args[names.index(record.row_args[0])])
    found: list[str] = []
    with ops.prefer("triton"):
        whole = as_tuple(record(*args))
        for part in [slice(0, rows // 2), slice(rows // 2, rows)] + [
            slice(row, row + 1) for row in range(0, rows, max(1, rows // 6))
        ]:
            if part.start == part.stop:
                continue
            taken = [
                arg[part] if name in record.row_args else arg
                for name, arg in zip(names, args, strict=True)
            ]
            for one, other in zip(as_tuple(record(*taken)), whole, strict=True):
                if not _same_bits(one, other[part]):
                    found.append(f"{part}")
    return found


def attention_differs(dtype: str, window: int | None, split: int) -> list[str]:
    """Where a sequence's attention has other bits in chunks, from pages or beside another one.

    `split` stands for the number of keys of a piece, so that there are several.
    """
    import torch

    from ingot import ops
    from ingot.kernels.triton import attention
    from ingot.ops.inputs import TensorMaker

    attention.SPLIT_SIZE = split
    attend: Any = ops.attention
    make = TensorMaker(getattr(torch, dtype))
    length, page = 150, 16
    q, k, v = make(length, 4, 32), make(length, 2, 32), make(length, 2, 32)
    found: list[str] = []

    def call(queries: Any, *rest: Any) -> Any:
        starts = torch.tensor([0, len(queries)], dtype=torch.int32)
        return attend(queries, *rest[:2], starts, *rest[2:], True, window, None)

    pages = -(-length // page)
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(0))
    pools = []
    for x in (k, v):
        pool = make(pages, page, 2, 32)
        padded = torch.cat((x, x.new_zeros(pages * page - length, 2, 32)))
        pool[order] = padded.view(pages, page, 2, 32)
        pools.append(pool)
    with ops.prefer("triton"):
        whole = call(q, k, v, None, None)
        for first, last in ((0, 1), (0, 37), (37, 40), (40, 149), (149, 150)):
            context = torch.tensor([last], dtype=torch.int32)
            plain = call(q[first:last], k[:last], v[:last], context, None)
            paged = call(q[first:last], *pools, context, order[None].int())
            for name, chunk in (("plain", plain), ("paged", paged)):
                if not _same_bits(chunk, whole[first:last]):
                    found.append(f"{name} {first}:{last}")
        both = [torch.cat((x[:33], x)) for x in (q, k, v)]
        starts = torch.tensor([0, 33, 33 + length], dtype=torch.int32)
        beside = attend(*both, starts, None, None, True, window, None)
        if not _same_bits(beside[33:], whole) or not _same_bits(beside[:33], whole[:33]):
            found.append("beside another")
    return found


def traffic(op: str) -> dict[str, float]:
    """Bytes that the forward kernels of an op load and store, and those that the record counts.

    The shape is the representative one with fewer rows, each as long. Norms, which read their
    weight once a program, run in fewer programs by as much.
    """
    from ingot import ops
    from ingot.kernels.triton import norm
    from ingot.ops.op import registry

    record, args = registry()[op], _small_example(op)
    with (
        ops.prefer("triton"),
        mock.patch.object(norm, "MAX_PARTIALS", norm.MAX_PARTIALS * len(args[0]) // 8192),
        _counted() as moved,
    ):
        assert record.select(*args).name == "triton", "the kernels do not take this call"
        record(*args)
    return {"moved": moved[0], "counted": record.cost(*args).bytes}


def _small_example(op: str) -> tuple[Any, ...]:
    """The representative call with at most 128 rows, 8 of long ones, in float16, with values."""
    import torch

    from ingot.kernels.triton.provider import ExampleInputs, triton_ops
    from ingot.ops.op import map_tensors, tensors

    one = triton_ops()[op]
    args = one.op.with_defaults(one.example(ExampleInputs(torch.float16)))
    random = torch.Generator().manual_seed(0)
    widest = max(tensor[0].numel() for tensor in tensors(args))
    rows = max(8, min(128, 2**19 // widest))

    def real(arg: Any) -> Any:
        if not isinstance(arg, torch.Tensor):
            return arg
        by_rows = arg.dim() > 1 or len(arg) in (256, 8192)  # weights and frequencies stay
        shape = (rows, *arg.shape[1:]) if by_rows else arg.shape
        if arg.is_floating_point():
            return torch.randn(shape, generator=random).to(arg.dtype)
        return (
            torch.arange(rows, dtype=arg.dtype)
            if arg.dim() == 1
            else arg.new_ones(shape, device="cpu")
        )

    return tuple(map_tensors(real, arg) for arg in args)


@contextmanager
def _counted() -> Generator[list[int]]:
    """Count the bytes of all loads and stores that are not masked."""
    from triton.runtime.interpreter import interpreter_builder as builder

    moved = [0]
    load, store = builder.create_masked_load, builder.create_masked_store

    def counted_load(pointers: Any, mask: Any, *rest: Any) -> Any:
        moved[0] += int(mask.data.sum()) * pointers.get_element_ty().primitive_bitwidth // 8
        return load(pointers, mask, *rest)

    def counted_store(pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        moved[0] += int(mask.data.sum()) * pointers.get_element_ty().primitive_bitwidth // 8
        return store(pointers, value, mask, *rest)

    with (
        mock.patch.object(builder, "create_masked_load", counted_load),
        mock.patch.object(builder, "create_masked_store", counted_store),
    ):
        yield moved


def _arguments(op: str, sample: str, dtype: str) -> tuple[Any, tuple[Any, ...]]:
    import torch

    from ingot.ops.inputs import TensorMaker
    from ingot.ops.op import registry

    record = registry()[op]
    found = record.samples(TensorMaker(getattr(torch, dtype)))
    return record, next(record.with_defaults(s.args) for s in found if s.name == sample)


def _same_bits(one: Any, other: Any) -> bool:
    import torch

    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    return torch.equal(one.contiguous().view(bits), other.contiguous().view(bits))


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (errors, plant, differing, attention_differs, traffic)
}


def _serve() -> None:
    """Answer every line of stdin with one on stdout."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, of infinities that are meant
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer = {"value": _FUNCTIONS[name](**arguments)}
        except Exception as error:  # the caller's
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)  # noqa: T201


if __name__ == "__main__":
    _serve()
