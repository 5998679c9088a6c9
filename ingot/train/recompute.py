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
from torch import nn
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
    contexts = partial(create_selective_checkpoint_contexts, _keep)
    options: dict[str, Any] = {"context_fn": contexts} if policy == "selective" else {}
    for block in blocks:
        block.forward = _forgetful(block.forward, options)


def _forgetful(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args)
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **options)

    return run


def _keep(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = op.name().partition("::")[2].partition(".")[0]
    return CheckpointPolicy.MUST_SAVE if name in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
