"""One sequence that is written token by token, and the keys and values it keeps.

    session = Session(decoder)
    for token in session.stream([1, 2, 3], max_tokens=16):
        ...

A session remembers the tokens whose keys and values it has. A prompt that begins with them goes
on where they end: the next turn of a chat computes only what is new. Since the decoder is exact,
what was kept has the very bits that would be computed again.

A server's engine runs many sequences at once and does not use this; it runs the same decoder.
"""

# pyright: basic
from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ingot import ops
from ingot.core.errors import ConfigError, IngotError
from ingot.nn.decoder import Decoder
from ingot.nn.plan import KVPool, Plan

PAGE = 128
CHUNK = 512  # tokens of a prompt in one forward


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn. At temperature 0 it is the likeliest one.

    The random number of a draw is a function of the seed and the token's position alone.

    >>> Sampling(temperature=0.8, top_p=0.95).seed
    0
    """

    temperature: float = 0.0
    top_k: int | None = None
    """Only so many of the likeliest tokens; None for all."""
    top_p: float = 1.0
    """Only the likeliest tokens that have this probability together."""
    min_p: float = 0.0
    """Only tokens at least this likely, relative to the likeliest."""
    seed: int = 0

    def __post_init__(self) -> None:
        _within("temperature", self.temperature, 0.0, 100.0)
        _within("top_k", 1 if self.top_k is None else self.top_k, 1, 2**31 - 1)
        _within("top_p", self.top_p, 0.0, 1.0)
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("seed", self.seed, 0, 2**63 - 1)

    def arguments(self, vocabulary: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """What `ops.sample` takes between the logits and the positions, for one token."""
        options = (self.temperature, self.top_p, self.min_p)
        temperature, top_p, min_p = (torch.tensor([option]) for option in options)
        top_k = torch.tensor([min(self.top_k or vocabulary, vocabulary)])
        return temperature, top_k, top_p, min_p, torch.tensor([self.seed])


def _within(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise ConfigError(f"{name} is {value}", remedy=f"give a number from {low} to {high}")


class Session:
    """One sequence, its tokens and what is kept of them.

    >>> from ingot.nn import Decoder, preset
    >>> session = Session(Decoder.new(preset("tiny"), seed=0))
    >>> len(list(session.stream([1, 2, 3], max_tokens=4)))
    4
    >>> len(session.tokens)  # the last one was never fed
    6
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.tokens: list[int] = []
        self._pool: KVPool | None = None

    @torch.inference_mode()
    def stream(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        sampling: Sampling | None = None,
        ends: Collection[int] = (),
    ) -> Iterator[int]:
        """Go on from the prompt: one token after the other, to one of `ends` (which is not
        given), to `max_tokens`, or to the end of the model's context."""
        config, count = self.decoder.config, len(prompt)
        if not 0 < count <= config.context:
            raise IngotError(
                f"the prompt has {count} tokens, the model takes 1 to {config.context}",
                remedy="give a shorter one" if count else "give some text",
            )
        if not all(0 <= token < config.vocab_size for token in prompt):
            raise IngotError(
                f"a token of the prompt is not in the vocabulary of {config.vocab_size}",
                remedy="encode the text with the tokenizer of this model",
            )
        options = (sampling or Sampling()).arguments(config.vocab_size)
        last = min(count + max_tokens, config.context)
        self._reserve(last)
        hidden = self._feed(prompt)
        for position in range(count, last):
            logits = self.decoder.logits(hidden)
            drawn = ops.sample(logits, *options, torch.tensor([position]))
            token = int(drawn)
            if token in ends:
                return
            yield token
            if position + 1 < last:
                hidden = self._run(drawn, [token])

    def _feed(self, prompt: Sequence[int]) -> Tensor:
        """Run what is not kept yet, and at least the last token; return that token's state."""
        same = (a == b for a, b in zip(prompt, self.tokens, strict=False))
        kept = next((i for i, equal in enumerate(same) if not equal), len(self.tokens))
        del self.tokens[min(kept, len(prompt) - 1) :]
        rest = list(prompt[len(self.tokens) :])
        hidden = torch.empty(0)
        for start in range(0, len(rest), CHUNK):
            chunk = rest[start : start + CHUNK]
            hidden = self._run(torch.tensor(chunk), chunk)
        return hidden

    def _run(self, tokens_T: Tensor, tokens: list[int]) -> Tensor:
        """One forward over new tokens; the state of the last."""
        assert self._pool is not None
        begin, end = len(self.tokens), len(self.tokens) + len(tokens)
        positions_T = torch.arange(begin, end)  # and their slots: the pages are in order
        plan = Plan(
            cu_seqlens=torch.tensor([0, len(tokens)], dtype=torch.int32),
            context_lens=torch.tensor([end], dtype=torch.int32),
            block_table=self._pages,
            slots=positions_T,
            pool=self._pool,
        )
        hidden_TD = self.decoder(tokens_T, positions_T, plan)
        self.tokens += tokens
        return hidden_TD[-1:]

    def _reserve(self, count: int) -> None:
        """Have room for so many tokens, and keep what is there."""
        pages, old = -(-count // PAGE), self._pool
        if old is not None and old.pages >= pages:
            return
        device = self.decoder.embed.weight.device
        self._pool = KVPool(self.decoder.kv_spec, pages, PAGE, device)
        self._pages = torch.arange(pages, dtype=torch.int32)[None]
        if old is not None:
            self._pool.memory[:, :, : old.pages] = old.memory
