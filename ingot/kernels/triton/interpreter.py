"""Accuracy, batch invariance and memory traffic of kernels in Triton's interpreter, without a GPU.

Triton decides whether a process interprets when it decorates its functions. So that this process
can compile kernels, they are interpreted in another one, which is called by lines of JSON:

    with Interpreter() as interpreter:
        interpreter.call("errors", op="silu", sample="odd", dtype="float16")

The interpreter computes float32 and float16 correctly. Its casts to bfloat16 truncate and its
bfloat16 dots multiply bit patterns, so bfloat16 is not tested here. It runs programs one after
another, so a race would not show.
"""

# pyright: basic
from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest import mock

from ingot.core.errors import IngotError

DTYPES = ("float32", "float16")
_MODULE = "ingot.kernels.triton.interpreter"


class Interpreter:
    """A process that interprets kernels; a context manager that ends it.

    `script` replaces this module in that process; it must call `serve`.
    """

    def __init__(self, script: Path | None = None) -> None:
        program = ["-m", _MODULE] if script is None else [str(script)]
        self._process = subprocess.Popen(
            [sys.executable, "-P", *program],
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
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._in.close()
        self._process.wait()
        self._out.close()

    def call(self, function: str, **arguments: Any) -> Any:
        """Call a served function; raise RuntimeError if it raises there."""
        self._in.write(json.dumps([function, arguments]) + "\n")
        self._in.flush()
        line = self._out.readline()
        if not line:
            raise IngotError(
                "the interpreter process exited", hint=f"run `python -m {_MODULE}` to see why"
            )
        result = json.loads(line)
        if "error" in result:
            raise RuntimeError(result["error"])
        return result["value"]


_WITHOUT_KERNELS = ("gated", "float32", "group_", "panels")  # samples of linear_int8_dynamic


def all_samples() -> list[tuple[str, str, str]]:
    """Return (op, sample, dtype) for every sample of every op that the kernels support.

    Those of linear layers do not compute LoRA terms yet, those of quantized layers neither gates
    nor groups of activations, nor do they read panels; those of attention read no int8 KV cache.
    Recurrences reset after the matmul, and AdamW returns no statistics.
    """
    import torch

    from ingot.kernels.triton.provider import triton_ops
    from ingot.ops.inputs import TensorMaker

    return [
        (name, sample.name, dtype)
        for name, triton_op in triton_ops().items()
        for dtype in DTYPES
        for sample in triton_op.op.samples(TensorMaker(getattr(torch, dtype)))
        if not sample.name.endswith(("lora", "reset_before", "stats"))
        and not (name in ("attention", "rope_and_cache") and "int8" in sample.name)
        and not (name == "linear_int8_dynamic" and sample.name.startswith(_WITHOUT_KERNELS))
    ]


def bandwidth_bound_ops() -> list[str]:
    """Return the ops whose forward kernels are all bandwidth-bound."""
    from ingot.kernels.triton.provider import triton_ops

    return [
        name
        for name, triton_op in triton_ops().items()
        if {launch.kernel.bound_by for launch in triton_op.launches("forward")} == {"bandwidth"}
    ]


def errors(op: str, sample: str, dtype: str) -> dict[str, float]:
    """Return the errors of a call relative to the tolerance: forward, and of each gradient."""
    from ingot import ops
    from ingot.ops.accuracy import backward_errors, forward_errors

    record, args = _arguments(op, sample, dtype)
    with ops.prefer("triton"):
        assert record.select(*args).name == "triton", "the kernels do not support this call"
    relative = {"forward": max(forward_errors(record, "triton", args))}
    if record.gradient:
        relative |= backward_errors(record, "triton", args)
    return relative


def batch_dependent_rows(op: str, sample: str, dtype: str) -> list[str]:
    """Return the slices whose bits differ when computed alone instead of in the whole batch."""
    from ingot import ops
    from ingot.ops.arguments import as_tuple

    record, args = _arguments(op, sample, dtype)
    names = list(record.signature.parameters)
    num_rows = len(args[names.index(record.row_args[0])])
    half = num_rows // 2
    slices = [slice(0, half), slice(half, num_rows)]
    slices += [slice(row, row + 1) for row in range(0, num_rows, max(1, num_rows // 6))]
    mismatches: list[str] = []
    with ops.prefer("triton"):
        whole = as_tuple(record(*args))
        for part in slices:
            if part.start == part.stop:
                continue
            part_args = [
                arg[part] if name in record.row_args and arg is not None else arg
                for name, arg in zip(names, args, strict=True)
            ]
            for result, expected in zip(as_tuple(record(*part_args)), whole, strict=True):
                if not _bitwise_equal(result, expected[part]):
                    mismatches.append(f"{part}")
    return mismatches


def attention_mismatches(
    dtype: str, window: int | None, split_size: int, length: int = 150
) -> list[str]:
    """Return where a sequence's attention has other bits in chunks, from KV cache blocks, or
    packed with another sequence.

    `split_size` replaces the number of keys per split, so that a short sequence has several.
    """
    import torch

    from ingot import ops
    from ingot.kernels.triton import attention
    from ingot.ops.inputs import TensorMaker

    attention.SPLIT_SIZE = split_size
    attend: Any = ops.attention
    make = TensorMaker(getattr(torch, dtype))
    block_size, early, last_token = 16, length // 4, length - 1
    chunks = [(0, 1), (0, early), (early, early + 3), (early + 3, last_token), (last_token, length)]
    q, k, v = make(length, 4, 32), make(length, 2, 32), make(length, 2, 32)
    num_blocks = -(-length // block_size)
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0))
    caches = [_paged(x, order, make(num_blocks, block_size, 2, 32)) for x in (k, v)]
    mismatches: list[str] = []

    def call(queries: Any, *rest: Any) -> Any:
        cu_seqlens = torch.tensor([0, len(queries)], dtype=torch.int32)
        return attend(queries, *rest[:2], cu_seqlens, *rest[2:], True, window, None)

    with ops.prefer("triton"):
        whole = call(q, k, v, None, None)
        for first, last in chunks:
            context_lens = torch.tensor([last], dtype=torch.int32)
            packed = call(q[first:last], k[:last], v[:last], context_lens, None)
            paged = call(q[first:last], *caches, context_lens, order[None].int())
            for name, chunk in (("packed", packed), ("paged", paged)):
                if not _bitwise_equal(chunk, whole[first:last]):
                    mismatches.append(f"{name} {first}:{last}")
        two_sequences = [torch.cat((x[:33], x)) for x in (q, k, v)]
        cu_seqlens = torch.tensor([0, 33, 33 + length], dtype=torch.int32)
        both = attend(*two_sequences, cu_seqlens, None, None, True, window, None)
        if not _bitwise_equal(both[33:], whole) or not _bitwise_equal(both[:33], whole[:33]):
            mismatches.append("two sequences")
    return mismatches


def _paged(x: Any, order: Any, cache: Any) -> Any:
    """Return a KV cache whose block `order[i]` holds the i-th block of x."""
    import torch

    padding = x.new_zeros(cache.shape[0] * cache.shape[1] - len(x), *x.shape[1:])
    cache[order] = torch.cat((x, padding)).view(cache.shape)
    return cache


def traffic(op: str, size: int = 2**19) -> dict[str, float]:
    """Return the bytes that an op's forward kernels load and store, and the op's cost in bytes.

    The shape is the representative one with fewer rows of the same length: about `size` values.
    Norms load their weight once per program, so they run in proportionally fewer programs, at least
    two.
    """
    from ingot import ops
    from ingot.kernels.triton import norm
    from ingot.ops.record import registry

    record, args = registry()[op], _small_example(op, size)
    num_programs = max(2, norm.MAX_PARTIALS * len(args[0]) // 8192)
    with (
        ops.prefer("triton"),
        mock.patch.object(norm, "MAX_PARTIALS", num_programs),
        _count_bytes() as moved,
    ):
        assert record.select(*args).name == "triton", "the kernels do not support this call"
        record(*args)
    return {"moved": moved[0], "cost": record.cost(*args).bytes}


def _small_example(op: str, size: int) -> tuple[Any, ...]:
    """Return the representative call in float16 with `size` / 65536 to `size` / 4096 rows, with
    values."""
    import torch

    from ingot.kernels.triton.provider import ExampleInputs, triton_ops
    from ingot.ops.arguments import map_tensors, tensors

    triton_op = triton_ops()[op]
    args = triton_op.op.with_defaults(triton_op.example(ExampleInputs(torch.float16)))
    generator = torch.Generator().manual_seed(0)
    row_size = max(tensor[0].numel() for tensor in tensors(args))
    num_rows = max(size >> 16, min(size >> 12, size // row_size))

    def materialize(arg: Any) -> Any:
        if not isinstance(arg, torch.Tensor):
            return arg
        has_rows = arg.dim() > 1 or len(arg) in (256, 8192)  # weights and frequencies have none
        shape = (num_rows, *arg.shape[1:]) if has_rows else arg.shape
        if arg.is_floating_point():
            return torch.randn(shape, generator=generator).to(arg.dtype)
        if arg.dim() == 1:
            return torch.arange(num_rows, dtype=arg.dtype)
        return arg.new_ones(shape, device="cpu")

    return tuple(map_tensors(materialize, arg) for arg in args)


@contextmanager
def _count_bytes() -> Generator[list[int]]:
    """Count the bytes of all unmasked loads and stores."""
    from triton.runtime.interpreter import interpreter_builder as builder

    moved = [0]
    load, store = builder.create_masked_load, builder.create_masked_store

    def counting_load(pointers: Any, mask: Any, *rest: Any) -> Any:
        moved[0] += int(mask.data.sum()) * pointers.get_element_ty().primitive_bitwidth // 8
        return load(pointers, mask, *rest)

    def counting_store(pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        moved[0] += int(mask.data.sum()) * pointers.get_element_ty().primitive_bitwidth // 8
        return store(pointers, value, mask, *rest)

    with (
        mock.patch.object(builder, "create_masked_load", counting_load),
        mock.patch.object(builder, "create_masked_store", counting_store),
    ):
        yield moved


def _arguments(op: str, sample: str, dtype: str) -> tuple[Any, tuple[Any, ...]]:
    import torch

    from ingot.ops.inputs import TensorMaker
    from ingot.ops.record import registry

    record = registry()[op]
    samples = record.samples(TensorMaker(getattr(torch, dtype)))
    return record, next(record.with_defaults(s.args) for s in samples if s.name == sample)


def _bitwise_equal(one: Any, other: Any) -> bool:
    import torch

    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    return torch.equal(one.contiguous().view(bits), other.contiguous().view(bits))


FUNCTIONS: tuple[Callable[..., Any], ...] = (
    errors,
    batch_dependent_rows,
    attention_mismatches,
    traffic,
)


def serve(functions: Iterable[Callable[..., Any]] = FUNCTIONS) -> None:
    """Answer each line of stdin, a function's name and arguments, with a line on stdout."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore", RuntimeWarning)  # numpy warns of infinities, which are intended
    by_name = {function.__name__: function for function in functions}
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer = {"value": by_name[name](**arguments)}
        except Exception as error:  # reported to the caller
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)  # noqa: T201


if __name__ == "__main__":
    serve()
