"""Mixed precision under a budget: choose which layers have the larger of two formats.

All layers begin in the smaller format. Those whose error falls most per byte are raised to the
larger one, as long as the budget allows (greedy, as for a knapsack). The error of a layer is the
squared relative error of its output, with the weight rounded to nearest and the rest of the model
as it was.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from ingot.compression.calibration import collect_inputs, embed, linear_layers, squared_norm
from ingot.core.log import Progress
from ingot.nn import Decoder
from ingot.nn.formats import WeightFormat


class Upgrade(NamedTuple):
    """What raising a layer to the larger format gains and costs."""

    error_reduction: float
    num_bytes: int


@torch.no_grad()
def measure_error_reductions(
    decoder: Decoder,
    small: WeightFormat,
    large: WeightFormat,
    sequences: Sequence[Sequence[int]],
    progress: Progress | None = None,
) -> dict[str, float]:
    """Return how much less the squared relative error of each layer is in the larger format.

    Args:
        decoder: The model, which is not changed.
        small: The format that layers have by default.
        large: The format that layers may be raised to.
        sequences: Tokens to calibrate with.
        progress: Advances by 1 for each block.
    """
    batches = list(embed(decoder, sequences))
    reductions: dict[str, float] = {}
    for index, block in enumerate(decoder.blocks):
        for layer in linear_layers(block):
            hessian_DD = collect_inputs(block, layer.module, batches).hessian_DD
            weight_ND = layer.weight_ND
            errors = [
                squared_norm(format.decode(format.encode(weight_ND)) - weight_ND, hessian_DD)
                for format in (small, large)
            ]
            output = squared_norm(weight_ND, hessian_DD) or 1.0
            reductions[f"blocks.{index}.{layer.name}"] = (errors[0] - errors[1]) / output
        batches = [(block(x_TD, layout), layout) for x_TD, layout in batches]
        if progress:
            progress.advance()
    return reductions


def choose_upgrades(upgrades: Mapping[str, Upgrade], max_bytes: int) -> set[str]:
    """Return the layers to raise, which together take at most `max_bytes` more.

    >>> upgrades = {"a": Upgrade(0.4, 20), "b": Upgrade(0.3, 10), "c": Upgrade(0.1, 10)}
    >>> sorted(choose_upgrades(upgrades, 25))
    ['b', 'c']
    """
    raised: set[str] = set()
    by_gain = sorted(upgrades, key=lambda name: -upgrades[name].error_reduction / upgrades[name][1])
    for name in by_gain:
        if upgrades[name].num_bytes <= max_bytes:
            max_bytes -= upgrades[name].num_bytes
            raised.add(name)
    return raised
