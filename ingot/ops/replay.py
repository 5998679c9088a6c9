"""Capture and replay of op calls, without Python, like a CUDA graph on the CPU.

A decode step of a small model is hundreds of calls that take microseconds each, and half of its
time would be Python between them: modules, attributes, views. Therefore the calls of a step are
captured while it runs, and C++ repeats them (`kernels/cpu/replay.cpp`):

    token, step = capture(lambda: one_step())     # runs the function and captures its calls
    token = step()                               # repeats the calls on the same tensors

A replay uses the same tensors: to change its inputs, the caller writes new values into them. Values
that Python computed (an `if`, a shape) stay as they were during the capture, so the function must
not depend on such values. If a call reads a value from a tensor or has arguments of a type that
cannot be captured, or without a compiler, `step` is the function itself.

Ops are the same as in eager mode. Views are repeated with their sizes, strides and offset.
"""

# pyright: basic
from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ingot.core.device import CUDA_GRAPH_DEVICES
from ingot.ops.arguments import as_tuple

_CPU = torch.device("cpu")
_ARGUMENT_CODES = {
    "Tensor": "t",
    "Optional[Tensor]": "T",
    "int": "i",
    "Optional[int]": "I",
    "float": "f",
    "Optional[float]": "F",
    "bool": "b",
}


def capture(
    function: Callable[[], Tensor], device: torch.device = _CPU
) -> tuple[Tensor, Callable[[], Tensor]]:
    """Run a function; return its result and a callable that runs it again, faster if possible.

    On the CPU that is a list of calls, on a GPU a CUDA graph: `CudaGraphReplay`.

    >>> from ingot import ops
    >>> x = torch.zeros(1, 4)
    >>> with torch.inference_mode():
    ...     result, again = capture(lambda: ops.silu(x[:, :2]))
    ...     _ = x.fill_(1.0)
    ...     bool((again() > 0.7).all())
    True
    """
    if device.type in CUDA_GRAPH_DEVICES:
        return _capture_cuda_graph(function, device)
    recorder = _Recorder()
    with recorder:
        result = function()
    try:
        return result, Replay(recorder.calls, result)
    except _NotCapturable:
        return result, function


def _capture_cuda_graph(
    function: Callable[[], Tensor], device: torch.device
) -> tuple[Tensor, Callable[[], Tensor]]:
    try:
        replay = CudaGraphReplay(function, device)
    except RuntimeError:  # a call waited for the device, which cannot be captured
        return function(), function
    return replay(), replay


class CudaGraphReplay:
    """A function captured as a CUDA graph; call it to launch the graph.

    The function must have run before, so that its kernels are compiled, and must read its inputs
    from tensors that stay where they are. Its result is one tensor, which every launch overwrites.
    All graphs of a device share a memory pool, since they run one after the other.

    This class has not run on a GPU.
    """

    def __init__(self, function: Callable[[], Tensor], device: torch.device) -> None:
        self._graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.device(device),
            torch.cuda.graph(
                self._graph,
                pool=_graph_pool(device),
                stream=torch.cuda.Stream(device),
                capture_error_mode="thread_local",
            ),
        ):
            self._result = function()

    def __call__(self) -> Tensor:
        """Launch the graph on the current stream; return its result."""
        self._graph.replay()
        return self._result


@cache
def _graph_pool(device: torch.device) -> Any:
    """Return the memory pool of all graphs of a device."""
    return torch.cuda.graph_pool_handle()


class _NotCapturable(Exception):
    pass


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], Any]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # if True, torch imports Dynamo, which takes a second

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, _with_defaults(func, args, kwargs or {}), result))
        return result


def _with_defaults(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return all arguments in the order of the schema."""
    rest = func._schema.arguments[len(args) :]
    return (*args, *(kwargs.get(a.name, a.default_value) for a in rest))


class Replay:
    """A captured list of calls; call it to repeat them."""

    def __init__(self, calls: list[tuple[Any, tuple[Any, ...], Any]], result: Tensor) -> None:
        if not importlib.import_module("ingot.kernels.cpu.replay").available:
            raise _NotCapturable
        program = _Program(calls, result)
        ops = torch.ops.ingot_replay
        self._number = ops.make(program.text, program.constants)
        self._run = ops.run.default
        weakref.finalize(self, ops.drop, self._number).atexit = False

    def __call__(self) -> Tensor:
        """Repeat the calls on the current values of their tensors."""
        return self._run(self._number)


class _Program:
    """The calls as text, and the tensors that exist before them."""

    def __init__(self, calls: list[tuple[Any, tuple[Any, ...], Any]], result: Tensor) -> None:
        made = {id(out) for _, _, results in calls for out in _tensors(results)}
        used = [arg for _, args, _ in calls for arg in args if isinstance(arg, Tensor)]
        self.constants = list({id(t): t for t in used if id(t) not in made}.values())
        self._register = {id(t): i for i, t in enumerate(self.constants)}
        self._count = len(self.constants)
        lines: list[str] = []
        for call in calls:
            lines += self._lines(*call)
        if id(result) not in self._register:
            raise _NotCapturable
        lines.append(f"give {self._register[id(result)]}")
        self.text = "\n".join(_with_frees(lines, len(self.constants)))

    def _lines(self, func: Any, args: tuple[Any, ...], results: Any) -> list[str]:
        outputs = _tensors(results)
        if not outputs or (func._schema.is_mutable and func.namespace != "ingot"):
            raise _NotCapturable
        bases = [base for out in outputs if (base := self._base(out, args)) is not None]
        if len(bases) == len(outputs):
            return [self._view(out, base) for out, base in zip(outputs, bases, strict=True)]
        if bases:
            raise _NotCapturable
        arguments = [
            self._argument(str(declared.type), arg)
            for declared, arg in zip(func._schema.arguments, args, strict=True)
        ]
        registers = [str(self._new(out)) for out in outputs]
        name, overload = func._schema.name, func._schema.overload_name or "-"
        return [
            f"call {name} {overload} {len(arguments)} {' '.join(arguments)} "
            f"{len(registers)} {' '.join(registers)}"
        ]

    def _base(self, out: Tensor, args: tuple[Any, ...]) -> Tensor | None:
        """Return the argument that an output is a view of, if any."""
        storage = out.untyped_storage().data_ptr()
        tensors = (arg for arg in args if isinstance(arg, Tensor) and storage)
        return next((t for t in tensors if t.untyped_storage().data_ptr() == storage), None)

    def _view(self, out: Tensor, base: Tensor) -> str:
        offset = out.storage_offset() - base.storage_offset()
        numbers = [*out.shape, *out.stride(), offset]
        register = self._register[id(base)]
        return f"view {register} {out.dim()} {' '.join(map(str, numbers))} {self._new(out)}"

    def _argument(self, declared: str, value: Any) -> str:
        kind = _ARGUMENT_CODES.get(declared)
        if kind is None:
            raise _NotCapturable
        if value is None:
            return "n 0"
        if isinstance(value, Tensor):
            return f"{kind} {self._register[id(value)]}"
        return f"{kind} {float(value)!r}" if kind in "fF" else f"{kind} {int(value)}"

    def _new(self, out: Tensor) -> int:
        self._count += 1
        self._register[id(out)] = self._count - 1  # an op may return its argument itself
        return self._register[id(out)]


def _tensors(results: Any) -> tuple[Tensor, ...]:
    """Return the tensors that a call returned; other results were read from a tensor."""
    outputs = as_tuple(results) if isinstance(results, Tensor | tuple | list) else (results,)
    if not all(isinstance(out, Tensor) for out in outputs):
        raise _NotCapturable
    return outputs


def _with_frees(lines: list[str], constants: int) -> list[str]:
    """Free each register after the last line that uses it, so that its memory is reused."""
    reversed_lines: list[str] = []
    needed: set[int] = set()
    for line in reversed(lines):
        used = _used(line)
        last = sorted(reg for reg in used - needed if reg >= constants)
        if last and not line.startswith("give"):
            reversed_lines.append(f"free {len(last)} {' '.join(map(str, last))}")
        needed |= used
        reversed_lines.append(line)
    return reversed_lines[::-1]


def _used(line: str) -> set[int]:
    """Return the registers that a line reads or writes."""
    words = line.split()
    if words[0] == "give":
        return {int(words[1])}
    if words[0] == "view":
        return {int(words[1]), int(words[-1])}
    count = int(words[3])
    pairs = zip(words[4 : 4 + 2 * count : 2], words[5 : 5 + 2 * count : 2], strict=True)
    made = words[5 + 2 * count :]
    return {int(value) for kind, value in pairs if kind in "tT"} | set(map(int, made))
