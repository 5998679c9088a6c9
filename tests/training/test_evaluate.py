"""Evaluation on the validation split."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ingot.data import PackedDataset, xor
from ingot.nn import Decoder, Dense, DenseConfig
from ingot.nn.loss import token_logprobs
from ingot.training.evaluate import LOGPROBS, evaluate, save_logprobs
from ingot.training.recipe import load_datasets
from tests.training import runs


def validation_set(tmp_path: Path) -> PackedDataset:
    found = load_datasets(runs.text(tmp_path).data).validation
    assert len(found) > 3
    return found


def test_the_loss_does_not_depend_on_the_batches(tmp_path: Path) -> None:
    model, samples = Decoder.from_config(runs.TINY, seed=0), validation_set(tmp_path)
    wanted = evaluate(model, samples, batch_size=1, max_batches=10**6)
    assert wanted.accuracy is None
    for batch in (2, 3, 100):
        found = evaluate(model, samples, batch_size=batch, max_batches=10**6)
        assert found.loss == pytest.approx(
            wanted.loss, rel=1e-12
        )  # a token's loss is batch-invariant
    assert evaluate(model, samples, batch_size=1, max_batches=1).loss != wanted.loss


def test_accuracy() -> None:
    model = Dense.from_config(DenseConfig(in_features=2, hidden_dims=(), out_features=2), seed=0)
    with torch.no_grad():
        model.layers[0].weight.zero_()  # pyright: ignore
        model.layers[0].bias.copy_(torch.tensor([0.0, 1.0]))  # pyright: ignore
    found = evaluate(model, xor(), batch_size=3, max_batches=9)
    assert found.accuracy == 0.5
    assert model.training


def test_the_log_probabilities_are_those_of_any_forward(tmp_path: Path) -> None:
    model, samples = (
        Decoder.from_config(runs.TINY, seed=0, dtype=torch.bfloat16),
        validation_set(tmp_path),
    )
    save_logprobs(model, samples, tmp_path, max_samples=2)
    found = load_file(tmp_path / LOGPROBS)
    tokens, length = found["0.tokens"], found["0.lengths"].tolist()[0]
    for end in (2, length // 2, length):  # the log-probabilities of a prompt, asked for alone
        prompt = tokens[:end]
        with torch.inference_mode():
            wanted = token_logprobs(model, prompt[:-1], prompt[1:], [end - 1])
        assert torch.equal(found["0.logprobs"][: end - 1], wanted)
    assert "1.tokens" in found
    assert "2.tokens" not in found
