"""Generation without a KV cache: the whole sequence is computed again for each token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ingot import ops
from ingot.nn import BatchLayout, Decoder
from ingot.serving.engine.sampling_params import SamplingParams


def sampling_columns(params: SamplingParams, vocab_size: int) -> tuple[Tensor, ...]:
    """Return what `ops.sample` takes between the logits and the positions, for one token."""
    return (
        torch.tensor([params.temperature], dtype=torch.float32),
        torch.tensor([min(params.top_k or vocab_size, vocab_size)]),
        torch.tensor([params.top_p], dtype=torch.float32),
        torch.tensor([params.min_p], dtype=torch.float32),
        torch.tensor([params.seed]),
    )


def generate(
    decoder: Decoder, prompt: Sequence[int], max_tokens: int, params: SamplingParams
) -> list[int]:
    """Return the tokens that a correct engine generates after the prompt."""
    tokens, columns = list(prompt), sampling_columns(params, decoder.config.vocab_size)
    for _ in range(max_tokens):
        layout = BatchLayout.packed([len(tokens)])
        with torch.inference_mode():
            logits = decoder.logits(decoder(torch.tensor(tokens), layout)[-1:])
            position = torch.tensor([len(tokens)])
            tokens.append(int(ops.sample(logits, *columns, position)))  # pyright: ignore
        if tokens[-1] in params.stop_token_ids:
            break
    return tokens[len(prompt) :]
