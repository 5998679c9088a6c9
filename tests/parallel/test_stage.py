"""How a decoder is cut into stages."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ingot.core.errors import ConfigError
from ingot.nn import BatchLayout, Decoder, DenseConfig, MoEConfig
from ingot.parallel.config import Schedule
from ingot.parallel.ranks import Ranks
from ingot.parallel.stage import balance, block_costs, check_stages, cut_stages
from tests.parallel.comparison import GPT2, LLAMA_70B, UNTIED
from tests.training import runs


@given(st.lists(st.integers(1, 20), min_size=1, max_size=9), st.integers(1, 9))
def test_no_other_cut_has_a_smaller_largest_cost(costs: list[int], stages: int) -> None:
    stages = min(stages, len(costs))
    parts = balance(costs, stages)
    assert [layer for part in parts for layer in part] == list(range(len(costs)))
    assert len(parts) == stages
    assert all(parts)

    def largest(ends: tuple[int, ...]) -> int:
        bounds = (0, *ends, len(costs))
        return max(sum(costs[a:b]) for a, b in pairwise(bounds))

    best = min(largest(ends) for ends in combinations(range(1, len(costs)), stages - 1))
    assert max(sum(costs[layer] for layer in part) for part in parts) == best


def test_the_head_counts_in_the_last_stage() -> None:
    sizes = [len(part) for part in balance(block_costs(LLAMA_70B), 8)]
    assert sizes[-1] == 9
    assert sorted(sizes[:-1]) == [10, 10, 10, 10, 10, 10, 11]


def test_a_token_costs_the_experts_that_process_it() -> None:
    moe = MoEConfig(num_experts=4, top_k=2, ffn_dim=48, layers=(0, 2))
    attention, dense = 2 * 32 * 3 * 16, 3 * 32 * 64
    sparse = 32 * (2 * 3 * 48 + 4)
    costs = block_costs(replace(UNTIED, moe=moe))
    assert costs == [
        attention + sparse,
        attention + dense,
        attention + sparse,
        attention + dense + 300 * 32,
    ]


@pytest.mark.parametrize("config", [UNTIED, replace(GPT2, layers=4, tie_embeddings=False)])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b"])
def test_stages_compute_what_the_decoder_computes(config: Any, schedule: Schedule) -> None:
    whole = Decoder.from_config(config, seed=1)
    tokens, layout = torch.arange(40) % 7, BatchLayout.packed([25, 15])
    wanted = dict(whole.named_parameters())
    stages, found = {}, {}
    for rank in range(2):
        model = Decoder.from_config(config, seed=1)
        for stage in cut_stages(model, Ranks(rank, 2), schedule):
            stages[stage.index] = stage
        found |= dict(model.named_parameters())
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    x = tokens
    for index in range(len(stages)):
        x = stages[index](x, layout)
    assert len(stages) == (2 if schedule == "1f1b" else 4)
    assert torch.equal(x, whole(tokens, layout))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DenseConfig(in_features=2, hidden_dims=(), out_features=2), "only decoders"),
        (runs.TINY, "cannot share a weight"),
        (replace(UNTIED, layers=3), "more than the 3 layers"),
    ],
)
def test_models_that_cannot_be_cut(config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_stages(config, 2, "interleaved_1f1b")
