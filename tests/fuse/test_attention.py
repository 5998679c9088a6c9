"""Attention that is written out is found with every causal mask, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.fuse.graphs import assert_left, outputs_and_gradients, rewritten
from tests.fuse.test_passes import make, repeat

B, L, N, H = 2, 5, 4, 4
Q, K = make(B, N, L, H), make(B, N // 2, L, H)


def written_out(
    q: Tensor,
    k: Tensor | None = None,
    hide: Callable[[Tensor], Tensor] = lambda scores: scores,
    scale: Callable[[Tensor], Tensor] = lambda scores: scores / H**0.5,
) -> Tensor:
    """Attend as models did before PyTorch had a function for it."""
    k = q if k is None else k
    scores = hide(scale(q @ k.transpose(-2, -1)))
    return F.dropout(scores.softmax(-1), 0.1, training=False) @ k


def hide_future(scores: Tensor) -> Tensor:
    """As nanoGPT does, with the mask made in each call."""
    mask = torch.tril(torch.ones(L, L)).view(1, 1, L, L)
    return scores.masked_fill(mask[:, :, :L, :L] == 0, float("-inf"))


def eager(q: Tensor, k: Tensor) -> Tensor:
    """As transformers has it, with the mask that it adds."""
    index = torch.arange(L)
    mask = torch.where(index[None, :] <= index[:, None], 0.0, torch.finfo(torch.float32).min)
    scores = torch.matmul(q, repeat(k).transpose(2, 3)) * 0.5 + mask[None, None, :, :]
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, repeat(k))


FOUND: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "written_out": (written_out, (Q,)),
    "scaled_queries": (lambda q: written_out(q * 0.3, q, scale=lambda scores: scores), (Q,)),
    "scaled_after_the_mask": (
        lambda q: written_out(q, hide=lambda s: s * 0.5, scale=hide_future),
        (Q,),
    ),
    "written_out_causal": (lambda q: written_out(q, hide=hide_future), (Q,)),
    "triu": (
        lambda q: written_out(
            q, hide=lambda s: s.masked_fill(torch.ones(L, L).triu(1).bool(), -1e9)
        ),
        (Q,),
    ),
    "added_triu": (
        lambda q: written_out(q, hide=lambda s: s + torch.full((L, L), float("-inf")).triu(1)),
        (Q,),
    ),
    "multiplied_mask": (
        lambda q: written_out(q, hide=lambda s: s + (1.0 - torch.ones(L, L).tril()) * -1e5),
        (Q,),
    ),
    "where": (
        lambda q: written_out(
            q, hide=lambda s: torch.where(torch.ones(L, L).bool().tril(), s, -1e9)
        ),
        (Q,),
    ),
    "not": (
        lambda q: written_out(
            q, hide=lambda s: s.masked_fill(~torch.ones(L, L, dtype=torch.bool).tril(), -1e9)
        ),
        (Q,),
    ),
    "eager": (eager, (Q, K)),
    "bf16_eager": (eager, (Q.bfloat16(), K.bfloat16())),
}
LEFT: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "softmax_over_queries": (lambda q: (q @ q.transpose(2, 3)).softmax(-2) @ q, (Q,)),
    "weights_returned": (
        lambda q: (weights := (q @ q.transpose(2, 3)).softmax(-1)) @ q + weights.sum(-1, True),
        (Q,),
    ),
    "little_hidden": (
        lambda q: written_out(q, hide=lambda s: s.masked_fill(torch.ones(L, L).triu(1) > 0, -10.0)),
        (Q,),
    ),
    "next_seen": (
        lambda q: written_out(q, hide=lambda s: s.masked_fill(torch.ones(L, L).triu(2) > 0, -1e9)),
        (Q,),
    ),
    "itself_hidden": (
        lambda q: written_out(q, hide=lambda s: s.masked_fill(torch.ones(L, L).triu(0) > 0, -1e9)),
        (Q,),
    ),
    "past_hidden": (
        lambda q: written_out(q, hide=lambda s: s.masked_fill(torch.ones(L, L).tril(-1) > 0, -1e9)),
        (Q,),
    ),
    "past_seen_only": (
        lambda q: written_out(q, hide=lambda s: s.masked_fill(torch.ones(L, L).tril() > 0, -1e9)),
        (Q,),
    ),
    "not_transposed": (
        lambda q: (q.transpose(2, 3) @ q).softmax(-1) @ q.transpose(2, 3),
        (Q,),
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_spelling_is_found_and_computes_the_same(name: str) -> None:
    function, args = FOUND[name]
    truth = outputs_and_gradients(function, *(arg.double() for arg in args))
    compiled, reports = rewritten(function)
    found = outputs_and_gradients(compiled, *args)
    assert [dict(report.kept) for report in reports] == [{"written_out_attention": 1}]
    eps = torch.finfo(args[-1].dtype).eps
    for one, other in zip(found, truth, strict=True):
        assert float((one - other).abs().max()) <= 40 * eps * float(other.abs().max().clamp(min=1))


@pytest.mark.parametrize("name", LEFT)
def test_what_is_only_similar_is_left(name: str) -> None:
    function, args = LEFT[name]
    assert_left(function, *args)
