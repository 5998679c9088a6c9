"""`ingot generate`: a model goes on from a prompt."""

from __future__ import annotations

import json as json_format
import sys
import time
import unicodedata
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from ingot.cli import escape_markup
from ingot.core.device import DeviceType
from ingot.core.errors import ConfigError, IngotError
from ingot.core.log import stderr
from ingot.nn.session import Sampling, Session

if TYPE_CHECKING:
    from ingot.interop.model import Model

_ENDS = {
    "end": "",
    "max_tokens": "; cut at --max-tokens",
    "context": "; the model's context is full",
    "interrupt": "; interrupted",
}


@dataclass
class Written:
    """What was written, and how fast.

    >>> print(Written(tokens=11, first=0.5, seconds=1.5, ended="max_tokens"))
    11 tokens, the first after 0.500 s, then 10.0 tokens/s; cut at --max-tokens
    """

    text: str = ""
    tokens: int = 0
    first: float = 0.0
    """Seconds to the first token."""
    seconds: float = 0.0
    ended: Literal["end", "max_tokens", "context", "interrupt"] = "end"
    """By the model itself, or by what else."""

    def __str__(self) -> str:
        if not self.tokens:
            return f"no tokens{_ENDS[self.ended]}"
        count = "1 token" if self.tokens == 1 else f"{self.tokens} tokens"
        rate = (self.tokens - 1) / (self.seconds - self.first) if self.tokens > 1 else 0.0
        speed = f", then {rate:.1f} tokens/s" if rate else ""
        return f"{count}, the first after {self.first:.3f} s{speed}{_ENDS[self.ended]}"


def generate(
    directory: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")],
    prompt: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PROMPT")],
    sampling: Annotated[Sampling, tyro.conf.OmitArgPrefixes] = Sampling(),  # noqa: B008
    max_tokens: int = 256,
    json: tyro.conf.FlagCreatePairsOff[bool] = False,
) -> None:
    """Have a model go on from a prompt, to its end or to `--max-tokens`.

    Ctrl-C ends it early. What it writes goes to stdout, how fast it was to stderr.

    Examples: `ingot generate smollm2 "Once upon a time"`,
    `ingot generate smollm2 "def fibonacci(n):" --temperature 0.8 --seed 7`,
    `ingot generate smollm2 "Hello" --json` for machines.

    Args:
        directory: A model directory, as `ingot import` makes.
        prompt: The text to go on from.
        sampling: How the next token is drawn.
        max_tokens: The most tokens to write.
        json: Print JSON at the end instead of the text as it comes.
    """
    require_room(max_tokens)
    model = load(directory)
    ids = model.tokenizer.encode(prompt)
    writing = Writing(model, Session(model.decoder), sampling, max_tokens)
    if json:
        written = writing.run(ids, quiet=True)
        print(json_format.dumps(as_json(written, ids), indent=2))  # noqa: T201
    else:
        written = writing.run(ids, prompt)
        print_figures(written)
    if written.ended == "interrupt":
        raise KeyboardInterrupt


def require_room(max_tokens: int) -> None:
    """Refuse a limit that leaves nothing to write, before anything is loaded."""
    if max_tokens < 1:
        raise ConfigError(f"--max-tokens is {max_tokens}", hint="give a number from 1 on")


def load(directory: Path, device: DeviceType = "cpu") -> Model:
    """The model of a directory, its kernels built; a line says so where that takes a while."""
    with stderr().status(f"loading {escape_markup(str(directory))}") as status:
        from ingot.interop import model
        from ingot.kernels.cpu import build as kernels

        loaded = model.load(directory)
        if device != "cpu":
            loaded.decoder.to(device)  # Triton compiles each kernel at its first use
            return loaded
        # All of them now: each would be built at its first use, in the middle of the text.
        status.update("compiling the CPU kernels, once on a machine")
        with suppress(IngotError):  # PyTorch stands in then, and the first use warns
            kernels.build(kernels.FAMILIES)
        return loaded


@dataclass(frozen=True)
class Writing:
    """How a model's text comes to stdout."""

    model: Model
    session: Session
    sampling: Sampling
    max_tokens: int

    def run(self, ids: list[int], before: str = "", quiet: bool = False) -> Written:
        """Print what follows the ids as it comes, to its end or to Ctrl-C; `before` comes first."""
        written, start = Written(), time.perf_counter()
        try:
            for piece in self._pieces(ids):
                written.seconds = time.perf_counter() - start
                if not written.tokens:
                    written.first = written.seconds
                    _print("" if quiet else before)
                written.tokens += 1
                written.text += piece
                _print("" if quiet else piece)
            written.tokens -= 1  # the last piece is what was held back, and no token's
            written.ended = self._end(len(ids), written.tokens)
        except KeyboardInterrupt:
            written.ended = "interrupt"
        return written

    def _pieces(self, ids: list[int]) -> Iterator[str]:
        pieces = self.model.stream(
            ids, max_tokens=self.max_tokens, sampling=self.sampling, session=self.session
        )
        with stderr().status("reading the prompt"):
            first = next(pieces)
        yield first
        yield from pieces

    def _end(self, prompt: int, tokens: int) -> Literal["end", "max_tokens", "context"]:
        if tokens == self.max_tokens:
            return "max_tokens"
        return "context" if prompt + tokens == self.model.decoder.config.max_seq_len else "end"


def print_figures(written: Written) -> None:
    """End the text and say how fast it came."""
    print(flush=True)  # noqa: T201
    stderr().print(f"[dim]{written}[/]", highlight=False)


def as_json(written: Written, prompt: list[int]) -> dict[str, Any]:
    """All of it, as `--json` prints it."""
    return {
        "text": written.text,
        "ended": written.ended,
        "prompt_tokens": len(prompt),
        "tokens": written.tokens,
        "first_token_seconds": round(written.first, 4),
        "seconds": round(written.seconds, 4),
    }


def _print(text: str) -> None:
    """Print it at once. A terminal obeys no model: it gets no control characters."""
    if sys.stdout.isatty():
        text = "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else "?" for c in text)
    encoding = sys.stdout.encoding  # what it does not have is a "?" there
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()
