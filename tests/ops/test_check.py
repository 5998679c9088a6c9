from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ingot import ops


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda x: ops.rms_norm(x, torch.ones(5)), "x has 4 channels, weight is (5,)"),
        (lambda x: ops.rms_norm(x, x), "x has 4 channels, weight is (2, 4)"),
        (lambda x: ops.rms_norm(x, x[0], -1e-5), "eps is -1e-05"),
        (lambda x: ops.add_layer_norm(x, x, x[0], None, torch.nan), "eps is nan"),
        (lambda x: ops.add_rms_norm(x, x[:1], x[0]), "x is (2, 4), residual is (1, 4)"),
        (lambda x: ops.swiglu(x, x.bfloat16()), "gate is torch.float32, up is torch.bfloat16"),
        (lambda x: ops.silu(x.long()), "x is torch.int64"),
        (lambda x: ops.softmax(x, 1.0, x), "mask is torch.float32"),
        (lambda x: ops.softmax(x, 1.0, x[:, :3] > 0), "x is (2, 4), mask is (2, 3)"),
        (lambda x: ops.linear(x, torch.ones(3, 5)), "(out, 4) for x of 4 channels, got (3, 5)"),
        (lambda x: ops.linear(x, x.bfloat16()), "x is torch.float32, weight is torch.bfloat16"),
        (lambda x: ops.linear(x, x, residual=x), "output's shape (2, 2), got (2, 4)"),
        (lambda x: ops.embedding(x, x), "tokens are torch.float32"),
        (lambda x: ops.token_logprobs(x, torch.tensor([1])), "targets torch.int64 (1,)"),
        (lambda x: ops.embedding(x.cfloat(), x), "tokens are torch.complex64"),
        (lambda x: ops.token_logprobs(x.long(), torch.tensor([1, 0])), "rows is torch.int64"),
        (lambda x: ops.cross_entropy(x, x[:, 0].cfloat()), "targets torch.complex64"),
        (lambda x: ops.apply_penalties(x, x > 0, x.cfloat(), *x.T[:3]), "counts torch.complex64"),
        (lambda x: ops.philox_uniform(x.cfloat(), x.long()), "seeds are torch.complex64"),
        (lambda x: ops.sample(x, *[*x.T, *x.T[:2]]), "seeds are torch.float32"),
        (lambda x: ops.rope(x, torch.tensor([0, 1]), x[0]), "x is (2, 4)"),
        (lambda x: ops.rope(x.long()[None], torch.tensor([0]), x[0, :2]), "x is torch.int64"),
        (lambda x: ops.rope(x[None], torch.tensor([0]), x[0, :2].cfloat()), "freqs is torch.comp"),
        (lambda x: ops.rope(x[None], x[:1, 0].cfloat(), x[0, :2]), "positions torch.complex64"),
        (
            lambda x: ops.rope(x[:, None], torch.tensor([0, 1]), x[0, :2].bfloat16()),
            "too coarse for positions above 100",
        ),
        (
            lambda x: ops.attention(x, x, x, torch.tensor([0, 2])),
            "attention: q is (2, 4), k (2, 4)",
        ),
    ],
)
def test_errors_name_the_argument(
    call: Callable[[Tensor], object], complaint: str, compiled: bool
) -> None:
    function = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    with pytest.raises(Exception, match=re.escape(complaint)):
        function(torch.randn(2, 4))
