"""A causal mask in a buffer is known by its values, as long as it has them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor import config

from ingot.fuse.backend import compile_graph, rewrite_graph
from ingot.fuse.buffer import MaskBuffers
from ingot.fuse.mask import Const, expression_of
from ingot.fuse.report import recent, record

SIZE, HEADS = 16, 4
ONES = torch.ones(SIZE, SIZE)


class Attention(nn.Module):
    """Causal attention as in nanoGPT."""

    mask: Tensor

    def __init__(self, mask: Tensor, hide: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.project = nn.Linear(32, 96)
        self.register_buffer("mask", mask.clone())
        self.hide = hide

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (
            y.view(b, t, HEADS, d // HEADS).transpose(1, 2) for y in self.project(x).split(d, dim=2)
        )
        scores = (q @ k.transpose(-2, -1)) * (1.0 / k.size(-1) ** 0.5)
        weights = self.hide(scores, self.mask[..., :t, :t]).softmax(dim=-1)
        return (weights @ v).transpose(1, 2).contiguous().view(b, t, d)


MASKS: dict[str, tuple[Tensor, Callable[[Tensor, Tensor], Tensor]]] = {
    "nanogpt": (
        ONES.tril().view(1, 1, SIZE, SIZE),
        lambda scores, mask: scores.masked_fill(mask == 0, float("-inf")),
    ),
    "hidden": (
        ONES.triu(diagonal=1),
        lambda scores, mask: scores.masked_fill(mask.bool(), -torch.inf),
    ),
    "added": (torch.full((SIZE, SIZE), -torch.inf).triu(1), torch.add),
}


def rewrite_only(module: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    """Do what the backend does, without Inductor."""
    masks = MaskBuffers(module, inputs)
    record(rewrite_graph(module, inputs, always=True))
    return masks.guard(module.forward)


def compiled(model: nn.Module, backend: Any = rewrite_only) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(model, backend=backend, dynamic=True)


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_in_a_buffer_is_found_for_every_length(name: str) -> None:
    model = Attention(*MASKS[name])
    call = compiled(model)
    for length in (7, 12, SIZE):
        x = torch.randn(2, length, 32)
        torch.testing.assert_close(call(x), model(x))
    assert recent()[-1].kept["written_out_attention"] == 1


def test_a_mask_that_changes_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    model, x = Attention(*MASKS["nanogpt"]), torch.randn(2, 7, 32)
    call = compiled(model, partial(compile_graph, always=True))
    before = call(x)
    assert recent()[-1].kept["written_out_attention"] == 1
    assert "has changed" not in caplog.text
    model.mask[..., 3:] = 1  # the last positions see each other
    torch.testing.assert_close(call(x), model(x))
    assert "has changed" in caplog.text
    model.mask = torch.ones_like(model.mask)
    torch.testing.assert_close(call(x), model(x))
    model.mask = ONES.tril().view(1, 1, SIZE, SIZE)
    torch.testing.assert_close(call(x), before)


def test_a_mask_among_frozen_weights_is_found_and_watched(caplog: pytest.LogCaptureFixture) -> None:
    model, x = Attention(*MASKS["nanogpt"]), torch.randn(2, 7, 32)
    call = compiled(model, partial(compile_graph, freeze=True, always=True))
    with torch.no_grad(), config.patch(freezing=True):
        torch.testing.assert_close(call(x), model(x))
        assert recent()[-1].kept["written_out_attention"] == 1
        assert "has changed" not in caplog.text
        model.mask[..., 3:] = 1
        torch.testing.assert_close(call(x), model(x))
    assert "has changed" in caplog.text


class Growing(Attention):
    """Changes its mask in each call."""

    def forward(self, x: Tensor) -> Tensor:
        self.mask[..., 0, :] += 1
        return super().forward(x)


def test_a_mask_that_the_model_writes_to_is_unknown() -> None:
    mask, hide = MASKS["nanogpt"]
    one, other = Growing(mask.clone(), hide), Growing(mask.clone(), hide)
    other.load_state_dict(one.state_dict())
    call, x = compiled(one), torch.randn(2, 7, 32)
    for _ in range(2):
        torch.testing.assert_close(call(x), other(x))
    assert "written_out_attention" not in recent()[-1].kept


@pytest.mark.parametrize(
    "mask", [ONES, ONES.triu(2), ONES.tril(-1), ONES.tril() + torch.eye(SIZE), ONES.tril()[:, 1:]]
)
def test_other_buffers_are_unknown(mask: Tensor) -> None:
    assert expression_of(mask) in (None, Const(1.0))
    assert expression_of(torch.randn(3, SIZE, SIZE)) is None
