"""The cost model compares measured rates, and keeps them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ingot.fuse import cost
from ingot.fuse.backend import rewrite_graph
from ingot.fuse.cost import Prediction
from tests.fuse.graphs import capture


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "_path", lambda threads: tmp_path / f"{threads}.json")
    monkeypatch.setattr(cost, "_SECONDS", 0.0)
    cost._measured.cache_clear()


def linear(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w)


@pytest.mark.parametrize(
    "kind",
    [
        "linear/ingot/float32/forward/contiguous",
        "linear/torch/bfloat16/training/transposed",
        "attention/ingot/float32/training/causal",
        "attention/torch/bfloat16/forward/full",
    ],
)
def test_rates_are_measured_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rate = cost.rate(kind, 32)
    assert 1e6 < rate < 1e14
    cost._measured.cache_clear()
    monkeypatch.setattr(cost, "_measure", lambda family, variant: pytest.fail("measured again"))
    assert cost.rate(kind, 32) == rate


@pytest.mark.parametrize("content", [b"", b"{", b'{"a": {"1": 0.0}}', b'{"a": {}}', b'{"a": 1}'])
def test_an_unusable_file_is_measured_again(content: bytes) -> None:
    path = cost._path(torch.get_num_threads())
    path.write_bytes(content)
    assert cost._load(path) == {}
    assert cost.rate("linear/ingot/float32/forward/contiguous", 1) > 0


def decide(ingot: float, torch_rate: float, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Return the rewrites of a linear layer where the rates are these."""
    rates = {"ingot": ingot, "torch": torch_rate}
    monkeypatch.setattr(cost, "rate", lambda kind, rows: rates[kind.split("/")[1]])
    args = torch.randn(4, 8), torch.randn(8, 8)
    graph = capture(linear, *args)
    module = torch.fx.GraphModule({}, graph)
    return dict(rewrite_graph(module, args).kept)


def test_the_faster_one_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert decide(2e9, 1e9, monkeypatch) == {"linear": 1}
    assert decide(1e9, 2e9, monkeypatch) == {}


def test_an_epilogue_saves_a_pass_over_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "rate", lambda kind, rows: 1e9)
    args = torch.randn(4, 8), torch.randn(8, 8)
    module = torch.fx.GraphModule({}, capture(lambda x, w: F.linear(x, w).relu(), *args))
    assert dict(rewrite_graph(module, args).kept) == {"linear": 1}
    module = torch.fx.GraphModule({}, capture(linear, *args))
    report = rewrite_graph(module, args)
    assert not report.kept
    assert "predicted to be slower" in str(report)


def test_equal_times_do_not_pay() -> None:
    assert Prediction(before=1.1, after=1.0).pays
    assert not Prediction(before=1.0, after=1.0).pays


def norm(x: Tensor, w: Tensor) -> Tensor:
    return F.layer_norm(x, (768,), w)


def added(x: Tensor, w: Tensor) -> Tensor:
    return F.layer_norm(x + 1.0 * x, (768,), w)


def added_and_used(x: Tensor, w: Tensor) -> Tensor:
    total = x + 1.0 * x
    return F.layer_norm(total, (768,), w) + total


@pytest.mark.parametrize(
    ("function", "rows", "training", "kept"),
    [
        (norm, 4096, False, {"layer_norm": 1}),
        (norm, 32, False, {}),  # the call takes longer than the work
        (norm, 4096, True, {}),
        (added, 4096, False, {}),  # Inductor does not write the sum
        (added_and_used, 4096, False, {"add_layer_norm": 1}),
    ],
)
def test_norms_are_kept_where_they_are_faster(
    function: Any, rows: int, training: bool, kept: dict[str, int]
) -> None:
    args = torch.randn(rows, 768), torch.randn(768).requires_grad_(training)
    module = torch.fx.GraphModule({}, capture(function, *args))
    assert dict(rewrite_graph(module, args).kept) == kept


@pytest.mark.parametrize(
    ("rows", "training", "kept"),
    [(80_000, True, {"embedding": 1}), (80_000, False, {}), (100, True, {})],
)
def test_large_embeddings_are_rewritten_for_their_gradient(
    rows: int, training: bool, kept: dict[str, int]
) -> None:
    args = torch.tensor([1, 0, 2]), torch.randn(rows, 100).requires_grad_(training)
    module = torch.fx.GraphModule({}, capture(F.embedding, *args))
    assert dict(rewrite_graph(module, args).kept) == kept
