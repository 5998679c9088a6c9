"""`ingot chat`: talk to a model in the terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import tyro

from ingot.cli.generate import load, write
from ingot.core.log import stderr
from ingot.nn.session import Sampling, Session


def chat(
    directory: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")],
    sampling: Annotated[Sampling, tyro.conf.OmitArgPrefixes] = Sampling(),  # noqa: B008
    system: str | None = None,
    max_tokens: int = 512,
) -> None:
    """Talk to a model: a line is a message, and the conversation goes on from answer to answer.

    Ctrl-C stops an answer; at the prompt it leaves, and so does Ctrl-D. Without a terminal every
    line of stdin is a message: `echo "What is the capital of France?" | ingot chat smollm2`.

    Examples: `ingot chat smollm2`, `ingot chat smollm2 --system "Answer in one word."`,
    `ingot chat smollm2 --temperature 0.7 --top-p 0.9 --seed 1`.

    Args:
        directory: A model directory, as `ingot import` makes.
        sampling: How the next token is drawn.
        system: What the model is told before the conversation.
        max_tokens: The most tokens of an answer.
    """
    model = load(directory)
    session = Session(model.decoder)
    messages = [{"role": "system", "content": system}] if system else []
    while (line := _line()) is not None:
        messages.append({"role": "user", "content": line})
        ids = model.tokenizer.chat(messages)
        pieces = model.stream(ids, max_tokens=max_tokens, sampling=sampling, session=session)
        written = write(pieces)
        print()  # noqa: T201
        stderr().print(f"[dim]{written}[/]", highlight=False)
        messages.append({"role": "assistant", "content": written.text})


def _line() -> str | None:
    """What the user says next, None when they leave; empty lines are passed over."""
    terminal = sys.stdin.isatty()
    try:
        while True:
            line = input("> " if terminal else "").strip()
            if line:
                return line
    except EOFError:
        return None
    except KeyboardInterrupt:
        if terminal:
            print()  # noqa: T201
            return None
        raise
