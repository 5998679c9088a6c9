"""Generated functions, made of what the passes look for and of what only resembles it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.fuse.graphs import outputs_and_gradients, rewritten
from tests.fuse.test_passes import conv1d, new_gelu, rms_norm

B, L, D, HEADS = 2, 5, 8, 2
Step = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""From the hidden states, an earlier value, a matrix and a vector."""


def heads(x: Tensor) -> Tensor:
    return x.view(B, L, HEADS, -1).transpose(1, 2)


def attend(x: Tensor, mask: Tensor | None = None, **options: object) -> Tensor:
    q, k = heads(x), heads(x.flip(-1))
    y = F.scaled_dot_product_attention(q, k, q, attn_mask=mask, **options)  # type: ignore[arg-type]
    return y.transpose(1, 2).reshape(B, L, D)


def write_out(x: Tensor, diagonal: int | None = None) -> Tensor:
    """Attend without PyTorch's function, perhaps without the keys from a diagonal on."""
    q, k = heads(x), heads(x.flip(-1))
    scores = q @ k.transpose(-2, -1) / 2
    if diagonal is not None:
        hidden = torch.ones(L, L).triu(diagonal) > 0
        scores = scores.masked_fill(hidden, -1e9)
    return (scores.softmax(-1) @ q).transpose(1, 2).reshape(B, L, D)


def rows_and_columns() -> tuple[Tensor, Tensor]:
    index = torch.arange(L)
    return index[None, None, :, None], index[None, None, None, :]


def causal(shift: int) -> Tensor:
    rows, columns = rows_and_columns()
    return columns <= rows + shift


def in_place(x: Tensor, w: Tensor) -> Tensor:
    y = F.linear(x, w)
    y.mul_(0.5)
    return y


def only_forward(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        y = F.linear(x, w)
    return F.silu(y) * F.linear(x, w)


STEPS: dict[str, Step] = {
    "linear": lambda x, y, w, v: F.linear(x, w),
    "bias": lambda x, y, w, v: F.linear(x, w, v),
    "conv1d": lambda x, y, w, v: conv1d(x, w, v),
    "gelu": lambda x, y, w, v: F.gelu(F.linear(x, w, v)),
    "new_gelu": lambda x, y, w, v: new_gelu(F.linear(x, w)),
    "gated": lambda x, y, w, v: F.silu(F.linear(x, w)) * F.linear(x, w.flip(0)),
    "residual": lambda x, y, w, v: y + F.linear(x, w, v),
    "residual_of_input": lambda x, y, w, v: F.gelu(F.linear(x, w)) + x,
    "rms_norm": lambda x, y, w, v: rms_norm(x, v),
    "add_rms_norm": lambda x, y, w, v: (s := x + y) + rms_norm(s, v),
    "layer_norm": lambda x, y, w, v: F.layer_norm(x, (D,), v, v),
    "add_layer_norm": lambda x, y, w, v: F.layer_norm(x + y, (D,), v),
    "attention": lambda x, y, w, v: attend(x),
    "is_causal": lambda x, y, w, v: attend(x, is_causal=True, scale=0.4),
    "causal_mask": lambda x, y, w, v: attend(x, causal(0)),
    "written_out": lambda x, y, w, v: write_out(x),
    "written_out_causal": lambda x, y, w, v: write_out(x, 1),
    # Near-misses:
    "written_out_wide": lambda x, y, w, v: write_out(x, 2),
    "written_out_narrow": lambda x, y, w, v: write_out(x, 0),
    "wide_mask": lambda x, y, w, v: attend(x, causal(1)),
    "narrow_mask": lambda x, y, w, v: attend(x, causal(-1)),
    "added_mask": lambda x, y, w, v: attend(x, F.linear(x, w)[:, None, :, :L]),
    "broadcast_residual": lambda x, y, w, v: F.linear(x, w) + v,
    "twice": lambda x, y, w, v: (z := F.linear(x, w)) * F.gelu(z),
    "nearly_gelu": lambda x, y, w, v: 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.0447 * x**3))),
    "norm_of_rows": lambda x, y, w, v: v * (x * torch.rsqrt(x.pow(2).mean(-2, True) + 1e-6)),
    "norm_of_another": lambda x, y, w, v: v * (x * torch.rsqrt(y.pow(2).mean(-1, True) + 1e-6)),
    "norm_of_two": lambda x, y, w, v: F.layer_norm(x, (L, D)),
    "in_place": lambda x, y, w, v: in_place(x, w),
    "only_forward": lambda x, y, w, v: only_forward(x, w),
    "subtracted": lambda x, y, w, v: y - F.linear(x, w),
    "scaled_residual": lambda x, y, w, v: torch.add(y, F.linear(x, w), alpha=0.5),
    "transposed_weight": lambda x, y, w, v: torch.matmul(x, w),
    "detached": lambda x, y, w, v: x.detach() + F.linear(x, w),
}


def check(names: list[str], back: list[int]) -> None:
    """Compare a function of these steps with float64, and let no proof fail."""

    def function(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        values = [x]
        for name, distance in zip(names, back, strict=True):
            earlier = values[-1 - distance % len(values)]
            values.append(STEPS[name](values[-1], earlier, w, v))
        return values[-1] + values[len(values) // 2]

    torch.manual_seed(len(names))
    args = torch.randn(B, L, D), torch.randn(D, D) * D**-0.5, torch.rand(D) + 0.5
    truth = outputs_and_gradients(function, *(arg.double() for arg in args))
    plain = outputs_and_gradients(function, *args)
    compiled, reports = rewritten(function)
    found = outputs_and_gradients(compiled, *args)
    assert not any(report.dropped for report in reports), reports
    for result, eager, expected in zip(found, plain, truth, strict=True):
        scale = float(expected.abs().max())
        error, allowed = (float((t - expected).abs().max()) for t in (result, eager))
        assert error <= 8 * allowed + 1e-5 * scale, (names, back)


FUNCTIONS = st.lists(
    st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 3)), min_size=1, max_size=6
)
QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True}


@settings(max_examples=8, **QUIET)  # type: ignore[arg-type]
@given(FUNCTIONS)
def test_a_sample_of_functions_keeps_its_results(steps: list[tuple[str, int]]) -> None:
    check([name for name, _ in steps], [back for _, back in steps])


@pytest.mark.slow
@settings(max_examples=200, **QUIET)  # type: ignore[arg-type]
@given(FUNCTIONS)
def test_many_functions_keep_their_results(steps: list[tuple[str, int]]) -> None:
    check([name for name, _ in steps], [back for _, back in steps])


@pytest.mark.parametrize("name", STEPS)
def test_each_step_alone_keeps_its_result(name: str) -> None:
    check([name, name], [0, 1])
