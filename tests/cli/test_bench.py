"""`ingot bench`: arguments that fail before anything is measured."""

from __future__ import annotations

import pytest
import torch

from tests.cli.conftest import Run


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("ops", "rmsnorm"), "did you mean 'rms_norm'?"),
        (("ops", "silu", "--plot", "roofline.jpg"), "got '.jpg'"),
        (("opps",), "opps"),
        (("compare", "there-is-none"), "directory not found: there-is-none"),
        (("compare", ".", "vlm"), "did you mean 'vllm'?"),
        (
            ("compare", ".", "--batch-size", "0"),
            "GenerationTask.batch_size: expected a number from 1 to 1024, got 0",
        ),
    ],
)
def test_invalid_arguments_fail_before_measuring(
    cli: Run, arguments: tuple[str, ...], what: str
) -> None:
    result = cli("bench", *arguments)
    assert result.returncode == 2
    assert what in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_missing_gpu_fails_before_measuring(cli: Run) -> None:
    result = cli("bench", "ops", "silu", "--device", "cuda")
    assert result.returncode == 2
    assert "hint: " in result.stderr
