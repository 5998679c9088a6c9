"""Outputs of the engine: new tokens of each request after a step, and engine statistics.

Imports no torch, so that the HTTP process can pass outputs on without loading it.
"""

from __future__ import annotations

import msgspec

from ingot.serving.engine.request import FinishReason


class Logprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probability of a token, and of the most likely tokens at its position.

    >>> Logprob(5, -0.5, ((5, -0.5), (7, -1.5))).top[0]
    (5, -0.5)
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Output(msgspec.Struct, frozen=True):
    """Result of one step for one request.

    >>> Output(7, (11,)).finish_reason is None
    True
    """

    id: int
    tokens: tuple[int, ...] = ()
    """New tokens. The last one may be a stop token, which is not part of the text."""
    logprobs: tuple[Logprob, ...] | None = None
    """Of these tokens, if requested."""
    prompt_logprobs: tuple[Logprob, ...] | None = None
    """Of the next prompt tokens, if requested; the first prompt token has none."""
    num_cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache; reported once, when the request is admitted."""
    finish_reason: FinishReason | None = None
    """Set in the last output of a request."""
    error: str | None = None
    """Error message, if the request failed or was rejected."""
    embedding: bytes | None = None
    """Embedding of the prompt, as little-endian float32, from a `PoolingEngine`."""
    tensors: tuple[bytes, ...] | None = None
    """Little-endian elements of each output of the signature, from an `InferenceEngine`."""


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """State of the engine, and counters since its start."""

    num_running: int
    num_waiting: int
    num_used_blocks: int
    num_blocks: int
    steps: int
    prompt_tokens: int
    """Prompt tokens of admitted requests, and those that another engine generated for them."""
    cached_tokens: int
    """Those of them that were found in the prefix cache."""
    generated_tokens: int
    preemptions: int
    draft_tokens: int
    accepted_tokens: int
    """Draft tokens that equal the sampled ones."""
    failed_steps: int
