"""`ingot generate`: a model goes on from a prompt."""

from __future__ import annotations

import json as json_format
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from ingot.core.log import stderr
from ingot.nn.session import Sampling

if TYPE_CHECKING:
    from ingot.interop.model import Model


@dataclass
class Written:
    """What was written, and how fast."""

    text: str = ""
    tokens: int = 0
    first: float = 0.0
    """Seconds to the first token."""
    seconds: float = 0.0
    stopped: bool = False
    """By Ctrl-C."""

    def __str__(self) -> str:
        rate = (self.tokens - 1) / (self.seconds - self.first) if self.tokens > 1 else 0.0
        speed = f", then {rate:.1f} tokens/s" if rate else ""
        return f"{self.tokens} tokens, the first after {self.first:.3f} s{speed}"


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
    model = load(directory)
    ids = model.tokenizer.encode(prompt)
    pieces = model.stream(ids, max_tokens=max_tokens, sampling=sampling)
    if not json:
        sys.stdout.write(prompt)
    written = write(pieces, quiet=json)
    if json:
        print(json_format.dumps(as_json(written, ids), indent=2))  # noqa: T201
    else:
        print()  # noqa: T201
    stderr().print(f"[dim]{written}[/]", highlight=False)
    if written.stopped:
        raise KeyboardInterrupt


def load(directory: Path) -> Model:
    """The model of a directory; a line says so where that takes a while."""
    with stderr().status(f"loading {directory}"):
        from ingot.interop import model

        return model.load(directory)


def write(pieces: Iterator[str], quiet: bool = False) -> Written:
    """Print the pieces as they come, to their end or to Ctrl-C."""
    written, start = Written(), time.perf_counter()
    try:
        for piece in pieces:
            written.seconds = time.perf_counter() - start
            written.first = written.first or written.seconds
            written.tokens += 1
            written.text += piece
            if not quiet:
                sys.stdout.write(piece)
                sys.stdout.flush()
        written.tokens -= 1  # the last piece is what was held back, and no token's
    except KeyboardInterrupt:
        written.stopped = True
    return written


def as_json(written: Written, prompt: list[int]) -> dict[str, Any]:
    """All of it, as `--json` prints it."""
    return {
        "text": written.text,
        "prompt_tokens": len(prompt),
        "tokens": written.tokens,
        "first_token_seconds": round(written.first, 4),
        "seconds": round(written.seconds, 4),
    }
