"""Objectives: the losses of rows, and the objective that a recipe gets by default."""

from __future__ import annotations

import pytest
import torch

from ingot.core.errors import ConfigError
from ingot.data import ArrayBatch, TokenBatch
from ingot.nn import Decoder, Dense, DenseConfig, preset
from ingot.nn.loss import token_losses
from ingot.training.objective import CrossEntropy, CrossEntropyConfig, SFTConfig
from ingot.training.recipe import Recipe, XorData

TOKENS = torch.tensor([5, 6, 7, 8])
TARGETS = torch.tensor([6, -100, 8, -100])


def test_cross_entropy_counts_and_sums_the_targets_that_are_not_ignored() -> None:
    batch, model = (
        TokenBatch(TOKENS, TARGETS, [4], [0]),
        Decoder.from_config(preset("tiny"), seed=0),
    )
    objective = CrossEntropy()
    losses = objective.losses(model, batch, step=0, index=0, grad_output=1.0).losses
    assert objective.num_targets(batch) == 2
    assert losses.equal(token_losses(model, TOKENS, TARGETS, [4]))
    assert (losses == 0).tolist() == [False, True, False, True]
    assert objective.metric_sums(model, batch)["loss"] == losses.double().sum()


def test_the_accuracy_of_a_classifier_is_a_sum_over_its_samples() -> None:
    config = DenseConfig(in_features=2, hidden_dims=(), out_features=2)
    model = Dense.from_config(config, seed=0)
    x = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
    batch = ArrayBatch(x, model(x).argmax(-1), list(range(8)))
    assert CrossEntropy().metric_sums(model, batch)["accuracy"] == 8


def test_the_objective_must_fit_the_data() -> None:
    model = DenseConfig(in_features=2, hidden_dims=(8,), out_features=2)
    fields = {"name": "xor", "steps": 1, "global_batch_size": 4, "data": XorData(), "model": model}
    assert Recipe(**fields).objective == CrossEntropyConfig()
    with pytest.raises(ConfigError, match="'sft' cannot be trained on 'xor' data"):
        Recipe(**fields, objective=SFTConfig())
