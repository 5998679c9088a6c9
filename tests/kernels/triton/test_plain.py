"""What ours are held against has to compute the same: in the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

CODE = """
import torch
import torch.nn.functional as F
from ingot.kernels.triton.plain import _attend, _product

torch.manual_seed(0)
x, weight, y = torch.randn(70, 40), torch.randn(50, 40), torch.empty(70, 50)
sizes = (70, 50, 40, 40, 40, 50)
_product[(6,)](x, weight, y, *sizes, GROUP=2, ROWS=32, COLUMNS=32, INNER=16)
torch.testing.assert_close(y, x @ weight.T)

q, k, v = torch.randn(3, 2, 70, 16)
y = torch.empty(2, 70, 16)
_attend[(3, 2)](q, k, v, y, 70, 0.25 * 1.4426950408889634, WIDTH=16, ROWS=32, KEYS=16)
torch.testing.assert_close(y, F.scaled_dot_product_attention(q, k, v, is_causal=True))
"""


def test_the_plain_kernels_are_right() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", CODE], env=environment, check=True)
