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
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ingot import ops
from ingot.core.errors import ConfigError, IngotError
from ingot.nn.decoder import Decoder
from ingot.nn.layout import BatchLayout, KVCache
from ingot.ops.replay import capture

BLOCK_SIZE = 128
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
        raise ConfigError(f"{name} is {value}", hint=f"give a number from {low} to {high}")


class Session:
    """One sequence, its tokens and what is kept of them.

    >>> from ingot.nn import Decoder, preset
    >>> session = Session(Decoder.from_config(preset("tiny"), seed=0))
    >>> len(list(session.stream([1, 2, 3], max_tokens=4)))
    4
    >>> len(session.tokens)  # the last one was never fed
    6
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.tokens: list[int] = []
        self._kv_cache: KVCache | None = None

    @torch.inference_mode()
    def stream(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        sampling: Sampling | None = None,
        stop_token_ids: Collection[int] = (),
    ) -> Iterator[int]:
        """Generate tokens after the prompt, up to one of `stop_token_ids` (not yielded),
        `max_tokens` or the model's maximum sequence length."""
        config, count = self.decoder.config, len(prompt)
        if not 0 < count <= config.max_seq_len:
            raise IngotError(
                f"the prompt has {count} tokens, the model takes 1 to {config.max_seq_len}",
                hint="give a shorter one" if count else "give some text",
            )
        if not all(0 <= token < config.vocab_size for token in prompt):
            raise IngotError(
                f"a token of the prompt is not in the vocabulary of {config.vocab_size}",
                hint="encode the text with the tokenizer of this model",
            )
        last = min(count + max_tokens, config.max_seq_len)
        if last == count:
            return
        step = self._step(last)
        options = (sampling or Sampling()).arguments(config.vocab_size)
        hidden = self._feed(prompt)
        drawn = ops.sample(self.decoder.logits(hidden), *options, torch.tensor([count]))
        while True:
            token = int(drawn)
            if token in stop_token_ids:
                return
            yield token
            if len(self.tokens) + 1 == last:
                return
            drawn = step.run(token, len(self.tokens), options)
            self.tokens.append(token)

    def _feed(self, prompt: Sequence[int]) -> Tensor:
        """Run what is not kept yet, and at least the last token; return that token's state."""
        same = (a == b for a, b in zip(prompt, self.tokens, strict=False))
        kept = next((i for i, equal in enumerate(same) if not equal), len(self.tokens))
        del self.tokens[min(kept, len(prompt) - 1) :]
        rest = list(prompt[len(self.tokens) :])
        hidden = torch.empty(0)
        for start in range(0, len(rest), CHUNK):
            chunk = rest[start : start + CHUNK]
            hidden = self._forward(chunk)
            self.tokens += chunk
        return hidden

    def _forward(self, tokens: list[int]) -> Tensor:
        """One forward over new tokens; the state of the last."""
        assert self._kv_cache is not None
        begin, end = len(self.tokens), len(self.tokens) + len(tokens)
        positions_T = torch.arange(begin, end)
        layout = _layout(
            self._kv_cache, len(tokens), torch.tensor([end], dtype=torch.int32), positions_T
        )
        return self.decoder(torch.tensor(tokens), layout)[-1:]

    def _step(self, count: int) -> _Step:
        """Have room for so many tokens, and keep what is there."""
        num_blocks, old = -(-count // BLOCK_SIZE), self._kv_cache
        if old is None or old.num_blocks < num_blocks:
            device = self.decoder.device
            new = KVCache(self.decoder.kv_spec, num_blocks, BLOCK_SIZE, device)
            if old is not None:
                new.memory[:, :, : old.num_blocks] = old.memory
            self._kv_cache, self._decode = new, _Step(self.decoder, new)
        return self._decode


class _Step:
    """From a token to the next one. The tensors stay and get new values, so that the calls can be
    recorded the first time and replayed then: 30 layers in Python take longer than their kernels.
    """

    def __init__(self, decoder: Decoder, kv_cache: KVCache) -> None:
        self._decoder = decoder
        self._token, self._position, self._next = (torch.zeros(1, dtype=torch.int64) for _ in "tpn")
        self._context = torch.zeros(1, dtype=torch.int32)
        self._options = Sampling().arguments(decoder.config.vocab_size)
        self._layout = _layout(kv_cache, 1, self._context, self._position)
        self._replay: Callable[[], Tensor] | None = None

    def run(self, token: int, position: int, options: tuple[Tensor, ...]) -> Tensor:
        """The token behind this one."""
        self._token.fill_(token)
        self._position.fill_(position)
        self._next.fill_(position + 1)
        self._context.fill_(position + 1)
        for mine, given in zip(self._options, options, strict=True):
            mine.copy_(given)
        if self._replay is not None:
            return self._replay()
        drawn, self._replay = capture(self._compute)
        return drawn

    def _compute(self) -> Tensor:
        hidden = self._decoder(self._token, self._layout)
        return ops.sample(self._decoder.logits(hidden), *self._options, self._next)


def _layout(kv_cache: KVCache, count: int, context: Tensor, positions_T: Tensor) -> BatchLayout:
    """One sequence whose blocks are in order, so that a token's slot is its position."""
    return BatchLayout(
        cu_seqlens=torch.tensor([0, count], dtype=torch.int32),
        context_lens=context,
        block_table=torch.arange(kv_cache.num_blocks, dtype=torch.int32)[None],
        positions=positions_T,
        slot_mapping=positions_T,
        kv_cache=kv_cache,
    )
