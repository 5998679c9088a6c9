"""The state of training in a few numbers, of what the AdamW update reads and writes anyway.

The op returns sums over rows (`ops.adamw`, `row_stats`). Here they are added up as integers, in a
unit that the largest of all rows determines: so a number does not depend on the threads, nor on the
ranks that the rows are divided among.

    update_norm           |u|, of the change of all weights
    weight_norm           |w|, before the update
    momentum_norm         |m|, of the first moments before the update
    mean_sqrt_v           mean of the square root of the second moments
    grad_momentum_cos     cosine of the clipped gradient and the momentum before it
    grad_update_cos       cosine of the clipped gradient and the update
    largest_update_share  share of |u|^2 of the weight with the largest one

Cosines are left out where a vector is 0, as the momentum of the first step.
"""

# pyright: basic
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ingot.ops.adamw import ROW_STATS
from ingot.parallel.ranks import Ranks

_UNIT_BITS = 38  # up to 2^24 rows
_ALONE = Ranks()
_NONE = np.zeros((0, len(ROW_STATS)))


def summarize(
    row_stats: Mapping[str, Tensor],
    sizes: Mapping[str, int],
    names: Sequence[str],
    ranks: Ranks = _ALONE,
) -> dict[str, float]:
    """Return the numbers of an update from the sums over rows of its weights.

    `names` are the weights of the whole model, `sizes` the numbers of elements of those given;
    `ranks` have different rows of them, or none.

    >>> row_stats = torch.tensor([[4.0, 2.0, 1.0, 0.25, 9.0, 1.0, 0.5]])
    >>> found = summarize({"w": row_stats}, {"w": 1}, ["w"])
    >>> found["update_norm"], found["weight_norm"], found["grad_momentum_cos"]
    (0.5, 3.0, 1.0)
    """
    found = [name for name in names if len(row_stats.get(name, ()))]
    # In numpy, on this thread: torch's would wait for each other at the end of each of the passes.
    rows = np.concatenate([_NONE, *(row_stats[name].numpy() for name in found)], dtype=np.float64)
    with np.errstate(invalid="ignore"):
        largest = np.abs(rows).max(0, initial=0.0)
        largest = ranks.max(torch.from_numpy(np.where(np.isfinite(largest), largest, np.inf)))
        if not largest.isfinite().all():
            return {}
    units = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - _UNIT_BITS)
    integers = (rows / units.numpy()).astype(np.int64)
    sums = torch.zeros(len(names), len(ROW_STATS) + 1, dtype=torch.int64)
    if found:
        index = {name: number for number, name in enumerate(names)}
        owners = torch.tensor([index[name] for name in found])
        starts = np.cumsum([0, *(len(row_stats[name]) for name in found[:-1])])
        sums[owners, :-1] = torch.from_numpy(np.add.reduceat(integers, starts, axis=0))
        sums[owners, -1] = torch.tensor([sizes[name] for name in found])
    sums = ranks.sum_integers(sums)
    return _numbers(sums[:, :-1].double() * units, int(sums[:, -1].sum()))


def _numbers(by_weight: Tensor, num_elements: int) -> dict[str, float]:
    gg, gm, mm, uu, pp, gu, v = by_weight.sum(0).tolist()
    shares = by_weight[:, ROW_STATS.index("uu")]
    numbers = {
        "update_norm": math.sqrt(uu),
        "weight_norm": math.sqrt(pp),
        "momentum_norm": math.sqrt(mm),
        "mean_sqrt_v": v / max(num_elements, 1),
    }
    if gg * mm > 0:
        numbers["grad_momentum_cos"] = gm / math.sqrt(gg * mm)
    if gg * uu > 0:
        numbers["grad_update_cos"] = gu / math.sqrt(gg * uu)
    if uu > 0:
        numbers["largest_update_share"] = float(shares.max()) / uu
    return numbers
