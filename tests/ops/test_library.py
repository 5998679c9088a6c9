"""Tests of the registration with `torch.library`: autocast and compilation."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from ingot import ops
from ingot.core.device import detect
from ingot.ops.dispatch import prefer
from ingot.ops.library import invalid_argument


def test_first_call_of_an_op_may_be_compiled() -> None:
    """In a new process: nothing that is made at the first call may need tracing."""
    code = (
        "import torch\n"
        "from ingot import ops\n"
        "f = torch.compile(lambda x: ops.silu(x), fullgraph=True, backend='aot_eager')\n"
        "f(torch.ones(2, 3, requires_grad=True)).sum().backward()\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_autocast_does_not_change_ops() -> None:
    x, weight = torch.randn(2, 4, requires_grad=True), torch.randn(3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        y = ops.linear(x, weight)
        (within,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    (without,) = torch.autograd.grad(y.sum(), x)
    assert y.dtype == torch.float32
    assert torch.equal(within, without)


def test_graph_of_several_ops_compiles_with_inductor() -> None:
    def block(x: Tensor, residual: Tensor, weight: Tensor, norm: Tensor) -> Tensor:
        x, residual = ops.add_rms_norm(x, residual, norm)
        hidden = ops.gated_linear(x, weight, weight)
        return ops.softmax(ops.linear(hidden, weight, residual=residual).relu())

    inputs = [torch.randn(3, 8), torch.randn(3, 8), torch.randn(8, 8), torch.ones(8)]
    ours = [t.clone().requires_grad_() for t in inputs]
    theirs = [t.clone().requires_grad_() for t in inputs]
    block(*ours).square().sum().backward()
    torch.compile(block, fullgraph=True)(*theirs).square().sum().backward()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_only_invalid_arguments_are_recognized() -> None:
    error = RuntimeError("invalid argument: x must be 2D\nException raised from check")
    assert invalid_argument(error) == "x must be 2D"
    assert invalid_argument(RuntimeError("x: invalid argument: ")) is None


@pytest.mark.skipif(detect().compiler is None, reason="no C++ compiler")
@pytest.mark.parametrize("preferred", ["cpu", "aten", "reference"])
def test_calls_that_the_kernels_do_not_support_fall_back(preferred: str) -> None:
    """A float64 argument next to float32 logits: the C++ kernel throws `Unsupported`."""
    logits, option = torch.randn(2, 4), torch.ones(2)
    args = logits, logits > 0, torch.ones(2, 4).double(), option, option, option
    expected = ops.apply_penalties.reference(*args)
    assert torch.equal(ops.apply_penalties(*args), expected)
    with prefer(preferred):
        assert torch.equal(ops.apply_penalties(*args), expected)
