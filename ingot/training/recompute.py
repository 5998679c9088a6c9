"""Activation checkpointing: forget what a layer computed, and compute it again in the backward.

    none       everything is kept: the most memory, no time
    selective  of each block all is kept but the results of norms and rotations and what is inside
               its MLP: about half the memory, the first product of each MLP once more
    full       of each block only its input is kept: the least memory, one more forward

For models with `blocks`, as the decoder has. The ops are exact, so what is computed again is the
same bits, and so are the gradients.

Both are done by autograd's hooks: what an op saves for its backward is replaced by how it is made.
torch's own `checkpoint` would do it too, but it loads torch's compiler, 140 MB and a second.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ingot.core.errors import ConfigError
from ingot.nn import LayerNorm, RMSNorm
from ingot.nn.attention import Rotary

RecomputePolicy = Literal["none", "selective", "full"]


def recompute(model: nn.Module, policy: RecomputePolicy) -> None:
    """Have the blocks of a model keep only what the policy says.

    >>> from ingot.nn import Decoder, preset
    >>> recompute(Decoder.from_config(preset("tiny"), seed=0), "full")
    """
    if policy == "none":
        return
    blocks = getattr(model, "blocks", None)
    if blocks is None:
        raise ConfigError(
            f"recompute = '{policy}' for a {type(model).__name__}, which has no blocks",
            hint="leave it out: such models are small",
        )
    for block in blocks:
        if policy == "selective":
            _Recipes().follow(block)
        else:
            block.forward = _forgetful(block.forward)


def _forgetful(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args)
        again = _Again(forward, args)
        with saved_tensors_hooks(again.pack, again.unpack):
            return forward(*args)

    return run


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


class _Recipes:
    """How the tensors of a block that are forgotten were made, while its forward runs."""

    def __init__(self) -> None:
        self._known: dict[int, _Recipe] = {}

    def follow(self, block: Any) -> None:
        """Forget what its norms, its rotations and the inside of its MLP give."""
        for part in block.modules():
            if isinstance(part, RMSNorm | LayerNorm | Rotary):
                part.forward = self._noting(part.forward)
        block.mlp.hidden = self._noting(block.mlp.hidden)
        forward = block.forward

        def run(*args: Any) -> Any:
            try:
                with saved_tensors_hooks(self._pack, _unpack):
                    return forward(*args)
            finally:
                for recipe in self._known.values():
                    recipe.made = None
                self._known.clear()

        block.forward = run

    def _noting(self, make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*args: Any) -> Tensor:
            made = make(*args)
            if made.requires_grad and made is not args[0]:
                packed = [self._pack(arg) if isinstance(arg, Tensor) else arg for arg in args]
                # Held until the block is done: another tensor would come to lie at its place.
                self._known[made.data_ptr()] = _Recipe(make, packed, made.detach())
            return made

        return run

    def _pack(self, tensor: Tensor) -> Any:
        recipe = self._known.get(tensor.data_ptr())
        if recipe is None or recipe.made is None or recipe.made.shape != tensor.shape:
            return tensor
        recipe.asked += 1
        return recipe


class _Recipe:
    """A tensor, and when it is forgotten, how it is made."""

    def __init__(self, make: Callable[..., Tensor], args: list[Any], made: Tensor) -> None:
        self._make, self._args = make, args
        self.made: Tensor | None = made
        self.asked = 0
        """How often it will be asked for."""

    def again(self) -> Tensor:
        made = self.made
        if made is None:
            with torch.no_grad():
                made = self._make(*map(_unpack, self._args))
        self.asked -= 1
        self.made = made if self.asked > 0 else None
        return made


def _unpack(packed: Any) -> Any:
    return packed.again() if isinstance(packed, _Recipe) else packed
