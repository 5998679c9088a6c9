"""Losses and log-probabilities of models."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ingot import ops
from ingot.core.targets import IGNORE_INDEX
from ingot.nn import BatchLayout, Decoder, preset
from ingot.nn.formats import Int8
from ingot.nn.loss import CHUNK, class_losses, sampled_logprobs, token_logprobs, token_losses
from ingot.nn.quantized import quantize_


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


OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.3, "top_p": 0.9},
    {"top_k": 9},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.02},
]


def sampled_texts(model: Decoder, count: int, **options: Any) -> tuple[Tensor, Tensor]:
    """Return tokens, and targets that are possible with these options; some are ignored."""
    random = torch.Generator().manual_seed(1)
    tokens = torch.randint(256, (count,), generator=random)
    logits = model.logits(model(tokens, BatchLayout.packed([count]))).detach()
    t, k = options.get("temperature", 1.0), options.get("top_k", 256)
    row = torch.ones(count)
    p, m = options.get("top_p", 1.0), options.get("min_p", 0.0)
    positions = torch.arange(count)
    args = (row * t, (row * k).long(), row * p, row * m, positions * 0, positions)
    targets = ops.sample(logits, *args)
    targets[::5] = -100
    return tokens, targets


def fp64_logprobs(logits: Tensor, targets: Tensor, options: dict[str, Any]) -> Tensor:
    """The definition, row by row: scale, rank, truncate, normalize."""
    found = []
    for row, target in zip(logits, targets.tolist(), strict=True):
        if target == -100:
            found.append(row.sum() * 0)
            continue
        scaled = row / options.get("temperature", 1.0)
        ranked = scaled.detach().sort(descending=True).indices[: options.get("top_k", 256)]
        p = scaled.detach()[ranked].softmax(0)
        kept = (p.cumsum(0) - p < options.get("top_p", 1.0)) & (p >= options.get("min_p", 0) * p[0])
        found.append(scaled[target] - scaled[ranked[kept]].logsumexp(0))
    return torch.stack(found)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sampled_logprobs_and_gradients_match_float64(
    options: dict[str, Any], dtype: torch.dtype
) -> None:
    model = Decoder.from_config(preset("tiny"), seed=0).to(dtype)
    count = CHUNK + 60  # the rows of two chunks
    tokens, targets = sampled_texts(model, count, **options)
    weights = torch.randn(count, generator=torch.Generator().manual_seed(2))
    found = sampled_logprobs(model, tokens, targets, [count], **options)
    assert torch.equal(found == 0, targets == -100)
    (found * weights).sum().backward()

    hidden = model(tokens, BatchLayout.packed([count])).detach()
    leaves = [hidden.double(), model.lm_head_weight.detach().double()]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    wanted = fp64_logprobs(leaves[0] @ leaves[1].T, targets, options)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)

    # Of the head alone: the same function of the hidden states, as parameters.
    head = FromHidden(hidden, model.lm_head_weight.detach())
    of_head = sampled_logprobs(head, tokens, targets, [count], **options)
    assert torch.equal(of_head, found)
    gradients = torch.autograd.grad(of_head, [head.hidden, head.lm_head_weight], weights)
    exact = torch.autograd.grad(wanted, leaves, weights.double())
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    for gradient, truth in zip(gradients, exact, strict=True):
        assert gradient.dtype == dtype
        assert (gradient.double() - truth).abs().max() <= bound * truth.abs().max()


class FromHidden:
    """A language model whose hidden states are its parameters."""

    def __init__(self, hidden: Tensor, weight: Tensor) -> None:
        self.hidden, self.lm_head_weight = hidden.requires_grad_(), weight.requires_grad_()

    def __call__(self, tokens_T: Tensor, layout: BatchLayout) -> Tensor:
        return self.hidden


def test_sampled_logprobs_take_options_per_token() -> None:
    model = Decoder.from_config(preset("tiny"), seed=0)
    tokens, targets = torch.randint(256, (2, 6))
    t, k = torch.tensor([1.0, 0.7, 1.3] * 2), torch.tensor([256, 256, 256, 9, 9, 9])
    found = sampled_logprobs(model, tokens, targets, [6], temperature=t, top_k=k)
    for row in range(6):
        options: dict[str, Any] = {"temperature": t[row].item(), "top_k": int(k[row])}
        alone = sampled_logprobs(model, tokens, targets, [6], **options)
        assert torch.equal(found[row], alone[row])


def test_a_frozen_head_has_no_gradient() -> None:
    model = Decoder.from_config(preset("tiny"), seed=0)
    hidden = torch.randn(4, 64)
    head = FromHidden(hidden, model.lm_head_weight.detach().clone())
    head.lm_head_weight.requires_grad_(False)
    targets = torch.tensor([1, -100, 3, 4])
    sampled_logprobs(head, targets, targets, [4], temperature=0.7).sum().backward()
    assert head.lm_head_weight.grad is None
    assert torch.equal(hidden.grad.any(1), targets != -100)  # pyright: ignore
    none = torch.full((4,), -100)
    assert not sampled_logprobs(head, targets, none, [4]).any()


def quantized_decoder() -> Decoder:
    model = Decoder.from_config(preset("tiny"), seed=0)
    quantize_(model, lambda name: Int8(group=32))
    return model


LOSSES: dict[str, tuple[Any, Any]] = {
    "losses": (token_losses, lambda logits, t: F.cross_entropy(logits, t, reduction="none")),
    "smooth_z": (
        partial(token_losses, label_smoothing=0.1, z_loss=0.01, grad_output=0.5),
        lambda logits, t: ops.cross_entropy.reference(logits, t, IGNORE_INDEX, 0.1, 0.01),
    ),
    "logprobs": (
        token_logprobs,
        lambda logits, t: -F.cross_entropy(logits, t, reduction="none"),
    ),
    "sampled": (
        partial(sampled_logprobs, temperature=0.7),
        lambda logits, t: -F.cross_entropy(logits / 0.7, t, reduction="none"),
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients_of_a_quantized_head(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are those of all logits at once, and the logits are computed in chunks, twice."""
    loss, definition = LOSSES[name]
    model, count = quantized_decoder(), 2 * CHUNK + 60
    random = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(256, (2, count), generator=random)
    targets[::7] = IGNORE_INDEX
    hidden = model(tokens, BatchLayout.packed([count])).detach().requires_grad_()
    weights = torch.randn(count, generator=random)
    wanted = definition(model.logits(hidden), targets)
    (gradient,) = torch.autograd.grad(wanted, hidden, weights)

    rows: list[int] = []
    logits: Any = model.tok_embed.logits

    def count_rows(hidden_TD: Tensor) -> Tensor:
        rows.append(len(hidden_TD))
        return logits(hidden_TD)

    monkeypatch.setattr(model.tok_embed, "logits", count_rows)
    monkeypatch.setattr(model, "forward", lambda tokens, layout: hidden)
    found = loss(model, tokens, targets, [count])
    torch.testing.assert_close(found, wanted)
    (found_gradient,) = torch.autograd.grad(found, hidden, weights)
    torch.testing.assert_close(found_gradient, gradient)
    assert max(rows) == CHUNK
    computed = int((targets != IGNORE_INDEX).sum()) if name == "sampled" else count
    assert sum(rows) == 2 * computed


def test_selected_rows_of_a_quantized_head_have_the_bits_that_are_served() -> None:
    model, tokens = quantized_decoder(), torch.arange(7)
    targets = torch.tensor([1, 2, 3, IGNORE_INDEX, 5, IGNORE_INDEX, 7])
    rows = (targets != IGNORE_INDEX).nonzero()[:, 0]
    hidden = model(tokens, BatchLayout.packed([7]))
    served = ops.token_logprobs(model.logits(hidden[rows]), targets[rows])
    assert torch.equal(token_logprobs(model, tokens, targets, [7])[rows], served)
    assert torch.equal(-token_losses(model, tokens, targets, [7], target_rows=rows)[rows], served)
    none = token_losses(model, tokens, targets * 0 - 100, [7], target_rows=rows[:0])
    assert none.tolist() == [0.0] * 7


def test_a_quantized_head_gives_the_logprobs_of_its_logits() -> None:
    model = quantized_decoder()
    tokens, targets = torch.arange(7), torch.tensor([1, 2, 3, IGNORE_INDEX, 5, 6, 7])
    found = sampled_logprobs(model, tokens, targets, [7])
    hidden = model(tokens, BatchLayout.packed([7]))
    expected = model.logprobs(hidden, targets.clamp(min=0))
    assert torch.equal(found, expected.masked_fill(targets == IGNORE_INDEX, 0))
