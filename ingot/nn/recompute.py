"""Activation recomputation: discard activations in the forward, recompute them in the backward.

    none       a block keeps all activations: most memory, no extra time
    selective  a block keeps all but the outputs of its norms, of RoPE and of the first MLP layer:
               about half the memory; recomputes the first matmul of each MLP
    full       a block keeps only its input: least memory; recomputes one forward

`Decoder.set_recompute` sets the policy. The ops are deterministic, so the recomputed values and the
gradients are bitwise equal under every policy.

A block runs its forward through `run`. For "selective", the layers mark what may be discarded by
calling it through `recomputable`. Losses whose logits would not fit in memory use `run_by_rows`.
All use autograd's hooks for saved tensors. They do not use
`torch.utils.checkpoint`, which imports torch's compiler: 140 MB and a second.
"""

# pyright: basic
from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

RecomputePolicy = Literal["none", "selective", "full"]


def run(policy: RecomputePolicy, forward: Callable[..., Tensor], *args: Any) -> Tensor:
    """Return `forward(*args)`; autograd keeps only the activations that the policy keeps.

    >>> x = torch.ones(2, requires_grad=True)
    >>> run("full", lambda x: x.exp().exp(), x).sum().backward()
    >>> x.grad
    tensor([41.1936, 41.1936])
    """
    if policy == "none" or not torch.is_grad_enabled():
        return forward(*args)
    if policy == "selective":
        return _run_selective(forward, *args)
    return _run_checkpointed(forward, *args)


def recomputable(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """Return `function(*args)`; under the "selective" policy its output is not kept.

    Tensors among `args` are kept instead, unless they are recomputable themselves.
    """
    tracker = _ACTIVE.tracker
    return function(*args) if tracker is None else tracker.call(function, *args)


def run_by_rows(forward: Callable[..., Tensor], num_rows: int, *tensors: Tensor) -> Tensor:
    """Return `forward(*tensors)`, computed for `num_rows` rows of all tensors at a time.

    Autograd keeps only the tensors themselves: what `forward` computes from some rows is in memory
    for these rows alone, in the backward, too, which recomputes it.

    >>> x = torch.ones(3, 2, requires_grad=True)
    >>> run_by_rows(lambda x, y: (x * y).exp().sum(-1), 2, x, torch.zeros(3, 2))
    tensor([2., 2., 2.], grad_fn=<CatBackward0>)
    """
    parts = zip(*(tensor.split(num_rows) for tensor in tensors), strict=True)
    return torch.cat([run("full", forward, *part) for part in parts])


def _run_checkpointed(forward: Callable[..., Tensor], *args: Any) -> Tensor:
    call = _RecomputedCall(forward, args)
    with saved_tensors_hooks(call.pack, call.unpack):
        return forward(*args)


def _run_selective(forward: Callable[..., Tensor], *args: Any) -> Tensor:
    outer = _ACTIVE.tracker
    _ACTIVE.tracker = tracker = _RecomputeTracker()
    try:
        with saved_tensors_hooks(tracker.pack, _unpack):
            return forward(*args)
    finally:
        _ACTIVE.tracker = outer
        tracker.discard_outputs()


class _RecomputedCall:
    """A call that keeps its arguments, and numbers the tensors that its backward needs.

    The backward's first access repeats the call, which saves its tensors in the same order.
    """

    def __init__(self, forward: Callable[..., Tensor], args: tuple[Any, ...]) -> None:
        self._forward, self._args = forward, args
        self._count = 0
        self._recomputed: dict[int, Tensor] = {}

    def pack(self, _: Tensor) -> int:
        self._count += 1
        return self._count - 1

    def unpack(self, index: int) -> Tensor:
        if index not in self._recomputed:
            self._recompute()
        return self._recomputed.pop(index)

    def _recompute(self) -> None:
        saved: list[Tensor] = []

        def pack(tensor: Tensor) -> int:
            saved.append(tensor.detach())
            return len(saved) - 1

        args = (_detach(arg) if isinstance(arg, Tensor) else arg for arg in self._args)
        with torch.enable_grad(), saved_tensors_hooks(pack, saved.__getitem__):
            self._forward(*args)
        self._recomputed = dict(enumerate(saved))


def _detach(x: Tensor) -> Tensor:
    return x.detach().requires_grad_(x.requires_grad)


class _RecomputeTracker:
    """The recomputable outputs of a forward while it runs."""

    def __init__(self) -> None:
        self._entries: list[_RecomputeEntry] = []

    def call(self, function: Callable[..., Tensor], *args: Any) -> Tensor:
        """Call the function, and record how to recompute its output."""
        output = function(*args)
        if output.requires_grad and output is not args[0]:
            packed = [self.pack(arg) if isinstance(arg, Tensor) else arg for arg in args]
            self._entries.append(_RecomputeEntry(function, packed, output.detach()))
        return output

    def pack(self, tensor: Tensor) -> Any:
        """Return the entry whose output is this tensor, or else the tensor."""
        # Autograd passes a detached alias, so that `is` does not find it. The newest entry is
        # the likeliest.
        for entry in reversed(self._entries):
            if entry.output is not None and tensor.is_set_to(entry.output):
                entry.num_uses += 1
                return entry
        return tensor

    def discard_outputs(self) -> None:
        """Free the outputs. Before the end of the forward, their memory could be reused by
        tensors that `pack` would take for them."""
        for entry in self._entries:
            entry.output = None
        self._entries.clear()


class _RecomputeEntry:
    """An output, and how to recompute it once it is discarded."""

    def __init__(self, function: Callable[..., Tensor], args: list[Any], output: Tensor) -> None:
        self._function, self._args = function, args
        self.output: Tensor | None = output
        self.num_uses = 0
        """How often the backward will access it."""

    def get(self) -> Tensor:
        """Return the output. It is recomputed once, and kept until its last use."""
        output = self.output
        if output is None:
            with torch.no_grad():
                output = self._function(*map(_unpack, self._args))
        self.num_uses -= 1
        self.output = output if self.num_uses > 0 else None
        return output


def _unpack(packed: Any) -> Any:
    return packed.get() if isinstance(packed, _RecomputeEntry) else packed


class _Active(threading.local):
    """The tracker of the forward that this thread runs."""

    tracker: _RecomputeTracker | None = None


_ACTIVE = _Active()
