"""The recurrent model over packed tokens."""

from __future__ import annotations

import pytest
import torch

from ingot.core.errors import ConfigError
from ingot.nn import BatchLayout
from ingot.nn.gru import GRU, GRUConfig, RecurrentLayers


def test_packing_does_not_change_a_sequence() -> None:
    model = GRU.from_config(GRUConfig(vocab_size=16, dim=8, layers=2), seed=0)
    tokens = torch.randint(16, (9,))
    layout = BatchLayout.packed([2, 0, 4, 3])
    whole = model(tokens, layout)
    alone = BatchLayout.packed([4])
    assert torch.equal(model(tokens[2:6], alone), whole[2:6])


def test_layers_equal_torchs_and_have_their_names() -> None:
    torch.manual_seed(0)
    theirs, ours = torch.nn.GRU(8, 8, 2), RecurrentLayers(8, 2)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(5, 8)
    torch.testing.assert_close(ours(x, torch.tensor([0, 5])), theirs(x)[0])


def test_model_compiles_without_a_graph_break() -> None:
    model = GRU.from_config(GRUConfig(vocab_size=16, dim=8, layers=2), seed=0)
    layout, tokens = BatchLayout.packed([4, 5]), torch.arange(9)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    expected, actual = model(tokens, layout), compiled(tokens, layout)
    assert torch.equal(actual, expected)
    for hidden in (expected, actual):
        hidden.square().sum().backward()


def test_gru_is_causal() -> None:
    model = GRU.from_config(GRUConfig(vocab_size=16, dim=8), seed=0)
    layout, tokens = BatchLayout.packed([6]), torch.arange(6)
    before = model(tokens, layout)
    tokens[4] = 9
    after = model(tokens, layout)
    assert torch.equal(before[:4], after[:4])
    assert not torch.equal(before[4:], after[4:])


def test_same_seed_gives_same_weights() -> None:
    a, b = (GRU.from_config(GRUConfig(vocab_size=16, dim=8), seed=1) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert a.lm_head_weight is a.tok_embed.weight


def test_bounds() -> None:
    with pytest.raises(ConfigError):
        GRUConfig(vocab_size=16, dim=0)
