"""The certificate of runs on several ranks, and that it notices differences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ingot.core import config
from ingot.core.errors import ConfigError
from ingot.workflows.verify_ranks import _differences, verify_ranks
from tests.training import runs


def saved(tmp_path: Path, **options: Any) -> Path:
    path = tmp_path / "recipe.toml"
    config.save(runs.text(tmp_path, grad_accum_steps=2, **options), path)
    return path


# torch's elastic agent does not close its log files.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_one_and_two_ranks_are_equal(tmp_path: Path) -> None:
    certificate = verify_ranks(saved(tmp_path), ["seed=5"], ranks=(1, 2), steps=3)
    assert certificate.difference is None
    assert len(certificate.losses) == 3
    assert certificate.tensors > 50


@pytest.mark.parametrize(
    ("ranks", "message"), [((2,), "two numbers"), ((2, 2), "two numbers"), ((1, 4), "4 ranks")]
)
def test_what_cannot_be_compared_is_an_error(
    tmp_path: Path, ranks: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        verify_ranks(saved(tmp_path), ranks=ranks)


LINES = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}]
TENSORS = {"weights/w": torch.tensor([1.0, -0.0])}


@pytest.mark.parametrize(
    ("lines", "tensors", "wanted"),
    [
        (LINES, TENSORS, []),
        ([LINES[0], {"step": 2, "loss": 1.0000000000000002}], TENSORS, ["loss of step 2"]),
        (LINES[:1], TENSORS, ["what was logged and saved"]),
        (LINES, {"weights/w": torch.tensor([1.0, 1e-45])}, ["weights/w"]),
        (LINES, {}, ["what was logged and saved"]),
    ],
)
def test_differences_are_named(lines: Any, tensors: Any, wanted: list[str]) -> None:
    assert _differences((LINES, TENSORS), (lines, tensors)) == wanted
