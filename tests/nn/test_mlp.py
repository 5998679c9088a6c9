from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ingot.nn import MLP, Activation, MoE, MoEConfig, SwiGLU

ACTIVATIONS = {
    Activation.GELU: F.gelu,
    Activation.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
    Activation.RELU: F.relu,
}


def randomized(module: torch.nn.Module) -> None:
    torch.manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_mlp_matches_torch(activation: Activation) -> None:
    mlp, x = MLP(8, 20, activation, bias=True), torch.randn(5, 8)
    randomized(mlp)
    hidden = ACTIVATIONS[activation](F.linear(x, mlp.up.weight, mlp.up.bias))
    expected = F.linear(hidden, mlp.down.weight, mlp.down.bias)
    torch.testing.assert_close(mlp(x), expected)
    torch.testing.assert_close(mlp(x, x), expected + x)


def test_swiglu_matches_torch() -> None:
    mlp, x = SwiGLU(8, 20), torch.randn(5, 8)
    randomized(mlp)
    assert mlp.gate
    assert mlp.up
    hidden = F.silu(x @ mlp.gate.weight.T) * (x @ mlp.up.weight.T)
    torch.testing.assert_close(mlp(x, x), hidden @ mlp.down.weight.T + x)


def expert(moe: MoE, e: int, x: torch.Tensor) -> torch.Tensor:
    return (F.silu(x @ moe.gate[e].T) * (x @ moe.up[e].T)) @ moe.down[e].T


@pytest.mark.parametrize("normalize", [False, True])
def test_moe_matches_a_loop_over_selected_experts(normalize: bool) -> None:
    moe, x = (
        MoE(8, MoEConfig(num_experts=5, top_k=3, ffn_dim=12, norm_topk_prob=normalize)),
        torch.randn(6, 8),
    )
    randomized(moe)
    p = F.softmax(x @ moe.router.weight.T, dim=-1)
    best, chosen = p.topk(3, dim=-1)
    best = best / best.sum(-1, keepdim=True) if normalize else best
    rows = [
        sum(w * expert(moe, int(e), row) for w, e in zip(ws, es, strict=True))
        for row, ws, es in zip(x, best, chosen, strict=True)
    ]
    expected = torch.stack(rows)  # pyright: ignore[reportArgumentType]
    torch.testing.assert_close(moe(x), expected)
    torch.testing.assert_close(moe(x, x), expected + x)


def test_ties_select_the_lower_expert_indices() -> None:
    moe = MoE(8, MoEConfig(num_experts=5, top_k=2, ffn_dim=12))
    with torch.no_grad():
        moe.router.weight.zero_()
    weights, chosen = moe._route(torch.randn(4, 8))
    assert chosen.tolist() == [[0, 1]] * 4
    assert weights.tolist() == [[0.5, 0.5]] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moe_is_batch_invariant(dtype: torch.dtype) -> None:
    moe = MoE(40, MoEConfig(num_experts=7, top_k=3, ffn_dim=24)).to(dtype)
    randomized(moe)
    x = torch.randn(130, 40).to(dtype)
    whole = moe(x)
    for part in (slice(0, 1), slice(3, 9), slice(64, 130)):
        assert torch.equal(moe(x[part]), whole[part])


def test_every_moe_weight_gets_a_gradient() -> None:
    moe = MoE(8, MoEConfig(num_experts=4, top_k=2, ffn_dim=12))
    randomized(moe)
    moe(torch.randn(64, 8)).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in moe.parameters())
