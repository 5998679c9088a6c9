"""Observe the result of every op of a decoder, in the order of computation, by forward hooks.

    with probe(decoder, visit):
        decoder(tokens_T, layout)

calls `visit(name, value)` with the result of each op, (T, ...). Names are those of modules:

    embedding                          input of the first block
    blocks.3.attention_norm
    blocks.3.attention.q, .k, .v       projections, with their biases
    blocks.3.attention.q_norm, .k_norm
    blocks.3.attention.q_rope, .k_rope
    blocks.3.attention                 weighted values of all heads, before the output projection
    blocks.3.attention.out             output projection; pre-norm: plus the residual stream
    blocks.3.mlp_norm
    blocks.3.mlp.hidden                activations between the layers of the MLP
    blocks.3.mlp.down                  last layer of the MLP; pre-norm: plus the residual stream
    blocks.3.mlp.router, blocks.3.mlp  instead of these two in a layer with a mixture of experts
    norm

In a post-norm block the additions are ops of their own: `attention_residual` and `mlp_residual`.

A value is a view of what the next op reads: a visitor that writes to it in place changes what is
computed from there on. `ingot.observe.drift` uses this to give two models the same inputs.
"""

# pyright: basic
from __future__ import annotations

import itertools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ingot.nn.decoder import Block, Decoder
from ingot.nn.mlp import MoE

Visit = Callable[[str, Tensor], None]
"""Receives the name of an op and its result."""


@contextmanager
def probe(decoder: Decoder, visit: Visit) -> Generator[None]:
    """Call `visit` with the result of every op while the context is active.

    >>> import torch
    >>> from ingot.nn import BatchLayout, preset
    >>> decoder, names = Decoder.from_config(preset("tiny"), seed=0), list[str]()
    >>> with probe(decoder, lambda name, value: names.append(name)):
    ...     _ = decoder(torch.tensor([1, 2]), BatchLayout.packed([2]))
    >>> names[:3], names[-1]
    (['embedding', 'blocks.0.attention_norm', 'blocks.0.attention.q'], 'norm')
    """
    handles = [on_input(decoder.blocks[0], visit, "embedding")]
    try:
        for layer, block in enumerate(decoder.blocks):
            assert isinstance(block, Block)
            handles += _attach(block, f"blocks.{layer}", visit)
        handles.append(on_output(decoder.norm, visit, "norm"))
        yield
    finally:
        for handle in handles:
            handle.remove()


def on_input(module: nn.Module, visit: Visit, name: str) -> RemovableHandle:
    """Visit the first argument of each call of a module."""

    def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
        visit(name, args[0])

    return module.register_forward_pre_hook(hook)


def on_output(module: nn.Module, visit: Visit, name: str) -> RemovableHandle:
    """Visit the result of each call of a module."""

    def hook(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        visit(name, output)

    return module.register_forward_hook(hook)


def _attach(block: Block, name: str, visit: Visit) -> list[RemovableHandle]:
    attention, mlp = block.attention, block.mlp
    handles = [
        on_output(block.attention_norm, visit, f"{name}.attention_norm"),
        _on_projections(attention, visit, f"{name}.attention"),
        on_input(attention.out, visit, f"{name}.attention"),
        on_output(attention.out, visit, f"{name}.attention.out"),
        on_output(block.mlp_norm, visit, f"{name}.mlp_norm"),
    ]
    if attention.qk_norm is not None:
        handles += [
            on_output(attention.q_norm, visit, f"{name}.attention.q_norm"),
            on_output(attention.k_norm, visit, f"{name}.attention.k_norm"),
        ]
    if attention.rotary.enabled:
        handles.append(_on_rotary(attention.rotary, visit, f"{name}.attention"))
    if isinstance(mlp, MoE):
        handles += [
            on_output(mlp.router, visit, f"{name}.mlp.router"),
            on_output(mlp, visit, f"{name}.mlp"),
        ]
    else:
        handles += [
            on_input(mlp.down, visit, f"{name}.mlp.hidden"),
            on_output(mlp.down, visit, f"{name}.mlp.down"),
        ]
    if block.post_norm:
        handles += [
            on_input(mlp, visit, f"{name}.attention_residual"),
            on_output(block, visit, f"{name}.mlp_residual"),
        ]
    return handles


def _on_projections(attention: Any, visit: Visit, name: str) -> RemovableHandle:
    """Visit queries, keys and values, which are rows of one projection."""
    heads = (attention.heads, attention.kv_heads, attention.kv_heads)
    widths = [count * attention.head_dim for count in heads]

    def hook(_: nn.Module, args: Any, output: Tensor) -> None:
        for part, value in zip("qkv", output.split(widths, dim=-1), strict=True):
            visit(f"{name}.{part}", value)

    return attention.qkv.register_forward_hook(hook)


def _on_rotary(rotary: nn.Module, visit: Visit, name: str) -> RemovableHandle:
    """Visit the rotated queries and keys: the module is called for each in turn."""
    parts = itertools.cycle("qk")

    def hook(_: nn.Module, args: Any, output: Tensor) -> None:
        visit(f"{name}.{next(parts)}_rope", output)

    return rotary.register_forward_hook(hook)
