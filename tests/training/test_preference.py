"""DPO's losses: against their equations in float64, and against TRL's values."""

from __future__ import annotations

import math
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ingot.core.errors import ConfigError
from ingot.data import PairBatch
from ingot.nn import Decoder, preset
from ingot.training import preference
from ingot.training.objective import DPOConfig, PreferenceLoss
from ingot.training.preference import DPO, AnswerPairs, pair_losses

LOSSES: tuple[PreferenceLoss, ...] = get_args(PreferenceLoss)
NUM_CHOSEN, NUM_REJECTED = [4, 4, 4], [6, 3, 5]
# Of TRL 1.16.0: DPOTrainer._compute_loss with beta 0.1 and the log-probabilities of `answers`. The
# loss, and its gradient with respect to a log-probability of each answer, chosen ones first.
TRL: dict[str, tuple[float, list[float]]] = {
    "sigmoid": (
        0.7382194399833679,
        [-0.018327800557017326, -0.016916649416089058, -0.016916649416089058,
         0.018327800557017326, 0.016916649416089058, 0.016916649416089058],
    ),
    "ipo": (
        26.975114822387695,
        [-0.8972222208976746, -0.8611111044883728, -0.8375000357627869,
         0.5981481671333313, 1.1481481790542603, 0.6700000166893005],
    ),
    "hinge": (
        1.0866667032241821,
        [-0.03333333507180214, -0.03333333507180214, -0.03333333507180214,
         0.03333333507180214, 0.03333333507180214, 0.03333333507180214],
    ),
    "sigmoid_norm": (
        0.7028035521507263,
        [-0.004246518015861511, -0.004201387986540794, -0.0041718753054738045,
         0.002831012010574341, 0.005601850803941488, 0.003337500151246786],
    ),
    "sigmoid + 0.5 sft": (
        1.0423860549926758,
        [-0.05999446660280228, -0.05858331918716431, -0.05858331918716431,
         0.018327800557017326, 0.016916649416089058, 0.016916649416089058],
    ),
}  # fmt: skip
TRL_METRICS = {
    "rewards/chosen": 0.030000006780028343,
    "rewards/rejected": 0.11666667461395264,
    "rewards/accuracies": 0.0,
    "rewards/margins": -0.08666667342185974,
    "logps/chosen": -2.433333396911621,
    "logps/rejected": -2.5333335399627686,
}


def answers(a: int, b: int, modulus: int) -> list[Tensor]:
    """Return log-probabilities of three chosen, then three rejected answers."""
    return [
        torch.tensor([-0.1 * (1 + (a * row + b * t) % modulus) for t in range(count)])
        for row, count in enumerate(NUM_CHOSEN + NUM_REJECTED)
    ]


def in_pairs(parts: list[Tensor]) -> list[Tensor]:
    return [part for pair in zip(parts[:3], parts[3:], strict=True) for part in pair]


def batch(reference: Tensor) -> PairBatch:
    counts = [count for pair in zip(NUM_CHOSEN, NUM_REJECTED, strict=True) for count in pair]
    nothing = torch.zeros(0, dtype=torch.int64)
    lengths = [count + 1 for count in counts]
    return PairBatch(nothing, nothing, lengths, [0, 1, 2], nothing, counts, reference)


@pytest.mark.parametrize("name", TRL)
def test_losses_gradients_and_metrics_are_those_of_trl(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss, _, sft = name.partition(" + ")
    config = DPOConfig(loss=loss, sft_weight=0.5 if sft else 0.0)  # pyright: ignore
    parts = [part.requires_grad_() for part in answers(7, 3, 11)]
    logprobs, reference = torch.cat(in_pairs(parts)), torch.cat(in_pairs(answers(5, 2, 13)))
    monkeypatch.setattr(preference, "target_logprobs", lambda model, batch: logprobs)
    found = DPO(config=config).losses(
        torch.nn.Identity(), batch(reference), step=0, index=0, grad_output=1.0
    )
    mean = found.losses.mean()
    mean.backward()
    wanted, gradients = TRL[name]
    assert mean.item() == pytest.approx(wanted, rel=1e-6)
    for part, gradient in zip(parts, gradients, strict=True):
        assert part.grad is not None
        torch.testing.assert_close(part.grad, torch.full_like(part, gradient), rtol=2e-6, atol=0)
    means = {name: total.item() / 3 for name, total in found.metric_sums.items()}
    assert means == pytest.approx(TRL_METRICS, rel=1e-6)


def equation(loss: str, beta: float, chosen: float, rejected: float, c: int, r: int) -> float:
    """The losses as their papers write them, in float64."""
    if loss in ("ipo", "sigmoid_norm"):
        chosen, rejected = chosen / c, rejected / r
    x = beta * (chosen - rejected)
    match loss:
        case "hinge":
            return max(0.0, 1 - x)
        case "ipo":
            return ((chosen - rejected) - 1 / (2 * beta)) ** 2
        case _:
            return math.log1p(math.exp(-abs(x))) + max(-x, 0.0)


def slope(loss: str, beta: float, chosen: float, rejected: float, c: int, r: int) -> float:
    """Derivative with respect to the chosen log-ratio."""
    scale = 1 / c if loss in ("ipo", "sigmoid_norm") else 1.0
    if loss in ("ipo", "sigmoid_norm"):
        chosen, rejected = chosen / c, rejected / r
    x = beta * (chosen - rejected)
    match loss:
        case "hinge":
            return -beta if x < 1 else 0.0
        case "ipo":
            return 2 * scale * ((chosen - rejected) - 1 / (2 * beta))
        case _:
            return -beta * scale / (1 + math.exp(x))


@pytest.mark.parametrize("loss", LOSSES)
@given(
    beta=st.floats(0.01, 2.0),
    chosen=st.floats(-30, 30, width=32),
    rejected=st.floats(-30, 30, width=32),
    lengths=st.tuples(st.integers(1, 50), st.integers(1, 50)),
)
def test_losses_and_gradients_follow_their_equations(
    loss: PreferenceLoss, beta: float, chosen: float, rejected: float, lengths: tuple[int, int]
) -> None:
    leaf = torch.tensor([chosen], requires_grad=True)
    counts = [torch.tensor([length]) for length in lengths]
    found = pair_losses(AnswerPairs(leaf, torch.tensor([rejected]), *counts), loss, beta)
    found.backward()
    args = (loss, beta, chosen, rejected, *lengths)
    assert found.item() == pytest.approx(equation(*args), rel=2e-5, abs=1e-5)
    assert leaf.grad is not None
    if loss == "hinge" and abs(beta * (chosen - rejected) - 1) < 1e-5:
        return  # the kink
    assert leaf.grad.item() == pytest.approx(slope(*args), rel=2e-5, abs=1e-5 * max(1, beta))


@pytest.mark.parametrize("count", [1, 3, 7])
def test_the_first_loss_is_log_2_exactly(count: int) -> None:
    model = Decoder.from_config(preset("tiny"), seed=0)
    tokens = torch.randint(256, (5 * 2 * count,), generator=torch.Generator().manual_seed(0))
    rows = torch.arange(len(tokens))[torch.arange(len(tokens)) % 5 < 4]
    given = PairBatch(tokens, tokens.roll(-1), [5] * 2 * count, list(range(count)), rows,
                      [4] * 2 * count)  # fmt: skip
    with torch.no_grad():
        reference = preference.target_logprobs(model, given)
    given = PairBatch(given.tokens, given.targets, given.lengths, given.sample_ids, rows,
                      given.num_targets, reference)  # fmt: skip
    found = DPO(config=DPOConfig()).losses(model, given, step=0, index=0, grad_output=1.0)
    assert found.losses.sum().item() / count == float(np.float32(math.log(2)))
    assert found.metric_sums["rewards/margins"] == 0
    for loss, wanted in (("hinge", 1.0), ("ipo", 25.0), ("sigmoid_norm", np.float32(math.log(2)))):
        config = DPOConfig(loss=loss)  # pyright: ignore
        output = DPO(config=config).losses(model, given, step=0, index=0, grad_output=1.0)
        assert output.losses.sum().item() / count == wanted


@pytest.mark.parametrize("wrong", [{"beta": 0.0}, {"beta": float("nan")}, {"sft_weight": -1.0}])
def test_numbers_are_bounded(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        DPOConfig(**wrong)
