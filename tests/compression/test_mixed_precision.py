from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ingot.compression import RoundToNearest, Upgrade, choose_upgrades, measure_error_reductions
from ingot.compression.quantize import quantize
from ingot.nn import Decoder, preset
from ingot.nn.formats import Int4, Int8
from ingot.nn.quantized import QuantizedLinear

SEQUENCES = [list(range(n, n + 60)) for n in range(12)]
layers = st.dictionaries(
    st.integers(0, 1000).map(str),
    st.builds(Upgrade, st.floats(0, 1), st.integers(1, 1000)),
    max_size=20,
)


def total(upgrades: dict[str, Upgrade], chosen: set[str]) -> int:
    return sum(upgrades[name].num_bytes for name in chosen)


@given(upgrades=layers, budget=st.integers(0, 5000))
def test_the_budget_is_never_exceeded(upgrades: dict[str, Upgrade], budget: int) -> None:
    assert total(upgrades, choose_upgrades(upgrades, budget)) <= budget


@given(upgrades=layers, budget=st.integers(0, 5000))
def test_no_layer_that_fits_is_left_out(upgrades: dict[str, Upgrade], budget: int) -> None:
    chosen = choose_upgrades(upgrades, budget)
    left = budget - total(upgrades, chosen)
    assert all(upgrades[name].num_bytes > left for name in upgrades.keys() - chosen)


@given(upgrades=layers, budget=st.integers(0, 5000))
def test_the_error_is_at_most_one_layer_above_the_optimum(
    upgrades: dict[str, Upgrade], budget: int
) -> None:
    """The greedy choice up to the first layer that does not fit is optimal for its size."""
    fitting = [upgrade for upgrade in upgrades.values() if upgrade.num_bytes <= budget]
    bound, left = 0.0, float(budget)
    for gain, size in sorted(fitting, key=lambda one: -one[0] / one[1]):
        bound += gain * min(1.0, left / size)  # of the relaxed problem, which may split a layer
        left -= min(left, size)
    reached = sum(upgrades[name].error_reduction for name in choose_upgrades(upgrades, budget))
    largest = max((upgrade.error_reduction for upgrade in fitting), default=0.0)
    assert bound - largest - 1e-9 <= reached <= bound + 1e-9


def test_the_layer_with_a_planted_outlier_gains_most() -> None:
    decoder = Decoder.from_config(preset("tiny"), seed=0)
    block: Any = decoder.blocks[1]
    block.attention.out.weight.data[:, 5] *= 40  # a group has one scale: the others are lost
    found = measure_error_reductions(decoder, Int4(), Int8(), SEQUENCES)
    assert len(found) == 4 * len(decoder.blocks)
    assert all(reduction > 0 for reduction in found.values())
    assert max(found, key=lambda name: found[name]) == "blocks.1.attention.out"


def test_measuring_does_not_change_the_model() -> None:
    decoder = Decoder.from_config(preset("tiny"), seed=0)
    before = {name: tensor.clone() for name, tensor in decoder.state_dict().items()}
    measure_error_reductions(decoder, Int4(), Int8(), SEQUENCES)
    after = decoder.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


@pytest.mark.parametrize("raised", [(), ("blocks.0.mlp.gate_up", "blocks.1.attention.qkv")])
def test_layers_have_the_formats_that_were_chosen(raised: tuple[str, ...]) -> None:
    decoder = Decoder.from_config(preset("tiny"), seed=0)
    names = measure_error_reductions(decoder, Int4(), Int8(), SEQUENCES[:1])
    formats = {name: Int8() if name in raised else Int4() for name in names}
    quantize(decoder, formats, RoundToNearest())
    found = {n: m.format for n, m in decoder.named_modules() if isinstance(m, QuantizedLinear)}
    assert found == formats
