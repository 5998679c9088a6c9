"""The proof finds rewrites that are wrong, in the forward or only in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ingot import ops
from ingot.fuse import proof
from ingot.fuse.builder import Builder
from ingot.fuse.passes import PASSES, Rewrite
from ingot.fuse.pattern import Arg, Call, Match
from ingot.fuse.proof import worst_error
from ingot.fuse.rewrite import Applied
from tests.fuse.graphs import outputs_and_gradients, rewritten
from tests.fuse.test_passes import make

B, L, D, N, H = 2, 6, 16, 4, 4
X, Y, W, U, V, Z = (make(*s) for s in ((B, L, D),) * 2 + ((D, D),) * 2 + ((D,),) * 2)
Q, K, KV = make(B, N, L, H), make(B, N, L, H), make(B, N, L, H)
TOKENS = torch.tensor([[1, 2, 0], [3, 3, 1]])
ENDS = torch.tensor([2, 2, L], dtype=torch.int32)
Fault = Callable[[Builder, Match], tuple[fx.Node, ...]]


def changed(name: str, **args: Any) -> Fault:
    """Build a pass as it is, with other arguments."""
    build = next(p for p in PASSES if p.name == name).build

    def fault(b: Builder, m: Match) -> tuple[fx.Node, ...]:
        values = {
            key: m[value[1:]] if isinstance(value, str) else value for key, value in args.items()
        }
        return build(b, replace(m, args={**m.args, **values}))

    return fault


def through(name: str, method: str, *args: Any) -> Fault:
    """Apply a method of tensors to the result of a pass."""
    build = next(p for p in PASSES if p.name == name).build

    def fault(b: Builder, m: Match) -> tuple[fx.Node, ...]:
        return b.method(method, build(b, m)[0], *args), *build(b, m)[1:]

    return fault


def without_gradient_of(name: str, arg: str) -> Fault:
    build = next(p for p in PASSES if p.name == name).build

    def fault(b: Builder, m: Match) -> tuple[fx.Node, ...]:
        detached = b.method("detach", m[arg])
        return build(b, replace(m, args={**m.args, arg: detached}))

    return fault


def sum_is_not_returned(b: Builder, m: Match) -> tuple[fx.Node, ...]:
    both = b.op(ops.add_layer_norm, m["x"], m["residual"], m["weight"], m["bias"], m["eps"])
    return b.item(both, 0), b.method("clone", m["x"])


def heads_in_another_order(b: Builder, m: Match) -> tuple[fx.Node, ...]:
    (out,) = next(p for p in PASSES if p.name == "attention").build(b, m)
    return (b.method("flip", out, 1),)


def linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return x + F.linear(x, w, b)


def activated(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return x + F.gelu(F.linear(x, w, b))


def gated(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
    return F.silu(F.linear(x, w)) * F.linear(x, u)


def norm(x: Tensor, y: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(s := x + y, (D,), w, b, 0.1) + s


def rms(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, (D,), w, 0.1)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)


def write_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1) / 2.0
    return scores.masked_fill(torch.ones(L, L).triu(1) > 0, -1e9).softmax(-1) @ v


def head(x: Tensor, w: Tensor) -> Tensor:
    targets = torch.arange(B * L)
    return F.cross_entropy(F.linear(x, w).view(-1, D), targets, ignore_index=3, label_smoothing=0.1)


def embed(w: Tensor) -> Tensor:
    return F.embedding(TOKENS, w)


ATTENTION, LINEAR, GATED = (Q, K, KV), (X, W, V), (X, W, U)
FAULTS: dict[str, tuple[str, Fault, Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "no bias": ("linear", changed("linear", bias=None), linear, LINEAR),
    "no residual": ("linear", changed("linear", residual=None), linear, LINEAR),
    "transposed weight": ("linear", changed("linear", weight_t="=weight"), linear, LINEAR),
    "rounded": ("linear", through("linear", "mul", 1.0001), linear, LINEAR),
    "residual without gradient": (
        "linear",
        without_gradient_of("linear", "residual"),
        linear,
        LINEAR,
    ),
    "weight without gradient": ("linear", without_gradient_of("linear", "weight"), linear, LINEAR),
    "bias without gradient": ("linear", without_gradient_of("linear", "bias"), linear, LINEAR),
    "another eps": ("rms_norm", changed("rms_norm", eps=0.2), rms, (X, V)),
    "no bias of the norm": (
        "add_layer_norm",
        changed("add_layer_norm", bias="=weight"),
        norm,
        (X, Y, V, Z),
    ),
    "the sum is not returned": ("add_layer_norm", sum_is_not_returned, norm, (X, Y, V, Z)),
    "not causal": (
        "attention",
        changed("attention", is_causal=False, causal=False),
        attend,
        ATTENTION,
    ),
    "another scale": ("attention", changed("attention", scale=None), attend, ATTENTION),
    "keys and values exchanged": (
        "attention",
        changed("attention", k="=v", v="=k"),
        attend,
        ATTENTION,
    ),
    "heads in another order": ("attention", heads_in_another_order, attend, ATTENTION),
    "values without gradient": (
        "attention",
        without_gradient_of("attention", "v"),
        attend,
        ATTENTION,
    ),
    "a mask is forgotten": (
        "written_out_attention",
        changed("written_out_attention", causal=False),
        write_out,
        ATTENTION,
    ),
    "another divisor": (
        "written_out_attention",
        changed("written_out_attention", divisor=2.5),
        write_out,
        ATTENTION,
    ),
    "no smoothing": (
        "linear_cross_entropy",
        changed("linear_cross_entropy", label_smoothing=0.0),
        head,
        (X, W),
    ),
    "ignored targets count": (
        "linear_cross_entropy",
        changed("linear_cross_entropy", ignore_index=-100),
        head,
        (X, W),
    ),
    "another expert": (
        "grouped_linear",
        through("grouped_linear", "roll", 1, 0),
        lambda x, w: F.grouped_mm(x, w.transpose(-2, -1), offs=ENDS),
        (X[0].bfloat16(), make(3, D, D).bfloat16()),
    ),
    "another table": ("embedding", through("embedding", "roll", 1, 0), embed, (W,)),
}


def check_fault(name: str, fault: Fault, run: Callable[[Any], list[Tensor]], function: Any) -> None:
    """Check that a pass is kept, and undone with the fault; `run` returns what it computes."""
    right = next(p for p in PASSES if p.name == name)
    wrong: Rewrite = replace(right, build=fault)

    compiled, reports = rewritten(function, [right])
    run(compiled)
    assert dict(reports[0].kept) == {name: 1}

    compiled, reports = rewritten(function, [wrong])
    found = run(compiled)
    (row,) = reports[0].dropped
    assert row.name == name
    assert row.error is not None
    assert row.error > 1
    assert not reports[0].kept
    for one, other in zip(found, run(function), strict=True):
        torch.testing.assert_close(one, other)  # computed by the calls that were put back


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_rewrite_is_undone_and_named(name: str) -> None:
    target, fault, function, args = FAULTS[name]
    check_fault(target, fault, lambda call: outputs_and_gradients(call, *args), function)


def test_equal_layers_are_proved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def layers(x: Tensor, w: Tensor, u: Tensor, v: Tensor) -> Tensor:
        for weight in (w, u):
            x = F.layer_norm(x + F.gelu(F.linear(x, weight, v)), (D,), v)
        return F.linear(x, w)

    count: list[str] = []

    def counted(applied: Applied, values: Any, needs: Any) -> float:
        count.append(applied.rewrite.name)
        return worst_error(applied, values, needs)

    monkeypatch.setattr(proof, "worst_error", counted)
    compiled, reports = rewritten(layers)
    with torch.no_grad():
        torch.testing.assert_close(compiled(X, W, U, V), layers(X, W, U, V), atol=1e-4, rtol=1e-4)
    assert dict(reports[0].kept) == {"linear": 3, "layer_norm": 2}
    assert sorted(count) == ["layer_norm", "linear", "linear"]


def conv(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.silu(F.conv2d(x, w, b, stride=(1, 2), padding=(0, 1)))


def rows_flipped(b: Builder, m: Match) -> tuple[fx.Node, ...]:
    (out,) = next(p for p in PASSES if p.name == "conv").build(b, m)
    return (b.method("flip", out, 2),)


def kernel_transposed(b: Builder, m: Match) -> tuple[fx.Node, ...]:
    turned = b.method("transpose", m["weight"], 2, 3)
    return next(p for p in PASSES if p.name == "conv").build(
        b, replace(m, args={**m.args, "weight": turned})
    )


CONV = make(2, 4, 6, 7), make(3, 4, 3, 3), make(3)
# Of passes that are not made in training.
INFERENCE_FAULTS: dict[str, tuple[str, Fault, Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "another activation": ("linear", changed("linear", activation=2), activated, LINEAR),
    "no activation": ("linear", changed("linear", activation=0), activated, LINEAR),
    "gate and up exchanged": (
        "gated_linear",
        changed("gated_linear", gate_weight="=up_weight", up_weight="=gate_weight"),
        gated,
        GATED,
    ),
    "conv without bias": ("conv", changed("conv", bias=None), conv, CONV),
    "conv with another activation": ("conv", changed("conv", activation=2), conv, CONV),
    "rows flipped": ("conv", rows_flipped, conv, CONV),
    "kernel transposed": ("conv", kernel_transposed, conv, CONV),
}


@pytest.mark.parametrize("name", INFERENCE_FAULTS)
def test_a_wrong_rewrite_is_undone_in_inference(name: str) -> None:
    target, fault, function, args = INFERENCE_FAULTS[name]

    def run(call: Callable[..., Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return [call(*args)]

    check_fault(target, fault, run, function)


def test_a_call_that_raises_in_the_proof_raises_the_models_error() -> None:
    compiled, reports = rewritten(lambda w, t: F.embedding(t, w))
    with pytest.raises(IndexError):
        compiled(W, torch.tensor([0, 99]))
    assert [row.name for row in reports[0].dropped] == ["embedding"]


def test_a_replacement_that_returns_an_input_is_not_made() -> None:
    wrong = replace(
        PASSES[0],
        pattern=Call("relu", Arg("x")),
        condition=lambda match: True,
        build=lambda builder, match: (match["x"],),
    )
    compiled, reports = rewritten(torch.relu, [wrong])
    torch.testing.assert_close(compiled(X), torch.relu(X))
    assert not reports[0].rows
    assert "returns one of its inputs" in str(reports[0])


def test_later_rewrites_survive_an_earlier_one_that_is_undone() -> None:
    passes = [
        replace(p, build=changed("linear", bias=None)) if p.name == "linear" else p for p in PASSES
    ]

    def function(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.layer_norm(F.linear(x, w, b), (D,), b)

    compiled, reports = rewritten(function, passes)
    torch.testing.assert_close(compiled(*LINEAR), function(*LINEAR))
    assert dict(reports[0].kept) == {"layer_norm": 1}
    assert [row.name for row in reports[0].dropped] == ["linear"]


def test_the_proof_mutates_nothing_and_draws_no_random_numbers() -> None:
    def function(x: Tensor, w: Tensor, count: Tensor) -> Tensor:
        count.add_(1)
        return F.dropout(F.linear(x, w), 0.5) * count

    count = torch.zeros(())
    compiled, reports = rewritten(function)
    torch.manual_seed(3)
    found = compiled(X, W, count)
    torch.manual_seed(3)
    torch.testing.assert_close(found, function(X, W, torch.zeros(())))
    assert float(count) == 1
    assert dict(reports[0].kept) == {"linear": 1}
