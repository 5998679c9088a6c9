from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ingot import ops


def test_backward_works_below_a_dispatch_mode() -> None:
    x = torch.randn(2, 4, requires_grad=True)
    with FlopCounterMode(display=False):
        ops.silu(x).sum().backward()
    assert x.grad is not None


def test_gradients_of_several_outputs_where_one_is_unused() -> None:
    x, residual = torch.randn(2, 4, requires_grad=True), torch.randn(2, 4, requires_grad=True)
    _, total = ops.add_rms_norm(x, residual, torch.ones(4))
    for grad in torch.autograd.grad(total.sum(), (x, residual)):
        assert torch.equal(grad, torch.ones(2, 4))


@pytest.mark.parametrize(
    "mode", ["torch.autocast('cpu')", "torch.inference_mode()", "FlopCounterMode(display=False)"]
)
def test_ops_may_be_imported_under_any_mode(mode: str) -> None:
    code = (
        "import torch, ingot\n"
        "from torch.utils.flop_counter import FlopCounterMode\n"
        f"with {mode}: ingot.ops\n"
        "x, w = torch.randn(2, 4, requires_grad=True), torch.randn(3, 4)\n"
        "ours, = torch.autograd.grad(ingot.ops.linear(x, w, activation=1).sum(), x)\n"
        "theirs, = torch.autograd.grad(torch.nn.functional.gelu(x @ w.T).sum(), x)\n"
        "torch.testing.assert_close(ours, theirs)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
