"""Stages of a pipeline: a decoder that is cut into contiguous parts of its layers.

    stage 0        token and position embeddings, the first blocks
    ...
    last stage     the last blocks, the final norm and the LM head

With an interleaved schedule a rank has several stages: those of rank r of p are r, r + p, ...

The stages are cut so that the largest cost of one is smallest. The cost of a block is the number of
weights that a token is multiplied by, which is half of its FLOPs without attention scores; the LM
head counts in the last stage. Each stage has at least one block.

The weights of a stage have the names that they have in the whole decoder, so that checkpoints do
not depend on the number of stages.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor, nn

from ingot.core.errors import ConfigError
from ingot.nn import Decoder, DecoderConfig
from ingot.nn.config import Activation
from ingot.nn.layout import BatchLayout
from ingot.parallel.config import Schedule
from ingot.parallel.ranks import Ranks

STAGES_PER_RANK: dict[Schedule, int] = {
    "1f1b": 1,
    "interleaved_1f1b": 2,
    "interleaved_zero_bubble": 2,
}


class Stage(nn.Module):
    """Some layers of a decoder, which it shares the modules with.

    Takes tokens if it is the first stage, else the residual stream (T, D); returns the residual
    stream, and the normalized hidden states if it is the last.
    """

    def __init__(self, decoder: Decoder, layers: range, index: int, num_stages: int) -> None:
        super().__init__()
        self.index, self.num_stages, self.dim = index, num_stages, decoder.config.dim
        blocks = dict(decoder.blocks.named_children())
        self.blocks = nn.ModuleList(blocks[str(layer)] for layer in layers)
        if self.is_first:
            self.tok_embed, self.pos_embed = decoder.tok_embed, decoder.pos_embed
            self._embed = decoder.embed
        if self.is_last:
            self.norm, self.lm_head = decoder.norm, decoder.lm_head

    @property
    def is_first(self) -> bool:
        """Whether it embeds the tokens."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether the LM head is applied to its output."""
        return self.index == self.num_stages - 1

    def forward(self, x: Tensor, layout: BatchLayout) -> Tensor:
        """Compute the layers of this stage."""
        x_TD = self._embed(x, layout) if self.is_first else x
        for block in self.blocks:
            x_TD = block(x_TD, layout)
        return self.norm(x_TD) if self.is_last else x_TD


def cut_stages(model: nn.Module, ranks: Ranks, schedule: Schedule) -> list[Stage]:
    """Return the stages of this rank, and remove all other layers from the model.

    >>> from ingot.nn import preset
    >>> decoder = Decoder.on_meta(preset("tiny-moe"))
    >>> (stage,) = cut_stages(decoder, Ranks(rank=1, size=2), "1f1b")
    >>> next(name for name, _ in decoder.named_parameters())
    'blocks.1.attention.qkv.weight'
    """
    config: Any = getattr(model, "config", None)
    check_stages(config, ranks.size, schedule)
    assert isinstance(model, Decoder)
    num_stages = ranks.size * STAGES_PER_RANK[schedule]
    layers = balance(block_costs(config), num_stages)
    own = range(ranks.rank, num_stages, ranks.size)
    stages = [Stage(model, layers[index], index, num_stages) for index in own]
    kept = {layer for index in own for layer in layers[index]}
    for layer in (layer for layer in range(config.layers) if layer not in kept):
        delattr(model.blocks, str(layer))  # `del model.blocks[layer]` would rename the others
    ends: Any = model
    if not stages[0].is_first:
        ends.tok_embed = ends.pos_embed = None
    if not stages[-1].is_last:
        ends.norm = ends.lm_head = None
    return stages


def check_stages(config: Any, ranks: int, schedule: Schedule) -> None:
    """Raise a `ConfigError` unless a model of this config can be cut for as many ranks."""
    if not isinstance(config, DecoderConfig):
        raise ConfigError(
            "parallel.pp: only decoders can be cut into stages", hint="set parallel.pp=1"
        )
    if config.tie_embeddings:
        raise ConfigError(
            "parallel.pp: the first and the last stage cannot share a weight, which "
            "model.tie_embeddings asks for",
            hint="set model.tie_embeddings=false, or parallel.pp=1",
        )
    stages = ranks * STAGES_PER_RANK[schedule]
    if config.layers < stages:
        raise ConfigError(
            f"parallel.pp: {ranks} ranks have {stages} stages with the schedule '{schedule}', more "
            f"than the {config.layers} layers of the model",
            hint="lower parallel.pp, or use the schedule '1f1b', which has one for each rank",
        )


def block_costs(config: DecoderConfig) -> list[int]:
    """Return the cost of each block, that of the LM head added to the last."""
    heads = config.heads + config.kv_heads
    attention = 2 * config.dim * heads * config.head_dim
    matrices = 3 if config.activation is Activation.SWIGLU else 2
    mlp = moe = matrices * config.dim * config.ffn_dim
    if config.moe is not None:
        active = 3 * config.moe.top_k * config.moe.ffn_dim
        moe = config.dim * (active + config.moe.num_experts)
    costs = [attention + (moe if is_moe else mlp) for is_moe in config.is_moe_layer]
    costs[-1] += config.dim * config.vocab_size
    return costs


def balance(costs: Sequence[int], stages: int) -> list[range]:
    """Divide layers with these costs into contiguous stages whose largest cost is smallest.

    Of those, the one with the smallest sum of squared costs is preferred.

    >>> balance([1, 1, 1, 1, 3], 3)
    [range(0, 2), range(2, 4), range(4, 5)]
    """
    sums, count = [0, *accumulate(costs)], len(costs)
    # For the first n layers: largest cost, sum of squares, and where each stage ends.
    best = {n: (sums[n], sums[n] ** 2, (n,)) for n in range(1, count + 1)}
    for stage in range(1, stages):
        best = {
            n: min(
                (max(most, sums[n] - sums[m]), squares + (sums[n] - sums[m]) ** 2, (*ends, n))
                for m, (most, squares, ends) in best.items()
                if m < n
            )
            for n in range(stage + 1, count + 1)
        }
    ends = best[count][2]
    return [range(begin, end) for begin, end in zip((0, *ends), ends, strict=False)]
