"""Activation checkpointing: forget what a layer computed, and compute it again in the backward.

    none       everything is kept: the most memory, no time
    selective  of each block the results of its projections and its attention are kept; norms, and
               what is inside its MLP, half of all there is, are computed again
    full       of each block only its input is kept: the least memory, one more forward

For models with `blocks`, as the decoder has. The ops are exact, so what is computed again is the
same to the bit, and so are the gradients.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ingot.core.errors import ConfigError

Recompute = Literal["none", "selective", "full"]

_KEPT = ("linear", "linear_residual", "attention", "grouped_linear", "mm", "addmm", "bmm")


def recompute(model: nn.Module, policy: Recompute) -> None:
    """Have the blocks of a model keep only what the policy says.

    >>> from ingot.nn import Decoder, preset
    >>> recompute(Decoder.new(preset("tiny"), seed=0), "full")
    """
    if policy == "none":
        return
    blocks = getattr(model, "blocks", None)
    if blocks is None:
        raise ConfigError(
            f"recompute = '{policy}' for a {type(model).__name__}, which has no blocks",
            remedy="leave it out: such models are small",
        )
    for block in blocks:
        block.forward = _forgetful(block.forward, _selective if policy == "selective" else _full)


def _forgetful(forward: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: run(forward, *args) if torch.is_grad_enabled() else forward(*args)


def _full(forward: Callable[..., Any], *args: Any) -> Any:
    """Not by torch's `checkpoint`, which loads its compiler: 140 MB and a second."""
    again = _Again(forward, args)
    with saved_tensors_hooks(again.pack, again.unpack):
        return forward(*args)


class _Again:
    """A call that has only numbers of the tensors that its backward needs.

    When the first of them is asked for, it is made again, and they come in the same order.
    """

    def __init__(self, forward: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._forward, self._args = forward, args
        self._count = 0
        self._made: dict[int, Tensor] = {}

    def pack(self, _: Tensor) -> int:
        self._count += 1
        return self._count - 1

    def unpack(self, number: int) -> Tensor:
        if number not in self._made:
            self._make()
        return self._made.pop(number)

    def _make(self) -> None:
        made: list[Tensor] = []

        def pack(tensor: Tensor) -> int:
            made.append(tensor.detach())
            return len(made) - 1

        args = (_leaf(arg) if isinstance(arg, Tensor) else arg for arg in self._args)
        with torch.enable_grad(), saved_tensors_hooks(pack, made.__getitem__):
            self._forward(*args)
        self._made = dict(enumerate(made))


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_(x.requires_grad)


def _selective(forward: Callable[..., Any], *args: Any) -> Any:
    contexts = partial(create_selective_checkpoint_contexts, _keep)
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    return checkpoint(forward, *args, context_fn=contexts, **options)


def _keep(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = op.name().partition("::")[2].partition(".")[0]
    return CheckpointPolicy.MUST_SAVE if name in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
