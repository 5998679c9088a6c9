"""Each pass finds the spellings that models use, and leaves what is only similar."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.fuse.graphs import assert_left, outputs_and_gradients, rewritten

B, L, D, N, H = 2, 5, 16, 4, 4
RANDOM = torch.Generator().manual_seed(1)


def make(*shape: int) -> Tensor:
    return torch.randn(shape, generator=RANDOM)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """As `LlamaRMSNorm` of transformers has it."""
    hidden = x.to(torch.float32)
    variance = hidden.pow(2).mean(-1, keepdim=True)
    return weight * (hidden * torch.rsqrt(variance + 1e-6)).to(x.dtype)


def new_gelu(x: Tensor) -> Tensor:
    """As `NewGELUActivation` of transformers has it."""
    return 0.5 * x * (1.0 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * torch.pow(x, 3.0))))


def conv1d(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """As `Conv1D` of transformers has it."""
    shape = (*x.size()[:-1], weight.shape[1])
    return torch.addmm(bias, x.view(-1, x.size(-1)), weight).view(shape)


def repeat(x: Tensor) -> Tensor:
    b, g, length, h = x.shape
    return x[:, :, None, :, :].expand(b, g, 2, length, h).reshape(b, g * 2, length, h)


def causal_mask(x: Tensor) -> Tensor:
    index = torch.arange(x.shape[2])
    return (index[None, None, None, :] <= index[None, None, :, None]).expand(B, -1, L, L)


X, W, V = make(B, L, D), make(D, D), make(D)
Q, K = make(B, N, L, H), make(B, N // 2, L, H)
FOUND: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...], dict[str, int]]] = {
    "linear": (F.linear, (X, W), {"linear": 1}),
    "bias": (F.linear, (X, W, V), {"linear": 1}),
    "gelu": (lambda x, w, b: F.gelu(F.linear(x, w, b)), (X, W, V), {"linear": 1}),
    "silu": (lambda x, w: F.silu(F.linear(x, w)), (X, W), {"linear": 1}),
    "relu": (lambda x, w: F.linear(x, w).relu(), (X, W), {"linear": 1}),
    "spelled_gelu": (lambda x, w, b: new_gelu(conv1d(x, w, b)), (X, W, V), {"linear": 1}),
    "residual": (lambda x, w, b: x + F.linear(x, w, b), (X, W, V), {"linear": 1}),
    "conv1d_residual": (lambda x, w, b: conv1d(x, w, b) + x, (X, W, V), {"linear": 1}),
    "all_of_it": (lambda x, w, b: x + F.silu(F.linear(x, w, b)), (X, W, V), {"linear": 1}),
    "dropout_off": (
        lambda x, w: x + F.dropout(F.linear(x, w), 0.5, training=False),
        (X, W),
        {"linear": 1},
    ),
    "gated": (
        lambda x, g, u: F.silu(F.linear(x, g)) * F.linear(x, u),
        (X, W, make(D, D)),
        {"linear": 2},
    ),
    "up_first": (
        lambda x, g, u: F.linear(x, u) * F.gelu(F.linear(x, g)),
        (X, W, make(D, D)),
        {"linear": 2},
    ),
    "rms_norm": (rms_norm, (X, V), {"rms_norm": 1}),
    "torch_rms_norm": (lambda x, w: F.rms_norm(x, (D,), w, 1e-6), (X, V), {"rms_norm": 1}),
    "bf16_rms_norm": (rms_norm, (X.bfloat16(), V.bfloat16()), {"rms_norm": 1}),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (D,), w, b), (X, V, V), {"layer_norm": 1}),
    "add_rms_norm": (
        lambda x, y, w: (s := x + y) * rms_norm(s, w),
        (X, make(B, L, D), V),
        {"add_rms_norm": 1},
    ),
    "add_layer_norm": (
        lambda x, y, w: F.layer_norm(x + y, (D,), w),
        (X, make(B, L, D), V),
        {"add_layer_norm": 1},
    ),
    "full_attention": (F.scaled_dot_product_attention, (Q, Q, Q), {"attention": 1}),
    "is_causal": (
        lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True, scale=0.3),
        (Q,),
        {"attention": 1},
    ),
    "causal_mask": (
        lambda q: F.scaled_dot_product_attention(q, q, q, attn_mask=causal_mask(q)),
        (Q,),
        {"attention": 1},
    ),
    "repeated_keys": (
        lambda q, k: F.scaled_dot_product_attention(q, repeat(k), repeat(k), is_causal=True),
        (Q, K),
        {"attention": 1},
    ),
    "embedding": (F.embedding, (torch.tensor([[1, 2], [0, 1]]), W), {"embedding": 1}),
    "padding_row": (
        lambda w: F.embedding(torch.tensor([[1, 2], [0, 1]]), w, padding_idx=1),
        (W,),
        {"embedding": 1},
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_spelling_is_found_and_computes_the_same(name: str) -> None:
    function, args, expected = FOUND[name]
    wide = [arg.double() if arg.is_floating_point() else arg for arg in args]
    truth = outputs_and_gradients(function, *wide)
    compiled, reports = rewritten(function)
    found = outputs_and_gradients(compiled, *args)
    assert [dict(report.kept) for report in reports] == [expected]
    assert not reports[0].dropped
    eps = torch.finfo(args[-1].dtype).eps
    for one, other in zip(found, truth, strict=True):
        assert float((one - other).abs().max()) <= 40 * eps * float(other.abs().max().clamp(min=1))


@pytest.mark.parametrize("name", ["gelu", "silu", "relu", "spelled_gelu", "all_of_it"])
def test_activations_are_in_the_epilogue_in_inference(name: str) -> None:
    function, args, _ = FOUND[name]
    compiled, reports = rewritten(function)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*args), function(*args), atol=1e-5, rtol=1e-5)
    outputs_and_gradients(compiled, *args)
    inference, training = reports
    assert dict(inference.kept) == dict(training.kept) == {"linear": 1}
    assert inference.calls_left < training.calls_left  # where it is not computed again


@pytest.mark.parametrize("name", ["gated", "up_first"])
def test_gated_layers_are_one_call_in_inference(name: str) -> None:
    function, args, _ = FOUND[name]
    compiled, reports = rewritten(function)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*args), function(*args), atol=1e-5, rtol=1e-5)
    assert dict(reports[0].kept) == {"gated_linear": 1}


TARGETS = torch.tensor([1, 3, -100, 0, 15, 2, 2, -100, 7, 9])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "sum"},
        {"reduction": "none"},
        {"label_smoothing": 0.1},
        {"ignore_index": 2},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy_as_transformers_calls_it(dtype: torch.dtype, options: Any) -> None:
    targets = TARGETS.clamp(min=0) if "ignore_index" in options else TARGETS

    def function(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.float().view(-1, D), targets, **options)

    def wide(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.view(-1, D), targets, **options)

    x = X.to(dtype)
    compiled, reports = rewritten(function)
    with torch.no_grad():
        found = compiled(x)
    assert dict(reports[0].kept) == {"cross_entropy": 1}
    torch.testing.assert_close(found.double(), wide(x.double()), atol=1e-5, rtol=1e-5)


def test_cross_entropy_in_training() -> None:
    def function(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.view(-1, D), TARGETS)

    compiled, reports = rewritten(function)
    expected = outputs_and_gradients(function, X)
    for one, other in zip(outputs_and_gradients(compiled, X), expected, strict=True):
        torch.testing.assert_close(one, other)
    assert dict(reports[0].kept) == {"cross_entropy": 1}


@pytest.mark.parametrize("shape", [(10, D), (B, L, D)])
def test_the_head_joins_the_loss(shape: tuple[int, ...]) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, w).float().view(-1, D), TARGETS)

    args = X.view(shape), W
    compiled, reports = rewritten(function)
    found = outputs_and_gradients(compiled, *args)
    for one, other in zip(found, outputs_and_gradients(function, *args), strict=True):
        torch.testing.assert_close(one, other)
    assert dict(reports[0].kept) == {"linear_cross_entropy": 1}


def test_a_head_whose_logits_are_needed_does_not() -> None:
    def function(x: Tensor, w: Tensor) -> Any:
        logits = F.linear(x, w)
        return F.cross_entropy(logits.view(-1, D), TARGETS) + logits.sum()

    compiled, reports = rewritten(function)
    torch.testing.assert_close(compiled(X, W), function(X, W))
    assert dict(reports[0].kept) == {"linear": 1, "cross_entropy": 1}


ROWS, EXPERTS = make(8, D).bfloat16(), make(3, 2 * D, D).bfloat16()


@pytest.mark.parametrize("last", [8, 6])
def test_experts_are_a_grouped_linear(last: int) -> None:
    """Rows after the last end belong to no expert: their results are not defined."""
    x, w = ROWS, EXPERTS
    ends = torch.tensor([3, 3, last], dtype=torch.int32)

    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.grouped_mm(x, w.transpose(-2, -1), offs=ends)[:6]

    compiled, reports = rewritten(function)
    truth = torch.cat([x[:3].double() @ w[0].double().T, x[3:6].double() @ w[2].double().T])
    torch.testing.assert_close(compiled(x, w).double(), truth, atol=0.05, rtol=0.02)
    if last == 8:
        assert dict(reports[0].kept) == {"grouped_linear": 1}
        found, expected = (outputs_and_gradients(f, x, w) for f in (compiled, function))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, atol=0.1, rtol=0.02)


def test_weights_of_classes_are_left() -> None:
    compiled, reports = rewritten(lambda x, w: F.cross_entropy(x, TARGETS, w))
    x, w = torch.randn(10, 16), torch.rand(16)
    torch.testing.assert_close(compiled(x, w), F.cross_entropy(x, TARGETS, w))
    assert not reports[0].kept


def padded(q: Tensor, tokens: Tensor, causal: bool) -> Tensor:
    index = torch.arange(L)
    mask = tokens[torch.arange(B)[:, None, None, None], index[None, None, None, :]]
    if causal:
        mask = mask & (index[None, None, None, :] <= index[None, None, :, None])
    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "row", [[1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [1, 0, 1, 1, 0], [0] * 5, [1] * 5]
)
def test_a_padded_batch_is_packed(row: list[int], causal: bool) -> None:
    tokens = torch.tensor([row, [1, 1, 1, 1, 0]]).bool()

    def function(q: Tensor) -> Tensor:
        return padded(q, tokens, causal)

    truth = outputs_and_gradients(function, Q.double())
    compiled, reports = rewritten(function)
    for one, other in zip(outputs_and_gradients(compiled, Q), truth, strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-5, rtol=1e-5)
    assert dict(reports[0].kept) == {"padded_attention": 1}


LEFT: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "two_dims": (lambda x: F.layer_norm(x, (L, D), torch.ones(L, D)), (X,)),
    "no_weight": (lambda x: F.layer_norm(x, (D,)), (X,)),
    "mean_over_rows": (
        lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + 1e-6)),
        (X, V),
    ),
    "cube": (lambda x, w: w * (x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + 1e-6)), (X, V)),
    "mean_of_another": (
        lambda x, y, w: w * (x * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)),
        (X, make(B, L, D), V),
    ),
    "scale_per_row": (
        lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)),
        (X, make(L, 1)),
    ),
    "float_weight": (
        lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)),
        (X.bfloat16(), V),
    ),
    "strict_mask": (
        lambda q: F.scaled_dot_product_attention(
            q, q, q, attn_mask=(torch.arange(L)[None, :] <= torch.arange(L)[:, None] + 1)
        ),
        (Q,),
    ),
    "added_mask": (
        lambda q, m: F.scaled_dot_product_attention(q, q, q, attn_mask=m),
        (Q, make(L, L)),
    ),
    "fewer_queries": (
        lambda q: F.scaled_dot_product_attention(q[:, :, :3], q, q, is_causal=True),
        (Q,),
    ),
    "narrow_values": (lambda q: F.scaled_dot_product_attention(q, q, q[..., :2]), (Q,)),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_only_similar_is_left(name: str) -> None:
    function, args = LEFT[name]
    assert_left(function, *args)


def test_a_broadcast_residual_is_not_in_the_epilogue() -> None:
    compiled, reports = rewritten(lambda x, w, b: F.linear(x, w) + b)
    torch.testing.assert_close(compiled(X, W, V), F.linear(X, W) + V)
    assert dict(reports[0].kept) == {"linear": 1}
    assert "add" not in str(reports[0].rows[0])


def test_a_linear_that_is_used_twice_is_computed_once() -> None:
    def function(x: Tensor, w: Tensor) -> Any:
        y = F.linear(x, w)
        return F.gelu(y) + y.sum()

    compiled, reports = rewritten(function)
    torch.testing.assert_close(compiled(X, W), function(X, W), atol=1e-4, rtol=1e-4)
    assert dict(reports[0].kept) == {"linear": 1}


def test_values_that_are_mutated_are_left() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = F.linear(x, w)
        y.add_(1)
        return y * 2

    compiled, reports = rewritten(function)
    torch.testing.assert_close(compiled(X, W), function(X, W))
    assert not reports[0].kept


def test_a_matmul_without_gradient_does_not_join_one_with() -> None:
    def function(x: Tensor, g: Tensor, u: Tensor) -> Tensor:
        with torch.no_grad():
            gate = F.silu(F.linear(x, g))
        return gate * F.linear(x, u)

    args = X, W, make(D, D)
    expected = outputs_and_gradients(function, *args)
    compiled, reports = rewritten(function)
    for one, other in zip(outputs_and_gradients(compiled, *args), expected, strict=True):
        torch.testing.assert_close(one, other)
    assert "gated_linear" not in reports[0].kept


def vector(x: Tensor, end: float) -> Tensor:
    return torch.linspace(1, end, 5, dtype=x.dtype)


IMAGES, KERNELS = make(2, 6, 9, 8), make(5, 6, 3, 3)
SIGNAL, TAPS = make(2, 6, 11), make(5, 6, 3)
CONVOLUTIONS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "plain": (F.conv2d, (IMAGES, KERNELS, make(5))),
    "pointwise": (F.conv2d, (IMAGES, KERNELS[:, :, :1, :1])),
    "options": (
        lambda x, w: F.conv2d(x, w, stride=(1, 2), padding=(3, 1), dilation=(2, 1)),
        (IMAGES, KERNELS),
    ),
    "one_dimension": (lambda x, w: F.gelu(F.conv1d(x, w, stride=2, padding=1)), (SIGNAL, TAPS)),
    "bias_and_relu": (
        lambda x, w, b: F.relu(F.conv2d(x, w, b, padding=1)),
        (IMAGES, KERNELS, make(5)),
    ),
    "before_batch_norm": (
        lambda x, w: F.batch_norm(F.conv2d(x, w), vector(x, -1), vector(x, 2)),
        (IMAGES, KERNELS),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_is_a_linear_layer_of_patches(name: str, dtype: torch.dtype) -> None:
    function, args = CONVOLUTIONS[name]
    args = tuple(arg.to(dtype) for arg in args)
    compiled, reports = rewritten(function)
    with torch.no_grad():
        found = compiled(*args)
    assert [dict(report.kept) for report in reports] == [{"conv": 1}]
    truth = function(*(arg.double() for arg in args))
    assert found.shape == truth.shape
    error = (found.double() - truth).abs().max()
    assert float(error) <= 8 * torch.finfo(dtype).eps * float(truth.abs().max())


NOT_CONVOLVED: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "groups": (lambda x, w: F.conv2d(x, w, groups=2), (IMAGES, KERNELS[:4, :3])),
    "same": (lambda x, w: F.conv2d(x, w, padding="same"), (IMAGES, KERNELS)),
    "one_image": (F.conv2d, (IMAGES[0], KERNELS)),
    "transposed": (F.conv_transpose2d, (IMAGES, KERNELS.transpose(0, 1).contiguous())),
}


@pytest.mark.parametrize("name", NOT_CONVOLVED)
def test_other_convolutions_are_left(name: str) -> None:
    function, args = NOT_CONVOLVED[name]
    compiled, reports = rewritten(function)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*args), function(*args))
    assert not reports[0].kept


def test_batch_statistics_are_left_and_updated() -> None:
    def function(x: Tensor, w: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        return F.batch_norm(F.conv2d(x, w), mean, variance, training=True)

    compiled, reports = rewritten(function)
    found, expected = (torch.zeros(5), torch.ones(5)), (torch.zeros(5), torch.ones(5))
    with torch.no_grad():
        out = compiled(IMAGES, KERNELS, *found)
        torch.testing.assert_close(out, function(IMAGES, KERNELS, *expected), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found, expected)
    assert not reports[0].kept


def test_convolutions_in_training_are_left() -> None:
    compiled, reports = rewritten(F.conv2d)
    expected = outputs_and_gradients(F.conv2d, IMAGES, KERNELS)
    for one, other in zip(outputs_and_gradients(compiled, IMAGES, KERNELS), expected, strict=True):
        torch.testing.assert_close(one, other)
    assert not reports[0].kept


def test_a_padded_convolution_keeps_dynamic_sizes() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.gelu(F.conv1d(x, w, padding=1))

    compiled, reports = rewritten(function)
    random = torch.Generator().manual_seed(0)
    w = torch.randn(8, 4, 3, generator=random)
    with torch.no_grad():
        for batch in (3, 5, 7):
            x = torch.randn(batch, 4, 20, generator=random)
            torch._dynamo.maybe_mark_dynamic(x, 0)
            torch.testing.assert_close(compiled(x, w), function(x, w), atol=1e-5, rtol=1e-5)
    assert [dict(report.kept) for report in reports] == [{"conv": 1}]
