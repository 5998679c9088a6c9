"""The progress of a training run on the console."""

from __future__ import annotations

import re

import pytest
import torch

from ingot.training.console import ConsoleLogger

METRICS = {"step": 3, "loss": 2.5, "lr": 1e-3, "grad_norm": 0.5, "num_rows": 1000, "seconds": 0.5}


class Bar:
    """A progress bar that keeps its text."""

    text = ""

    def advance(self, n: float = 1) -> None:
        raise NotImplementedError

    def describe(self, text: str) -> None:
        self.text = text


def shown(metrics: dict[str, float], peak_share: float | None = None) -> str:
    bar = Bar()
    console = ConsoleLogger("run", 9, torch.device("cpu"), unit="tokens", peak_share=peak_share)
    console.log(metrics, bar)
    return bar.text


def test_speed_loss_and_memory_are_shown() -> None:
    wanted = r"run loss 2.5  lr 0.001  grad norm 0.5  2,000 tokens/s  \d+\.\d GB"
    assert re.fullmatch(wanted, shown(METRICS))


@pytest.mark.parametrize(("share", "text"), [(1e-4, "20% of peak"), (2.5e-4, "50% of peak")])
def test_the_share_of_the_peak_is_shown_if_it_is_known(share: float, text: str) -> None:
    assert text in shown(METRICS, share)


def test_rewards_are_shown() -> None:
    assert "rewards/margins 0.25" in shown({**METRICS, "rewards/margins": 0.25, "other": 1.0})
