"""Masks as transformers builds them are recognized, whatever the length; similar ones are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ingot.fuse.graph import named_call
from ingot.fuse.mask import MaskKind, classify
from tests.fuse import hf_models
from tests.fuse.graphs import capture


def found(graph: fx.Graph) -> MaskKind | None:
    """Classify the mask of the first attention."""
    calls = (call for node in graph.nodes if (call := named_call(node)) and call.name == "sdpa")
    call = next(calls)
    return classify(call.args[3])


def attend(mask: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Attend with a mask of (tokens, query, key)."""

    def function(q: Tensor, tokens: Tensor) -> Tensor:
        index = torch.arange(q.shape[2])
        keys, queries = index[None, None, None, :], index[None, None, :, None]
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask(tokens, queries, keys))

    return function


Q, TOKENS = torch.randn(2, 3, 7, 4), torch.ones(2, 7).bool()
CAUSAL: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "key_up_to_query": lambda t, q, k: k <= q,
    "query_from_key": lambda t, q, k: q >= k,
    "before_next": lambda t, q, k: k < q + 1,
    "expanded": lambda t, q, k: (k <= q).expand(2, 1, -1, -1),
    "repeated": lambda t, q, k: k.repeat(2, 1, 1, 1) <= q.repeat(1, 1, 1, 1),
    "and_true": lambda t, q, k: (q >= 0) & (k <= q),
}
OTHER: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "strict": lambda t, q, k: (k < q) | (k == q - 0),
    "one_more": lambda t, q, k: k <= q + 1,
    "one_less": lambda t, q, k: (k <= q - 1) | (k == q),
    "transposed": lambda t, q, k: q <= k,
    "window": lambda t, q, k: (k <= q) & (k > q - 3),
    "reversed": lambda t, q, k: (6 - k) <= q,
    "of_tokens": lambda t, q, k: (k <= q) & t[0][None, None, None, :],
    "repeated_row": lambda t, q, k: (k <= q) & t[:1].repeat(2, 1)[:, None, None, :],
    "repeated_key": lambda t, q, k: k[..., 3:4].repeat(1, 1, 1, 7) <= q,
    "rows_of_tokens": lambda t, q, k: t[:, None, :, None] & (k <= q),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CAUSAL)
def test_spellings_of_the_causal_mask(name: str, dynamic: bool) -> None:
    graph = capture(attend(CAUSAL[name]), Q, TOKENS, dynamic=dynamic)
    assert found(graph) == MaskKind(causal=True, padding=None)


@pytest.mark.parametrize("name", OTHER)
def test_another_mask_is_not_causal(name: str) -> None:
    kind = found(capture(attend(OTHER[name]), Q, TOKENS))
    assert kind is None or kind != MaskKind(causal=True, padding=None)
    assert kind is None or name == "rows_of_tokens" or kind.padding is None


@pytest.mark.parametrize(("name", "causal"), [("gpt2", True), ("llama", True), ("bert", False)])
@pytest.mark.parametrize("padded", [False, True])
def test_masks_of_transformers(name: str, causal: bool, padded: bool) -> None:
    model, tokens = hf_models.build(name), hf_models.inputs(name, 2, 7)["input_ids"]
    mask = TOKENS.long() if padded else None

    def call(tokens: Tensor, mask: Tensor | None) -> Tensor:
        return model(tokens, attention_mask=mask)[0]

    graph = capture(call, tokens, mask, dynamic=True)
    if name == "bert" and not padded:
        assert (
            next(c for n in graph.nodes if (c := named_call(n)) and c.name == "sdpa").args[3]
            is None
        )
        return
    kind = found(graph)
    assert kind is not None
    assert (kind.causal, kind.padding is not None) == (causal, padded)
