"""A model directory as one object: text in, text out.

model = ingot.load("smollm2")
print(model.generate("Once upon a time", max_tokens=40))
print(model.chat([{"role": "user", "content": "What is the capital of France?"}]))
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ingot.interop import hf
from ingot.interop.chat import Message
from ingot.interop.tokenizer import Tokenizer
from ingot.nn.decoder import Decoder
from ingot.nn.session import Sampling, Session

MAX_TOKENS = 256


def load(directory: Path | str, dtype: torch.dtype | None = None) -> Model:
    """The model and the tokenizer of a directory, in the dtype of its files unless given."""
    directory = Path(directory)
    return Model(decoder=hf.load(directory, dtype), tokenizer=Tokenizer.load(directory))


@dataclass(frozen=True, kw_only=True)
class Model:
    """A decoder and its tokenizer."""

    decoder: Decoder
    tokenizer: Tokenizer

    def generate(
        self, prompt: str, *, max_tokens: int = MAX_TOKENS, sampling: Sampling | None = None
    ) -> str:
        """The text that follows the prompt, to its end or to `max_tokens`."""
        ids = self.tokenizer.encode(prompt)
        return "".join(self.stream(ids, max_tokens=max_tokens, sampling=sampling))

    def chat(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int = MAX_TOKENS,
        sampling: Sampling | None = None,
    ) -> str:
        """The answer to the messages, through the model's chat template."""
        ids = self.tokenizer.encode_chat(messages)
        return "".join(self.stream(ids, max_tokens=max_tokens, sampling=sampling))

    def stream(
        self,
        ids: Sequence[int],
        *,
        max_tokens: int = MAX_TOKENS,
        sampling: Sampling | None = None,
        session: Session | None = None,
    ) -> Iterator[str]:
        """The text that follows these tokens, in pieces: one for each new token, some empty.

        A session that is given again goes on where the prompt agrees with what it has.
        """
        session = session or Session(self.decoder)
        text = self.tokenizer.decode_stream()
        for token in session.stream(
            ids,
            max_tokens=max_tokens,
            sampling=sampling,
            stop_token_ids=self.tokenizer.eos_token_ids,
        ):
            yield text.feed(token)
        yield text.finish()
