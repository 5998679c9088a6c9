"""`ingot chat`: talk to a model in the terminal."""

from __future__ import annotations

import importlib
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from ingot.cli.generate import Writing, load, print_figures, require_room
from ingot.core.errors import IngotError
from ingot.core.log import stderr
from ingot.interop.chat import ChatError, Message
from ingot.nn.session import Sampling, Session

if TYPE_CHECKING:
    from ingot.interop.model import Model


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
    require_room(max_tokens)
    model = load(directory)
    if model.tokenizer.chat_template is None:
        raise ChatError(
            f"the model in {directory} has no chat template: it was not tuned to chat",
            hint=f'have it go on from a text: ingot generate {directory} "Once upon a time"',
        )
    writing = Writing(model, Session(model.decoder), sampling, max_tokens)
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    if sys.stdin.isatty():
        stderr().print("[dim]Ctrl-C stops an answer, Ctrl-D leaves.[/]", highlight=False)
    while (line := _line()) is not None:
        messages.append({"role": "user", "content": line})
        written = writing.run(_ids(model, messages))
        print_figures(written)
        messages.append({"role": "assistant", "content": written.text})
        if written.ended == "interrupt" and not sys.stdin.isatty():
            raise KeyboardInterrupt


def _ids(model: Model, messages: list[Message]) -> list[int]:
    ids, context = model.tokenizer.encode_chat(messages), model.decoder.config.max_seq_len
    if len(ids) > context:
        raise IngotError(
            f"the conversation has {len(ids):,} tokens, the model takes {context:,}",
            hint="begin a new one, or send shorter messages",
        )
    return ids


def _line() -> str | None:
    """What the user says next, None when they leave; empty lines are passed over."""
    terminal = sys.stdin.isatty()
    if terminal:
        with suppress(ImportError):
            importlib.import_module("readline")  # then input() knows arrows and history
    try:
        while True:
            line = input("> " if terminal and sys.stdout.isatty() else "").strip()
            if line:
                return line
    except (EOFError, KeyboardInterrupt) as left:
        if not terminal and isinstance(left, KeyboardInterrupt):
            raise
        if terminal:
            print()  # noqa: T201
        return None
