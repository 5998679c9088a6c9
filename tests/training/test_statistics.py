"""The numbers about an update: those of the whole vectors, on any threads, ranks and rows."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ingot.training.adamw import AdamW
from ingot.training.optimizer import Optimizers
from ingot.training.statistics import summarize
from ingot.training.trainer import Trainer
from tests.training.runs import state, xor

SHAPES = {"wide": (40, 130), "vector": (70,), "experts": (2, 5, 9)}


def updated() -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor], AdamW]:
    """Weights before and after the second step, its gradients, and the optimizer."""
    random = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=random) for name, shape in SHAPES.items()}
    optimizer = AdamW([{"params": list(weights.values())}], lr=0.1, weight_decay=0.1)
    optimizer.apply_update(
        {w: (torch.randn(w.shape, generator=random), 1.0) for w in weights.values()}
    )
    before = {name: weight.clone() for name, weight in weights.items()}
    grads = {name: torch.randn(shape, generator=random) for name, shape in SHAPES.items()}
    return before, weights, grads, optimizer


def test_numbers_are_those_of_the_whole_vectors() -> None:
    before, weights, grads, optimizer = updated()
    momentum = torch.cat([optimizer.state[w]["exp_avg"].flatten() for w in weights.values()])
    rows: dict[Tensor, Tensor] = {}
    optimizer.apply_update({weights[name]: (grads[name], 1.0) for name in SHAPES}, rows)
    found = summarize(
        {name: rows[weights[name]] for name in SHAPES},
        {name: weights[name].numel() for name in SHAPES},
        list(SHAPES),
    )
    moved = {name: before[name] - weights[name] for name in SHAPES}
    g, u, w = (torch.cat([x[n].flatten() for n in SHAPES]) for x in (grads, moved, before))
    v = torch.cat([optimizer.state[x]["exp_avg_sq"].flatten() for x in weights.values()])
    shares = [float(m.square().sum() / u.square().sum()) for m in moved.values()]
    assert found == {
        "update_norm": pytest.approx(float(u.norm()), rel=1e-5),
        "weight_norm": pytest.approx(float(w.norm()), rel=1e-5),
        "momentum_norm": pytest.approx(float(momentum.norm()), rel=1e-5),
        "mean_sqrt_v": pytest.approx(float(v.sqrt().mean()), rel=1e-5),
        "grad_momentum_cos": pytest.approx(
            float(torch.cosine_similarity(g, momentum, 0)), abs=1e-5
        ),
        "grad_update_cos": pytest.approx(float(torch.cosine_similarity(g, u, 0)), rel=1e-4),
        "largest_update_share": pytest.approx(max(shares), rel=1e-4),
    }


def test_numbers_do_not_depend_on_how_rows_are_divided() -> None:
    random = torch.Generator().manual_seed(0)
    rows = {name: torch.randn(50, 7, generator=random).square() for name in ("a", "b")}
    sizes = {"a": 300, "b": 50}
    whole = summarize(rows, sizes, ["a", "b"])
    shuffled = {name: r[torch.randperm(50, generator=random)] for name, r in rows.items()}
    assert summarize(shuffled, sizes, ["a", "b"]) == whole
    assert summarize({"b": rows["b"], "a": rows["a"]}, sizes, ["a", "b"]) == whole


def test_first_step_has_no_momentum_and_infinity_no_numbers() -> None:
    weight = torch.ones(3, 4)
    for grad, keys in ((1.0, True), (math.inf, False)):
        rows: dict[Tensor, Tensor] = {}
        optimizer = AdamW([{"params": [weight]}], lr=0.1)
        optimizer.apply_update({weight: (torch.full((3, 4), grad), 1.0)}, rows)
        found = summarize({"w": rows[weight]}, {"w": 12}, ["w"])
        assert ("update_norm" in found) == keys
        assert "grad_momentum_cos" not in found


def test_training_has_the_same_bits_with_and_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[dict[str, Tensor]] = []
    losses: list[list[float]] = []
    for has in (True, False):
        monkeypatch.setattr(Optimizers, "has_row_stats", has)
        lines: list[dict[str, float]] = []
        torch.manual_seed(0)  # its state is in a checkpoint
        trainer = Trainer(xor(steps=4), tmp_path / str(has))
        trainer.run(lines.append)
        assert any("update_norm" in line for line in lines) == has
        losses.append([line["loss"] for line in lines if "loss" in line])
        found.append(state(trainer))
    assert losses[0] == losses[1]
    assert found[0].keys() == found[1].keys()
    for name, tensor in found[0].items():
        assert torch.equal(tensor, found[1][name]), name
