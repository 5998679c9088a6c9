"""The baseline kernels compute correct results in the interpreter."""

from __future__ import annotations

from ingot.kernels.triton.interpreter import Interpreter

CODE = """
import torch
import torch.nn.functional as F
from ingot.kernels.triton.tutorial_kernels import _flash_attention, _matmul

torch.manual_seed(0)
x, weight, y = torch.randn(70, 40), torch.randn(50, 40), torch.empty(70, 50)
sizes = (70, 50, 40, 40, 40, 50)
_matmul[(6,)](x, weight, y, *sizes, GROUP_M=2, BLOCK_M=32, BLOCK_N=32, BLOCK_K=16)
torch.testing.assert_close(y, x @ weight.T)

q, k, v = torch.randn(3, 2, 70, 16)
y = torch.empty(2, 70, 16)
scale = 0.25 * 1.4426950408889634
_flash_attention[(3, 2)](q, k, v, y, 70, scale, BLOCK_D=16, BLOCK_M=32, BLOCK_KV=16)
torch.testing.assert_close(y, F.scaled_dot_product_attention(q, k, v, is_causal=True))
"""


def test_tutorial_kernels_are_correct(interpreter: Interpreter) -> None:
    interpreter.call("run_code", code=CODE, env={})
