"""Losses and log-probabilities of models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ingot import ops
from ingot.nn import BatchLayout, Decoder, preset
from ingot.nn.loss import class_losses, token_logprobs, token_losses


def test_token_losses_match_cross_entropy_of_logits() -> None:
    model = Decoder.from_config(preset("tiny"), seed=0)
    tokens, targets = torch.randint(256, (9,)), torch.randint(256, (9,))
    targets[4] = -100
    layout = BatchLayout.packed([5, 4])
    logits = model.logits(model(tokens, layout))
    for smoothing in (0.0, 0.1):
        wanted = F.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)
        found = token_losses(model, tokens, targets, [5, 4], label_smoothing=smoothing)
        torch.testing.assert_close(found, wanted)
    assert torch.all(
        token_losses(model, tokens, targets, [5, 4], z_loss=1.0)[:4]
        > token_losses(model, tokens, targets, [5, 4])[:4]
    )


def test_token_logprobs_equal_negated_losses() -> None:
    model = Decoder.from_config(preset("tiny"), seed=0)
    tokens, targets = torch.randint(256, (9,)), torch.randint(256, (9,))
    targets[4] = -100
    found = token_logprobs(model, tokens, targets, [5, 4])
    torch.testing.assert_close(found, -token_losses(model, tokens, targets, [5, 4]))
    assert found[4] == 0


def test_class_losses_match_torch() -> None:
    scores, targets = torch.randn(5, 3), torch.tensor([0, 1, 2, 1, 0])
    wanted = F.cross_entropy(scores, targets, reduction="none", label_smoothing=0.2)
    torch.testing.assert_close(class_losses(scores, targets, 0.2), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("assumed", [0.25, 0.5])
def test_gradients_are_right_for_any_grad_output(dtype: torch.dtype, assumed: float) -> None:
    def gradients(grad_output: float | None) -> tuple[Tensor, list[Tensor | None]]:
        model = Decoder.from_config(preset("tiny"), seed=0).to(dtype)
        options: dict[str, Any] = {
            "label_smoothing": 0.1,
            "z_loss": 0.01,
            "grad_output": grad_output,
        }
        losses = token_losses(model, tokens, targets, [5, 4], **options)
        (losses.sum() * 0.25).backward()
        return losses.detach(), [p.grad for p in model.parameters()]

    tokens, targets = torch.randint(256, (2, 9))
    targets[4] = -100
    losses, wanted = gradients(None)
    same, found = gradients(assumed)
    assert torch.equal(losses, same)  # bitwise: training and serving report the same
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grad_output", [None, 0.25])
def test_selected_rows_have_the_same_losses_and_gradients(
    dtype: torch.dtype, grad_output: float | None
) -> None:
    random = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(256, (2, 40), generator=random)
    targets[torch.rand(40, generator=random) < 0.6] = -100
    rows = (targets != -100).nonzero()[:, 0]

    def run(rows: Tensor | None) -> tuple[Tensor, list[Tensor | None]]:
        model = Decoder.from_config(preset("tiny"), seed=0).to(dtype)
        losses = token_losses(
            model, tokens, targets, [25, 15], grad_output=grad_output, target_rows=rows
        )
        (losses.sum() * 0.25).backward()
        return losses.detach(), [p.grad for p in model.parameters()]

    (losses, grads), (same, found) = run(None), run(rows)
    assert torch.equal(losses, same)
    assert losses[rows].all()
    for one, other in zip(found, grads, strict=True):
        torch.testing.assert_close(one, other)


def test_no_selected_rows() -> None:
    model, nothing = Decoder.from_config(preset("tiny"), seed=0), torch.full((3,), -100)
    rows = torch.zeros(0, dtype=torch.int64)
    losses = token_losses(model, torch.arange(3), nothing, [3], grad_output=1.0, target_rows=rows)
    losses.sum().backward()
    assert losses.tolist() == [0.0, 0.0, 0.0]
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)


def test_micro_batch_without_targets_has_no_loss_and_no_gradient() -> None:
    hidden, weight = torch.zeros(0, 8).bfloat16(), torch.randn(11, 8).bfloat16()
    found = ops.linear_cross_entropy_fwd_bwd(hidden, weight, torch.zeros(0).long())
    assert [tuple(part.shape) for part in found] == [(0,), (0, 8), (11, 8)]
    assert not found[2].any()
